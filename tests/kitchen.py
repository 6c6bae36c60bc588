"""Quantized layers written by comfy-kitchen, and what its eager code says that they are worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import comfy_kitchen
import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

from transplant.checkpoint.header import TensorInfo
from transplant.checkpoint.reader import TORCH_DTYPES
from transplant.formats import formats
from transplant.formats.base import Codes, Portable, QuantizedLayer, Rows, check_layer
from transplant.sdnq_package import has_scales_of_scales

comfy_kitchen.set_backend_priority(["eager"])

SAFETENSORS = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A layer as a file stores it.

    Attributes:
        tensors: by role (`weight`, `weight_scale`, ...).
        marker: the declaration.
        reference: the same layer as comfy-kitchen holds it.
    """

    tensors: Mapping[str, torch.Tensor]
    marker: Mapping[str, Any]
    reference: QuantizedTensor

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape."""
        return tuple(self.reference._params.orig_shape)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """comfy-kitchen's eager dequantization in `dtype`, without padding."""
        params = replace(self.reference._params, orig_dtype=dtype)
        value = get_layout_class(self.reference._layout_cls).dequantize(self.reference._qdata, params)
        return value[: self.shape[0], : self.shape[1]]

    def stored(self, name: str, marker: bool = True) -> dict[str, torch.Tensor]:
        """The tensors under a layer's name, with the marker tensor."""
        tensors = {f"{name}.{role}": tensor.contiguous() for role, tensor in self.tensors.items()}
        if marker:
            text = json.dumps(self.marker).encode()
            tensors[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors

    def layer(self) -> QuantizedLayer:
        """The layer as containers.py would declare it."""
        infos = {
            role: TensorInfo(role, SAFETENSORS[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
            for role, tensor in self.tensors.items()
        }
        return QuantizedLayer("layer", str(self.marker["format"]), self.marker, "markers", infos)

    def codes(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        portable: bool = False,
        plain: bool = False,
        meta: bool = False,
    ) -> Codes:
        """Our codes of some rows, checked as a load checks them."""

        def read(role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
            tensor = self.tensors[role][start:stop] if self.tensors[role].ndim else self.tensors[role]
            return tensor.to("meta") if meta else tensor

        layer, layer_format = self.layer(), formats()[str(self.marker["format"])]
        check_layer(layer, layer_format)
        rows = Rows(start, self.shape[0] if stop is None else stop, self.shape)
        return layer_format.adopt(layer, read, rows, Portable(portable, portable, plain or not has_scales_of_scales()))


def write(weight: torch.Tensor, layout: str, marker: Mapping[str, Any], **options: Any) -> Written:
    """Quantize with one of comfy-kitchen's layouts; tensors named as it saves them."""
    quantized = QuantizedTensor.from_float(weight, layout, **options)
    tensors = {name.removeprefix("."): tensor for name, tensor in quantized.state_dict(".weight").items()}
    return Written(tensors, marker, quantized)


def int8(weight: torch.Tensor, *, per_row: bool = True, convrot: int = 0) -> Written:
    """int8_tensorwise, a scale a row or one for all, rotated where `convrot` is a size."""
    marker: dict[str, Any] = {"format": "int8_tensorwise"}
    if convrot:
        marker |= {"convrot": True, "convrot_groupsize": convrot}
    return write(
        weight, "TensorWiseINT8Layout", marker, per_channel=per_row, convrot=bool(convrot),
        convrot_groupsize=convrot or 256,
    )  # fmt: skip


def float8(weight: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Written:
    """float8_e4m3fn or float8_e5m2 with one scale."""
    return write(weight, "TensorCoreFP8Layout", {"format": str(dtype).removeprefix("torch.")}, dtype=dtype)


def float8_by_rows(weight: torch.Tensor) -> Written:
    """float8_e4m3fn with a scale a row, which comfy-kitchen reads but does not write."""
    scale = (weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    whole = float8(weight)
    reference = QuantizedTensor(
        codes, whole.reference._layout_cls, replace(whole.reference._params, scale=scale)
    )  # fmt: skip
    return Written({"weight": codes, "weight_scale": scale}, whole.marker, reference)
