"""int8_tensorwise: int8 codes with one scale a tensor or a row, optionally rotated (ConvRot).

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/int8.py`. w = q * scale in fp32; with ConvRot then
`(w.view(N, K / g, g) @ H_g)` in fp32, H_g the regular Hadamard matrix of size g (a power of 4); cast last.
"""

from __future__ import annotations

import torch

from transplant.formats.base import (
    Codes,
    Form,
    Format,
    FormatError,
    Portable,
    QuantizedLayer,
    Read,
    Rows,
    check_finite_and_positive,
    matrix_shape,
)
from transplant.formats.rotation import rotation_size


def logical_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """(N, K): the stored shape."""
    return matrix_shape(layer)


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The codes as stored; the scale as [1, 1] or [n, 1] in fp32."""
    hadamard = rotation_size(layer, rows.shape[1]) if layer.params.get("convrot") else 0
    scale = row_scale(read, rows)
    form = Form("int8", -2 if scale.numel() == 1 and rows.shape[0] > 1 else -1, hadamard, bool(hadamard))
    return Codes(form, read("weight", rows.start, rows.stop), scale)


def row_scale(read: Read, rows: Rows) -> torch.Tensor:
    """A scale that is stored as [], [1], [N] or [N, 1], as [1, 1] or [n, 1] in fp32. [N] means rows.

    Raises:
        FormatError: another shape, or values that cannot be scales.
    """
    scale = read("weight_scale")
    n = rows.shape[0]
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif tuple(scale.shape) in ((n,), (n, 1)):
        scale = scale.reshape(n, 1)[rows.start : rows.stop]
    else:
        raise FormatError(f"its weight_scale has shape {list(scale.shape)}; known are [], [1], [{n}] and [{n}, 1]")
    check_finite_and_positive("weight_scale", scale)
    return scale.to(torch.float32, copy=True)  # a file's view would be shared by all parts of a fused layer


FORMAT = Format(
    "int8_tensorwise", ("I8",), ("weight_scale",), logical_shape, adopt,
    ignores=("input_scale",), positive=("weight_scale",),
)  # fmt: skip
