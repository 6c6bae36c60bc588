"""What is known of the selected base model before it is loaded, and what a picture begins with: page, API, CLI alike.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transplant.architectures import spec_serving
from transplant.architectures.spec import TransformerSpec
from transplant.base_model import BaseModel, read_base
from transplant.errors import BaseModelError
from transplant.hosts.standalone.folders import BUILT_IN
from transplant.slots import PRIMARY

PROMPT = "a big yellow square left of a blue star on pink"
"""One that the built-in base model was never trained on."""

BUILT_IN_SIDE, CPU_SIDE = 128, 256
"""Width and height in pixels: what the built-in base model was trained for, and what a CPU draws in tolerable time."""


@dataclass(frozen=True)
class Start:
    """What a picture begins with where nothing is said.

    Attributes:
        prompt: one that the built-in base model draws; none for others.
        width: pixels.
        height: pixels.
    """

    prompt: str
    width: int
    height: int


def start_for(base: Path | None, on_cpu: bool, built_in: Path = BUILT_IN) -> Start:
    """What a picture begins with.

    Args:
        base: the base model's folder; None where none is chosen.
        on_cpu: whether it computes there.
        built_in: the models folder whose base models are the built-in ones.
    """
    if base is not None and base.is_relative_to(built_in):
        return Start(PROMPT, BUILT_IN_SIDE, BUILT_IN_SIDE)
    if base is None or on_cpu:
        return Start("", CPU_SIDE, CPU_SIDE)
    spec = _spec(base)
    return Start("", *(spec.picture if spec else TransformerSpec.picture))


def architecture_of(base: Path) -> str:
    """The architecture of a base model's transformer: its class where it is none of ours, "" if it cannot be read."""
    spec = _spec(base)
    if spec is not None:
        return spec.name
    read = _read(base)
    component = PRIMARY.component_in(read) if read else None
    return read.components[component].cls if read and component else ""


def _spec(base: Path) -> TransformerSpec | None:
    read = _read(base)
    component = PRIMARY.component_in(read) if read else None
    return spec_serving(read.components[component].cls, read.pipeline) if read and component else None


def _read(base: Path) -> BaseModel | None:
    try:
        return read_base(base)
    except BaseModelError:
        return None
