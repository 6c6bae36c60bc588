"""float8_e4m3fn and float8_e5m2: fp8 codes with one scale a tensor or a row.

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/fp8.py`. w = q * scale. The scale stays in fp32, so
that the product is rounded once; comfy-kitchen's eager code rounds the scale to the output dtype first,
its Triton kernel does as we do.
"""

from __future__ import annotations

import torch

from transplant.formats.base import Codes, Form, Format, Portable, QuantizedLayer, Read, Rows
from transplant.formats.int8_tensorwise import logical_shape, row_scale

_TORCH_TO_SDNQ = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The codes as stored. Portable: e4m3 codes as the bytes that SDNQ decodes itself."""
    weight, scale = read("weight", rows.start, rows.stop), row_scale(read, rows)
    name = _TORCH_TO_SDNQ[weight.dtype]
    if portable.codes and weight.dtype == torch.float8_e4m3fn:
        weight, name = weight.view(torch.uint8), "float8_e4m3fn_sdnq"
    group = -2 if scale.numel() == 1 and rows.shape[0] > 1 else -1
    return Codes(Form(name, group, matmul_dtype="float8_e4m3fn"), weight, scale)


E4M3 = Format(
    "float8_e4m3fn", ("F8_E4M3",), ("weight_scale",), logical_shape, adopt,
    ignores=("input_scale",), positive=("weight_scale",),
)  # fmt: skip
E5M2 = Format(
    "float8_e5m2", ("F8_E5M2",), ("weight_scale",), logical_shape, adopt,
    ignores=("input_scale",), positive=("weight_scale",),
)  # fmt: skip
