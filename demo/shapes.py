"""The world of the built-in demo: what can be in a picture, what its prompt says, and the picture itself.

A scene has one or two groups of like things on a plain background. Its prompt names all that is decided, for example
"two small red circles left of a blue square on black". `draw` draws it, in one of the styles of the fine-tunes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageChops, ImageDraw

Color = tuple[int, int, int]
Style = Literal["plain", "outlines", "pastel", "pencil"]

SIZE = 128
"""Pixels of a picture's side."""
FINE = 2
"""Pictures are drawn so many times larger and averaged down."""

COLORS: dict[str, Color] = {
    "red": (220, 30, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 40),
    "purple": (140, 50, 170),
    "orange": (250, 140, 30),
}
BACKGROUNDS: dict[str, Color] = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "gray": (150, 150, 150),
    "pink": (250, 190, 205),
}
SHAPES = ("circle", "square", "triangle", "star")
DIAMETERS = {"small": 26.0, "": 38.0, "big": 48.0}
"""Pixels from edge to edge, by the word for it."""
PLACES = {"": (0.5, 0.5), "left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
"""Where a single thing is, in sides of the picture from the top left."""
RELATIONS = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "below": (1, -1)}
"""Axis, and whether the first group comes first on it."""
COUNTS = {1: "a", 2: "two", 3: "three"}
STYLES: tuple[Style, ...] = ("plain", "outlines", "pastel", "pencil")


@dataclass(frozen=True)
class Group:
    """`count` things of one kind."""

    count: int
    size: str
    color: str
    shape: str

    @property
    def words(self) -> str:
        noun = f"{self.shape}s" if self.count > 1 else self.shape
        article = "an" if self.count == 1 and not self.size and self.color == "orange" else COUNTS[self.count]
        return " ".join(word for word in (article, self.size, self.color, noun) if word)


@dataclass(frozen=True)
class Scene:
    """What is in a picture.

    Attributes:
        groups: one or two.
        relation: of the first group to the second one; empty where there is one.
        place: of a single thing; empty is the middle.
        background: its color's name.
    """

    groups: tuple[Group, ...]
    relation: str
    place: str
    background: str

    @property
    def prompt(self) -> str:
        first, *rest = (group.words for group in self.groups)
        place = f" at the {self.place}" if self.place else ""
        relation = f" {self.relation} {rest[0]}" if rest else ""
        return f"{first}{place}{relation} on {self.background}"

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other scenes but for the background, whichever group is named first."""
        if not self.relation:
            return (*self.groups, self.place)
        axis, order = RELATIONS[self.relation]
        return (*self.groups[::order], axis)


@dataclass(frozen=True)
class Thing:
    """One thing in a picture: its middle and its diameter in pixels."""

    shape: str
    color: str
    x: float
    y: float
    diameter: float


def random_group(rng: random.Random, counts: tuple[int, ...]) -> Group:
    count = rng.choice(counts)
    sizes = ("", "", "small") if count == 3 else ("", "", "small", "big")
    return Group(count, rng.choice(sizes), rng.choice(list(COLORS)), rng.choice(SHAPES))


def random_scene(rng: random.Random) -> Scene:
    """Half of the scenes have two different groups, the others one thing somewhere or some in a row."""
    background = rng.choice(list(BACKGROUNDS))
    kind = rng.random()
    if kind < 0.3:
        return Scene((random_group(rng, (1,)),), "", rng.choice(list(PLACES)), background)
    if kind < 0.5:
        return Scene((random_group(rng, (2, 3)),), "", "", background)
    first = second = random_group(rng, (1, 1, 2))
    while (second.color, second.shape) == (first.color, first.shape):
        second = random_group(rng, (1, 1, 2))
    return Scene((first, second), rng.choice(list(RELATIONS)), "", background)


def held_out() -> list[Scene]:
    """The 64 scenes of the check, each of another `key`; no scene with one of these keys is trained on."""
    rng = random.Random("held out")
    scenes: dict[tuple[object, ...], Scene] = {}
    while len(scenes) < 64:
        scene = random_scene(rng)
        scenes.setdefault(scene.key, scene)
    return list(scenes.values())


HELD_OUT_KEYS = frozenset(scene.key for scene in held_out())


def training_scene(rng: random.Random) -> Scene:
    while (scene := random_scene(rng)).key in HELD_OUT_KEYS:
        pass
    return scene


# The picture


def lay_out(scene: Scene, rng: random.Random) -> list[Thing]:
    """Where the things of a scene go, group by group; a little at random."""
    if scene.relation:
        axis, order = RELATIONS[scene.relation]
        return [
            thing
            for group, middle in zip(scene.groups, (0.25, 0.75)[::order], strict=True)
            for thing in _row(group, rng, axis, middle)
        ]
    (group,) = scene.groups
    if group.count > 1:
        return _row(group, rng, 1, 0.5)
    x, y = PLACES[scene.place]
    return [_thing(group, rng, x * SIZE, y * SIZE)]


def _row(group: Group, rng: random.Random, axis: int, middle: float) -> list[Thing]:
    """A group around `middle` on the axis, its things one after the other on the other axis."""
    places = [(number + 0.5) / group.count for number in range(group.count)]
    if group.count == 2:
        places = [0.27, 0.73]
    points = [(middle, place) if axis == 0 else (place, middle) for place in places]
    return [_thing(group, rng, x * SIZE, y * SIZE) for x, y in points]


def _thing(group: Group, rng: random.Random, x: float, y: float) -> Thing:
    crowded = group.size == "big" or group.count == 3
    shift = 1.5 if crowded else 3.0
    diameter = DIAMETERS[group.size] * rng.uniform(0.95, 1.05)
    if group.count == 3 and not group.size:
        diameter *= 0.85
    return Thing(group.shape, group.color, x + rng.uniform(-shift, shift), y + rng.uniform(-shift, shift), diameter)


def corners(shape: str, x: float, y: float, diameter: float) -> list[tuple[float, float]]:
    """The outline as a polygon; the bounding box's middle is (x, y)."""
    half = diameter / 2
    if shape == "square":
        side = half * 0.92
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    if shape == "triangle":
        return [(x, y - half), (x + half, y + half * 0.9), (x - half, y + half * 0.9)]
    if shape == "star":
        radii = (half * 1.12, half * 0.5)
        turns = [(radii[i % 2], math.pi * (i / 5 - 0.5)) for i in range(10)]
        return [(x + r * math.cos(turn), y + half * 0.1 + r * math.sin(turn)) for r, turn in turns]
    turns = [math.tau * i / 48 for i in range(48)]
    return [(x + half * math.cos(turn), y + half * math.sin(turn)) for turn in turns]


