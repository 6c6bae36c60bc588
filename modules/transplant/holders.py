"""Whose layers hold codes: one bridge to each library, with the same verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transplant import sdnq_bridge
from transplant.formats.base import Codes, Form
from transplant.sdnq_bridge import Compute

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


@dataclass(frozen=True)
class Holder:
    """What a library does with codes.

    Attributes:
        quantized_layer: a layer in the place of a Linear.
        decoded: the values, [N, K].
        mark_quantized: makes diffusers treat a model with such layers as quantized; given the layers that never
            multiply in low precision.
    """

    quantized_layer: Callable[[torch.nn.Module, Codes, torch.dtype, Compute], torch.nn.Module]
    decoded: Callable[[Codes, tuple[int, int], torch.dtype, Compute], torch.Tensor]
    mark_quantized: Callable[[ModelMixin, torch.dtype, Compute, Sequence[str]], None]


def holder_of(form: Form) -> Holder:
    """The holder of a form. The gguf package is imported when the first one is asked for."""
    if form.holder == "sdnq":
        return Holder(sdnq_bridge.quantized_layer, sdnq_bridge.decoded, sdnq_bridge.mark_quantized)
    from transplant import gguf_bridge

    return Holder(gguf_bridge.quantized_layer, gguf_bridge.decoded, gguf_bridge.mark_quantized)
