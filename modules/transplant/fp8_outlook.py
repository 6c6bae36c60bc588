"""What FP8 storage will do for the models at hand, in a sentence, before anyone switches it on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from transplant.compute_dtype import compute_dtype
from transplant.fp8_storage import FP8, STORAGE, castable_layers, is_quantized, skip_patterns, support_on

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

State = Literal["acts", "quantized", "no device", "nothing loaded"]


@dataclass(frozen=True)
class Outlook:
    """What FP8 storage does, or would do.

    Attributes:
        state: "acts": some weights rest in fp8 or would; "quantized": the weights are quantized already and
            stay as they are; "no device": the device cannot hold fp8; "nothing loaded": it depends on the model.
        text: the same for people, with the sizes where it acts.
        before: bytes of the parameters without it.
        after: bytes of the parameters with it.
    """

    state: State
    text: str
    before: int = 0
    after: int = 0

    @property
    def possible(self) -> bool:
        """Whether switching it on can do anything on this device, for this model or for another one."""
        return self.state != "no device"


def outlook(
    models: Mapping[str, ModelMixin], of_specs: Mapping[str, Iterable[str]], device: torch.device, wanted: bool = False
) -> Outlook:
    """What FP8 storage does for loaded models.

    Args:
        models: the transformers by component.
        of_specs: skip patterns of their architectures by component.
        device: where they run.
        wanted: whether it is on.

    Returns:
        The state of the whole; its text names a component that stays as it is beside one that does not.
    """
    support = support_on(device)
    if not support.possible:
        return Outlook("no device", f"No effect: {support.reason}.")
    if not models:
        return Outlook("nothing loaded", "Choose a model to see what it saves.")
    sizes = {name: sizes_of(model, of_specs.get(name, ())) for name, model in models.items() if not is_quantized(model)}
    if not sizes:
        return Outlook("quantized", "No effect: the weights are already quantized and stay as they are.")
    before, after = (sum(column) for column in zip(*sizes.values(), strict=True))
    text = (
        f"{_megabytes(after)} MB instead of {_megabytes(before)} MB"
        if wanted
        else (f"{_megabytes(before)} MB → {_megabytes(after)} MB")
    )
    stays = "".join(f" {name} is already quantized and stays as it is." for name in models if name not in sizes)
    return Outlook("acts", f"{text}.{stays}", before, after)


def sizes_of(model: ModelMixin, of_spec: Iterable[str]) -> tuple[int, int]:
    """Bytes of a model's parameters without and with FP8 storage.

    Args:
        model: a model that is not quantized; its weights may be on meta or rest in fp8 already.
        of_spec: skip patterns of its architecture.
    """
    cast = frozenset(castable_layers(model, skip_patterns(type(model), of_spec)))
    wide = compute_dtype(model).itemsize
    before = after = 0
    for name, parameter in model.named_parameters():
        rests = parameter.dtype in FP8
        before += parameter.numel() * wide if rests else parameter.nbytes
        after += parameter.numel() * STORAGE.itemsize if rests or name.rpartition(".")[0] in cast else parameter.nbytes
    return before, after


def _megabytes(nbytes: int) -> str:
    """MB of 2**20 bytes, as the log line and the figures of others have it."""
    return f"{nbytes / 2**20:.0f}" if nbytes >= 10 * 2**20 else f"{nbytes / 2**20:.2f}"