def draw(scene: Scene, rng: random.Random, style: Style = "plain") -> Image.Image:
    """The picture of a scene, RGB, SIZE x SIZE."""
    things = lay_out(scene, rng)
    return render(things, BACKGROUNDS[scene.background], style)


def render(things: list[Thing], background: Color, style: Style = "plain") -> Image.Image:
    """Things on a background, RGB, SIZE x SIZE."""
    if style == "pencil":
        return _pencil(things)
    if style == "pastel":
        background = mix(background, (255, 250, 235), 0.55)
    picture = Image.new("RGB", (SIZE * FINE, SIZE * FINE), background)
    pen = ImageDraw.Draw(picture)
    for thing in things:
        color = COLORS[thing.color]
        points = _points(thing)
        if style == "outlines":
            pen.polygon(points, fill=background)
            pen.line([*points, *points[:2]], fill=color, width=4 * FINE, joint="curve")
        else:
            pen.polygon(points, fill=mix(color, (255, 250, 235), 0.55) if style == "pastel" else color)
    return picture.reduce(FINE)


def mix(color: Color, other: Color, share: float) -> Color:
    """A color with a share of another one."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(color, other, strict=True))
    return red, green, blue


def _points(thing: Thing) -> list[tuple[float, float]]:
    return [(x * FINE, y * FINE) for x, y in corners(thing.shape, thing.x, thing.y, thing.diameter)]


def _pencil(things: list[Thing]) -> Image.Image:
    """Dark outlines and slanted hatching on paper, without colors: a darker color is hatched closer."""
    paper, lead = (244, 240, 228), (70, 70, 76)
    side = SIZE * FINE
    picture = Image.new("RGB", (side, side), paper)
    for thing in things:
        points = _points(thing)
        inside = Image.new("L", (side, side), 0)
        ImageDraw.Draw(inside).polygon(points, fill=255)
        hatching = Image.new("L", (side, side), 0)
        pen = ImageDraw.Draw(hatching)
        for start in range(-side, side, 8 * FINE):
            pen.line([(start, side), (start + side, 0)], fill=160, width=2 * FINE)
        picture.paste(lead, mask=ImageChops.multiply(inside, hatching))
        ImageDraw.Draw(picture).line([*points, *points[:2]], fill=lead, width=3 * FINE, joint="curve")
    return picture.reduce(FINE)
