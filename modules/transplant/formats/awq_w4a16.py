"""awq_w4a16: unsigned 4-bit codes with a scale and a zero point a group of columns.

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/awq_w4a16.py`. Even column in the low nibble; w = (q - 8) * s + z,
s and z stored as [K / G, N]. The reference rounds after each step in the output dtype, SDNQ computes
(z - 8 s) + q * s and rounds once: equal in fp32, in bf16 and fp16 nearer to the exact value.
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
)
from transplant.formats.convrot_w4a4 import SCALE_DTYPES, check_dtype, logical_shape


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The codes as stored; rows of the weight are columns of its scales.

    Returns:
        Codes of weight [n, K / 2] uint8, scale [n, K / G, 1] in its stored dtype, zero_point of its shape in fp32.
        Without the dimension of the groups where one group is the whole row, as SDNQ does it.
    """
    group, columns = layer.number("group_size", 64), rows.shape[1]
    if columns % group:
        raise FormatError(f"its group_size {group} does not divide its {columns} columns")
    scale = _by_rows("weight_scale", read, rows, columns // group)
    check_finite_and_positive("weight_scale", scale, allow_zero=True)
    zero_point = _by_rows("weight_zeros", read, rows, columns // group).float() - 8 * scale.float()
    check_finite_and_positive("weight_zeros", zero_point.abs(), allow_zero=True)
    form = Form("uint4", group)
    if group == columns:
        form, scale, zero_point = Form("uint4"), scale.squeeze(-1), zero_point.squeeze(-1)
    return Codes(form, read("weight", rows.start, rows.stop).view(torch.uint8), scale, zero_point=zero_point)


def _by_rows(role: str, read: Read, rows: Rows, groups: int) -> torch.Tensor:
    """A scale stored as [K / G, N], as [n, K / G, 1]."""
    stored, wanted = read(role), (groups, rows.shape[0])
    if tuple(stored.shape) != wanted:
        raise FormatError(f"its {role} has shape {list(stored.shape)}, its group_size asks for {list(wanted)}")
    check_dtype(role, stored, SCALE_DTYPES)
    return stored[:, rows.start : rows.stop].t().contiguous().unsqueeze(-1)


FORMAT = Format(
    "awq_w4a16", ("I8",), ("weight_scale", "weight_zeros"), logical_shape, adopt, ignores=("input_scale",)
)  # fmt: skip
