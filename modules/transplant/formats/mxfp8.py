"""mxfp8: e4m3 codes with a power of two (e8m0) for 32 columns.

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/mxfp8.py`. w = q * 2^(scale - 127) in fp32, cast last.
Stored: rows and columns padded to 32; scales in cuBLAS's tiles. comfy-kitchen reads the scale byte 0 as 0,
the OCP specification and torch as 2^-127; it stands for blocks of zeros, where both give the same.
"""

from __future__ import annotations

import torch

from transplant.formats.base import Codes, Form, Format, Portable, QuantizedLayer, Read, Rows, divisor
from transplant.formats.block_scales import block_scales, check_blocks, padded_shape

BLOCK = 32
"""Columns that share a scale; rows and columns are padded to it."""


def logical_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """(N, K): the declaration's `orig_shape`, else the stored shape with its padding.

    Raises:
        FormatError: the weight is not a padded matrix, or contradicts `orig_shape`.
    """
    return padded_shape(layer, 1, BLOCK)


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The codes as stored, without padding.

    Scales stay at one byte, 1.03125 bytes a weight. Portable: as bf16, which holds every e8m0 value, 1.0625
    bytes a weight. Where Triton cannot convert e4m3, SDNQ casts the codes to the scales' dtype, and e8m0
    there would be silently wrong (`sdnq/dequantizer.py`, is_fp8_compile_supported). Products below 2^-133
    are then lost even in fp32.

    Raises:
        FormatError: shapes or dtypes that mxfp8 does not have, or scales that cannot be.
    """
    k = rows.shape[1]
    check_blocks(layer, logical_shape(layer), rows, BLOCK, BLOCK)
    group = divisor(BLOCK, k)
    scale = block_scales(read, rows, BLOCK, torch.float8_e8m0fnu)
    weight = read("weight", rows.start, rows.stop)[:, :k].contiguous().view(rows.count, k // group, group)
    if portable.scales or portable.plain:
        return Codes(Form("float8_e4m3fn", group, matmul_dtype="float8_e4m3fn"), weight, scale.to(torch.bfloat16))
    form = Form("float8_e4m3fn", group, scale_dtype="float8_e8m0fnu", matmul_dtype="float8_e4m3fn")
    return Codes(form, weight, scale, torch.ones(1, device=scale.device))


FORMAT = Format(
    "mxfp8", ("F8_E4M3",), ("weight_scale",), logical_shape, adopt, ignores=("input_scale",), padded=(BLOCK, BLOCK)
)
