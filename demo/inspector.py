"""Looks at a drawn picture and says what is in it, by plain image arithmetic; compares that with the scene."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import shapes
from shapes import Scene

Mask = NDArray[np.bool_]

MINIMUM = 60
"""Pixels; smaller spots are no things."""
LIKENESS = 0.65
"""Least overlap with the shape that a thing looks like most; a small star with edges 1.5 pixels soft has 0.70."""
ASPECT = 1.3
"""Largest longer to shorter side; every shape is nearly as wide as it is high."""
SIZES = {"small": (0, 31.5), "": (28, 44), "big": (41, 70)}
"""Diameters that pass for a size word."""


@dataclass(frozen=True)
class Found:
    """A thing in a picture: what it looks like most, its middle and longer side in pixels, longer to shorter side."""

    shape: str
    likeness: float
    color: str
    x: float
    y: float
    diameter: float
    aspect: float


def pixels_of(picture: Image.Image) -> NDArray[np.float64]:
    return np.asarray(picture.convert("RGB"), dtype=np.float64)


def background_of(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median color of the edge."""
    edge = np.concatenate([pixels[:3].reshape(-1, 3), pixels[-3:].reshape(-1, 3), pixels[:, :3].reshape(-1, 3),
                           pixels[:, -3:].reshape(-1, 3)])  # fmt: skip
    return np.median(edge, axis=0)


def components(mask: Mask) -> list[Mask]:
    """The connected parts of a mask, each as a mask of its own."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        padded = np.pad(labels, 1)
        around = [padded[1 + dy : padded.shape[0] - 1 + dy, 1 + dx : padded.shape[1] - 1 + dx]
                  for dy in (-1, 0, 1) for dx in (-1, 0, 1)]  # fmt: skip
        spread = np.where(mask, np.max(around, axis=0), 0)
        if np.array_equal(spread, labels):
            return [labels == number for number in np.unique(labels) if number]
        labels = spread


def filled(mask: Mask) -> Mask:
    """The mask with its holes: all that the picture's edge cannot reach."""
    outside = np.pad(~mask, 1, constant_values=True)
    reached = np.zeros_like(outside)
    reached[0] = True
    while True:
        wider = reached.copy()
        wider[1:] |= reached[:-1]
        wider[:-1] |= reached[1:]
        wider[:, 1:] |= reached[:, :-1]
        wider[:, :-1] |= reached[:, 1:]
        wider &= outside
        if np.array_equal(wider, reached):
            return ~reached[1:-1, 1:-1]
        reached = wider


def normal(mask: Mask) -> NDArray[np.float64]:
    """A mask's bounding box, stretched to 24 x 24."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    small = Image.fromarray((box * 255).astype(np.uint8)).resize((24, 24), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255


def overlap(seen: NDArray[np.float64], template: NDArray[np.float64]) -> float:
    """Intersection over union of two soft masks."""
    return float(np.minimum(seen, template).sum() / np.maximum(seen, template).sum())


@cache
def templates() -> dict[str, NDArray[np.float64]]:
    """The shapes themselves, seen as `normal` sees them."""
    return {shape: normal(_template(shape)) for shape in shapes.SHAPES}


def _template(shape: str) -> Mask:
    thing = shapes.Thing(shape, "red", 64, 64, 90)
    return pixels_of(shapes.render([thing], (255, 255, 255)))[:, :, 1] < 128


def nearest(color: NDArray[np.float64], names: dict[str, shapes.Color]) -> str:
    return min(names, key=lambda name: float(np.square(color - np.array(names[name])).sum()))


def within_edges(part: Mask, distance: NDArray[np.float64]) -> Mask:
    """A thing up to where its color is half there: a soft edge lies in the middle of its slope."""
    inside = part & (distance > np.quantile(distance[part], 0.9) / 2)
    return max(components(inside), key=lambda mask: int(mask.sum()))


def find(picture: Image.Image) -> list[Found]:
    """The things in a picture, whatever its style."""
    pixels = pixels_of(picture)
    background = background_of(pixels)
    distance = np.sqrt(np.square(pixels - background).sum(2))
    found = []
    for spot in components(distance > 45):
        if spot.sum() < MINIMUM:
            continue
        part = within_edges(spot, distance)
        whole = filled(part)
        seen = normal(whole)
        likeness = {
            name: float(np.minimum(seen, t).sum() / np.maximum(seen, t).sum()) for name, t in templates().items()
        }
        shape = max(likeness, key=lambda name: likeness[name])
        strongest = part & (distance >= np.quantile(distance[part], 0.4))
        color = nearest(np.median(pixels[strongest], axis=0), shapes.COLORS)
        rows, columns = np.flatnonzero(whole.any(1)), np.flatnonzero(whole.any(0))
        height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        x, y = (columns[0] + columns[-1] + 1) / 2, (rows[0] + rows[-1] + 1) / 2
        short, long = sorted((float(width), float(height)))
        found.append(Found(shape, likeness[shape], color, float(x), float(y), long, long / short))
    return found


def faults(scene: Scene, picture: Image.Image) -> list[str]:
    """What in a picture differs from its scene, as words; none where it is drawn right."""
    found = find(picture)
    wrong = []
    background = nearest(background_of(pixels_of(picture)), shapes.BACKGROUNDS)
    if background != scene.background:
        wrong.append(f"background {background}")
    groups = _groups(scene, found)
    if groups is None:
        return [*wrong, f"{len(found)} things, not {sum(group.count for group in scene.groups)}"]
    for group, things in zip(scene.groups, groups, strict=True):
        low, high = SIZES[group.size]
        if group.count == 3:
            low, high = (0, 30) if group.size else (26, 44)
        for thing in things:
            if thing.color != group.color:
                wrong.append(f"color {thing.color}, not {group.color}")
            if thing.shape != group.shape or thing.likeness < LIKENESS:
                wrong.append(f"shape {thing.shape} {thing.likeness:.2f}, not {group.shape}")
            if thing.aspect > ASPECT:
                wrong.append(f"{thing.aspect:.2f} times as long as short")
            if not low <= thing.diameter <= high:
                wrong.append(f"diameter {thing.diameter:.0f}, not {group.size or 'medium'}")
    return wrong + _misplaced(scene, groups)


def _groups(scene: Scene, found: list[Found]) -> list[list[Found]] | None:
    """The things of each group, told apart by where they are; None where their number is another."""
    if len(found) != sum(group.count for group in scene.groups):
        return None
    if not scene.relation:
        return [found]
    axis, order = shapes.RELATIONS[scene.relation]
    ordered = sorted(found, key=lambda thing: order * (thing.y if axis else thing.x))
    return [ordered[: scene.groups[0].count], ordered[scene.groups[0].count :]]


def _misplaced(scene: Scene, groups: list[list[Found]]) -> list[str]:
    """Things that are far from where the scene has them."""
    wrong = []
    wanted = shapes.lay_out(scene, random.Random(0))
    seen = [thing for group in groups for thing in group]
    for thing in wanted:
        nearest_thing = min(seen, key=lambda other: (other.x - thing.x) ** 2 + (other.y - thing.y) ** 2)
        if max(abs(nearest_thing.x - thing.x), abs(nearest_thing.y - thing.y)) > 16:
            wrong.append(f"nothing at {thing.x:.0f}, {thing.y:.0f}")
    return wrong
