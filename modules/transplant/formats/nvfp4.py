"""nvfp4: 4-bit floats (E2M1), an e4m3 scale for 16 columns, an fp32 scale for the whole tensor.

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/nvfp4.py`. w = q * (weight_scale_2 * weight_scale).
Stored: two codes a byte, the even column in the high nibble, rows and columns padded to 16; block scales in
cuBLAS's tiles. Block scales stay at one byte: 0.5625 bytes a weight. SDNQ multiplies in fp32 and rounds
once, as comfy-kitchen's Triton kernel does; its eager code rounds scale and product to the output dtype.
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
    divisor,
    multiplied_out,
)
from transplant.formats.block_scales import block_scales, check_blocks, padded_shape
from transplant.own_memory import own_memory

BLOCK = 16
"""Columns that share a scale; rows and columns are padded to it."""

_AT_ONCE = 1 << 18
"""Bytes whose nibbles are exchanged at a time: they stay in the processor's cache."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def logical_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """(N, K): the declaration's `orig_shape`, else the stored shape with its padding.

    Raises:
        FormatError: the weight is not a padded matrix, or contradicts `orig_shape`.
    """
    return padded_shape(layer, 2, BLOCK)


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The codes with their nibbles exchanged, without padding; block scales as stored, 0.5625 bytes a weight.

    Plain: block scales times the tensor's in fp32, the same values in 0.75 bytes a weight.

    Raises:
        FormatError: shapes or dtypes that nvfp4 does not have, or scales that cannot be.
    """
    k = rows.shape[1]
    check_blocks(layer, logical_shape(layer), rows, BLOCK, BLOCK)
    if k % 2:
        raise FormatError(f"it has {k} columns; SDNQ cannot hold rows of an odd number of 4-bit codes")
    scale = block_scales(read, rows, BLOCK, torch.float8_e4m3fn)
    weight = swap_nibbles(read("weight", rows.start, rows.stop)[:, : k // 2])
    form = Form("float4_e2m1fn", divisor(BLOCK, k), scale_dtype="float8_e4m3fn", matmul_dtype="float8_e4m3fn")
    codes = Codes(form, weight, scale, _tensor_scale(read), input_scale=_input_scale(layer, read, k))
    return multiplied_out(codes) if portable.plain else codes


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes with high and low nibble exchanged, in memory of their own; on the CPU or on meta."""
    if packed.is_meta:
        return torch.empty_like(packed)
    swapped = own_memory(packed.numel()).view(packed.shape)
    step = max(_AT_ONCE // max(packed[:1].numel(), 1), 1)
    for into, part in zip(swapped.split(step), packed.split(step), strict=True):
        torch.bitwise_left_shift(part, 4, out=into)
        into |= part >> 4
    return swapped


def _tensor_scale(read: Read) -> torch.Tensor:
    """weight_scale_2 as [1] in fp32."""
    scale = read("weight_scale_2")
    if tuple(scale.shape) not in ((), (1,)) or scale.dtype not in _FLOATS:
        raise FormatError(f"its weight_scale_2 is {list(scale.shape)} in {scale.dtype}, not one floating-point number")
    check_finite_and_positive("weight_scale_2", scale)
    return scale.reshape(1).to(torch.float32, copy=True)


def _input_scale(layer: QuantizedLayer, read: Read, columns: int) -> torch.Tensor | None:
    """pre_quant_scale [K] (AWQ): multiplies the input, in the input's dtype; never part of the weight."""
    if "pre_quant_scale" not in layer.tensors:
        return None
    scale = read("pre_quant_scale")
    if tuple(scale.shape) != (columns,) or scale.dtype not in _FLOATS:
        raise FormatError(f"its pre_quant_scale is {list(scale.shape)} in {scale.dtype}, not [{columns}] in fp32 or 16")
    check_finite_and_positive("pre_quant_scale", scale)
    return scale.clone()


FORMAT = Format(
    "nvfp4",
    ("U8",),
    ("weight_scale", "weight_scale_2"),
    logical_shape,
    adopt,
    may_have=("pre_quant_scale",),
    ignores=("input_scale",),
    padded=(BLOCK, BLOCK),
    positive=("weight_scale_2", "pre_quant_scale"),
)
