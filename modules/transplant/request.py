"""What to draw: as a form or an API call asks for it, and as a picture's metadata tell it. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from transplant.errors import OptionError, printable
from transplant.samplers import DEFAULT_SAMPLER

MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Limit:
    """Which numbers a field takes.

    Attributes:
        least: the smallest.
        most: the largest.
        multiple: what it must be a multiple of; 0 where it need not be whole.
    """

    least: int
    most: int
    multiple: int = 1

    def checked(self, name: str, value: float | None) -> float:
        """The value; whole where it must be. Raises OptionError."""
        if value is not None and self.least <= value <= self.most:
            if not self.multiple:
                return float(value)
            if value == int(value) and not value % self.multiple:
                return int(value)
        raise OptionError(name, value, f"must be {self}" + ("" if value is None else f", not {value}"))

    def __str__(self) -> str:
        what = "a whole number from" if self.multiple else "from"
        step = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{what} {self.least} to {self.most}{step}"


LIMITS = {
    "steps": Limit(1, 200),
    "guidance": Limit(0, 30, 0),
    "width": Limit(64, 4096, 16),
    "height": Limit(64, 4096, 16),
    "seed": Limit(-1, 2**63 - 1),
    "pictures": Limit(1, 64),
    "frames": Limit(1, 1000),
}
"""What can be asked for, on the page, over HTTP and on the command line alike."""


@dataclass(frozen=True)
class Request:
    """What to draw.

    Attributes:
        prompt: what should be in the picture.
        negative_prompt: what should not; only used where guidance is on.
        steps: number of denoising steps, 1 or more.
        guidance: guidance scale; the pipeline's own scale of values.
        width: pixels.
        height: pixels.
        seed: of the first picture; the next ones count up. 0 to 2**63 - 1.
        batch: number of pictures.
        sampler: name in `samplers.SAMPLERS`; "Default" for the base model's own.
        frames: number of frames, where the pipeline makes video; 1 makes a picture.

    Raises:
        OptionError: a prompt is no text.
    """

    prompt: str
    negative_prompt: str = ""
    steps: int = 8
    guidance: float = 1.0
    width: int = 256
    height: int = 256
    seed: int = 0
    batch: int = 1
    sampler: str = DEFAULT_SAMPLER
    frames: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt", "negative_prompt"):
            lone = next((char for char in getattr(self, name) if "\ud800" <= char <= "\udfff"), None)
            if lone is not None:
                raise OptionError(name, lone, f"{printable(lone)} is half of a character: remove it, or write it whole")


def make_request(
    prompt: str,
    negative: str,
    steps: float | None,
    guidance: float | None,
    width: float | None,
    height: float | None,
    seed: float | None,
    batch: float | None,
    sampler: str | None = None,
    frames: float | None = 1,
) -> Request:
    """A request from the fields of a form; an empty number is None. Seed -1 draws one.

    Raises:
        OptionError: a field holds what cannot be drawn.
    """

    def whole(name: str, value: float | None) -> int:
        return int(LIMITS[name].checked(name, value))

    number = whole("seed", seed)
    return Request(
        prompt, negative, whole("steps", steps), LIMITS["guidance"].checked("guidance", guidance),
        whole("width", width), whole("height", height), random.randint(0, MAX_SEED) if number == -1 else number,
        whole("pictures", batch), sampler or DEFAULT_SAMPLER, whole("frames", frames),
    )  # fmt: skip


def infotext(request: Request, seed: int, names: Mapping[str, str]) -> str:
    """Parameters in the form that SD.Next and others write into a picture's metadata.

    Args:
        request: what was drawn.
        seed: the picture's own seed.
        names: further entries in order, for example `Model`, `UNET` and `UNET hash`.
    """
    extras: dict[str, object] = {} if request.sampler == DEFAULT_SAMPLER else {"Sampler": request.sampler}
    if request.frames > 1:
        extras["Frames"] = request.frames
    entries = {
        "Steps": request.steps,
        **extras,
        "Size": f"{request.width}x{request.height}",
        "Seed": seed,
        "CFG scale": f"{request.guidance:g}",
        **{key: _quoted(value) for key, value in names.items()},
    }
    lines = [request.prompt]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in entries.items())])


def parse_infotext(text: str) -> dict[str, str]:
    """The parameters in a picture's metadata, from us, SD.Next or others that write the same form.

    Args:
        text: what `infotext` made, or the like.

    Returns:
        "Prompt", "Negative prompt" and every entry of the last line by its name; {} where the text is none such.
    """
    *prompt_lines, last = text.strip().split("\n")
    entries = {name.strip(): _unquoted(value) for name, value in _ENTRY.findall(last)}
    if "Steps" not in entries:
        return {}
    prompt, _, negative = "\n".join(prompt_lines).partition("Negative prompt:")
    return {"Prompt": prompt.strip(), "Negative prompt": negative.strip(), **entries}


_ENTRY = re.compile(r'\s*([\w \-/]+):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)')


def _quoted(value: str) -> str:
    """Quoted where it would read as more than one entry."""
    return f'"{value}"' if any(mark in value for mark in ',:"\n') else value


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value.strip()
