"""What to draw: as a form or an API call asks for it, and as a picture's metadata tell it. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from transplant.errors import OptionError
from transplant.samplers import DEFAULT_SAMPLER

MAX_SEED = 2**32 - 1


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

    def whole(name: str, value: float | None, least: int, most: int, multiple: int = 1) -> int:
        if value is None or value != int(value) or not least <= value <= most or value % multiple:
            step = f", a multiple of {multiple}" if multiple > 1 else ""
            raise OptionError(name, value, f"must be a whole number from {least} to {most}{step}, not {value}")
        return int(value)

    number = whole("seed", seed, -1, 2**63 - 1)
    if guidance is None or not 0 <= guidance <= 30:
        raise OptionError("guidance", guidance, f"must be from 0 to 30, not {guidance}")
    return Request(
        prompt, negative, whole("steps", steps, 1, 200), float(guidance), whole("width", width, 64, 4096, 16),
        whole("height", height, 64, 4096, 16), random.randint(0, MAX_SEED) if number == -1 else number,
        whole("pictures", batch, 1, 64), sampler or DEFAULT_SAMPLER, whole("frames", frames, 1, 1000),
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
