"""convrot_w4a4: 4-bit codes with one scale a row, rotated by a Hadamard matrix (ConvRot).

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/convrot_w4a4.py`. Two's complement nibbles, even column in the
low one. w = (q * scale[n]).view(N, K / g, g) @ H_g in fp32, cast last. `linear_dtype` only says in which dtype
ComfyUI multiplies; the codes are the same.
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

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the 4-bit formats' scales may be stored in."""


def logical_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """(N, K) of codes stored as [N, K / 2]."""
    rows, packed = matrix_shape(layer)
    return rows, 2 * packed


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """SDNQ's int4 is offset binary, nibble = q + 8: the stored bytes with both sign bits flipped.

    Returns:
        Codes of weight [n, K / 2] uint8 and scale [n, 1] fp32.
    """
    linear_dtype = layer.params.get("linear_dtype", "int4")
    if linear_dtype not in ("int4", "int8"):
        raise FormatError(f"its linear_dtype is {linear_dtype!r}; known are 'int4' and 'int8'")
    form = Form("int4", hadamard=rotation_size(layer, rows.shape[1]), fp32_rotation=True)
    scale = scale_of_rows("weight_scale", read, rows)
    return Codes(form, read("weight", rows.start, rows.stop).view(torch.uint8) ^ 0x88, scale)


def scale_of_rows(role: str, read: Read, rows: Rows) -> torch.Tensor:
    """A scale that is stored as [N] or [N, 1], as [n, 1] in fp32.

    Raises:
        FormatError: another shape or dtype, or values that cannot be scales.
    """
    scale = read(role)
    n = rows.shape[0]
    if tuple(scale.shape) not in ((n,), (n, 1)):
        raise FormatError(f"its {role} has shape {list(scale.shape)}; known are [{n}] and [{n}, 1]")
    check_dtype(role, scale, SCALE_DTYPES)
    scale = scale.reshape(n, 1)[rows.start : rows.stop].to(torch.float32, copy=True)
    check_finite_and_positive(role, scale)
    return scale


def check_dtype(role: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Check what a scale or table is stored in.

    Raises:
        FormatError: none of `allowed`.
    """
    if tensor.dtype not in allowed:
        names = [str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *allowed)]
        raise FormatError(f"its {role} is stored as {names[0]}; known are {', '.join(names[1:])}")


FORMAT = Format(
    "convrot_w4a4", ("I8",), ("weight_scale",), logical_shape, adopt,
    ignores=("input_scale",), positive=("weight_scale",),
)  # fmt: skip
