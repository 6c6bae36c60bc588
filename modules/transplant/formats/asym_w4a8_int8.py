"""asym_w4a8_int8: 4- or 6-bit codes that stand for int8 values, rotated by a Hadamard matrix (ConvRot).

ComfyUI: `comfy/quant_ops.py`, comfy-kitchen `tensor/w4a8_int8.py`, `tensor/w4a8_packed.py`. A code's level is
codebook[q], or q - 8 (q - 32 of 6 bits) where there is none; i = clamp(round(level * s_rel), -127, 127) is an int8;
i * s_channel in fp32 is cast to the output dtype and rotated in it, which is what stock SDNQ does.

The rounding makes i no product of a code and a scale, so int8 is the narrowest plain form. Groups of 64 columns
and more keep their 4-bit codes, as indices into a table of the 16 int8 values a group.

`weight_correction`, which comfy-kitchen writes when it quantizes asymmetrically, is never read by ComfyUI.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from transplant.formats.convrot_w4a4 import SCALE_DTYPES, check_dtype, scale_of_rows
from transplant.formats.rotation import rotation_size

TABLE_GROUP = 64
"""From this group size on, 4-bit codes with a table are smaller than int8: 0.5 + 16 / G bytes a weight."""

_AT_ONCE = 1 << 20
"""Codes that are decoded at a time: the fp32 values of more would not stay in the cache."""


@dataclass(frozen=True)
class Packing:
    """How a layer's codes are packed.

    Attributes:
        columns: K.
        bits: 4 or 6.
        group: columns that share an s_rel.
    """

    columns: int
    bits: int
    group: int


def packing(layer: QuantizedLayer) -> Packing:
    """The packing, from the stored shapes: the width of a row alone tells 4 from 6 bits.

    Raises:
        FormatError: shapes and group size do not belong together, or comfy-kitchen has no such packing.
    """
    rows, width = matrix_shape(layer)
    shape, group = layer.tensors["weight_s_rel"].shape, layer.number("group_size", 16)
    if len(shape) != 2 or shape[0] != rows:
        raise FormatError(f"its weight_s_rel has shape {list(shape)}, not [{rows}, columns / group_size]")
    columns = shape[1] * group
    bits = next((bits for bits in (4, 6) if columns and 8 * width == bits * columns), 0)
    if not bits:
        raise FormatError(
            f"its weight has {width} bytes a row, which is neither 4 nor 6 bits "
            f"for the {columns} columns of {shape[1]} groups of its group_size {group}"
        )
    if group < 4 or (16 % group and group % 16) or (bits == 6 and group % 16):
        raise FormatError(f"its group_size {group} is none that {bits}-bit codes come in")
    multiple = {4: 16, 6: 32}[bits]
    if columns % multiple:
        raise FormatError(f"its {bits}-bit codes have {columns} columns, which is no multiple of {multiple}")
    return Packing(columns, bits, group)


def logical_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """(N, K): K by the groups of weight_s_rel."""
    rows, _ = matrix_shape(layer)
    return rows, packing(layer).columns


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The int8 values, or the 4-bit codes and a table of int8 values. Plain: always the int8 values.

    Returns:
        Codes of weight [n, K] int8 and scale [n, 1] fp32, or of weight [n, K / 2] uint8, scale [n, K / G, 16] int8
        and scale_2 [n, 1, 1] fp32.
    """
    packed = packing(layer)
    if packed.columns != rows.shape[1]:
        raise FormatError(f"its weight_s_rel stands for {packed.columns} columns, not {rows.shape[1]}")
    hadamard = rotation_size(layer, packed.columns)
    weight, codebook = read("weight", rows.start, rows.stop).view(torch.uint8), _codebook(layer, read, packed)
    relative, channel = _relative_scale(read, rows), scale_of_rows("weight_s_channel", read, rows)
    if packed.bits == 4 and TABLE_GROUP <= packed.group < packed.columns and not portable.plain:
        form = Form("uint4", packed.group, hadamard, scale_dtype="int8", codebook=True)
        levels = _levels(codebook, packed).to(relative.device)
        return Codes(form, weight, _on_grid(relative.unsqueeze(-1) * levels), channel.unsqueeze(-1))
    return Codes(Form("int8", hadamard=hadamard), decode(weight, relative, codebook, packed), channel)


def decode(
    weight: torch.Tensor, relative: torch.Tensor, codebook: torch.Tensor | None, packed: Packing
) -> torch.Tensor:
    """The int8 values that packed codes stand for.

    Args:
        weight: [n, K / 2] or [n, 3 K / 4] uint8.
        relative: s_rel [n, K / G] fp32.
        codebook: [16] fp32; None for evenly spaced levels.
        packed: how they are packed.

    Returns:
        [n, K] int8; on meta where `weight` is.
    """
    n, k = weight.shape[0], packed.columns
    values = torch.empty((n, k), dtype=torch.int8, device=weight.device)
    if weight.is_meta:
        return values
    nibble, field = _tables(codebook, packed)
    step = max(1, _AT_ONCE // k)
    for start in range(0, n, step):
        part = weight[start : start + step]
        levels = _looked_up(nibble, part[:, : k // 2])
        if packed.bits == 6:
            levels += _looked_up(field, part[:, k // 2 :])
        scaled = levels.view(len(part), -1, packed.group).mul_(relative[start : start + step].unsqueeze(-1))
        values[start : start + step] = _on_grid(scaled).view(len(part), k)
    return values


def _tables(codebook: torch.Tensor | None, packed: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """What a byte adds to the levels of its columns: [256, 2] of two low nibbles, [256, 4] of four upper 2-bit fields.

    Column c has its upper bits in byte c // 4 at bit 2 * (c % 4).
    """
    byte, levels = torch.arange(256), _levels(codebook, packed)
    nibble = torch.stack([levels[byte & 15], levels[byte >> 4]], 1)
    return nibble, torch.stack([16 * (byte >> shift & 3) for shift in (0, 2, 4, 6)], 1).float()


def _levels(codebook: torch.Tensor | None, packed: Packing) -> torch.Tensor:
    """Levels [16] of a code's lower four bits."""
    if codebook is None:
        return torch.arange(16, dtype=torch.float32) - (8 if packed.bits == 4 else 32)
    return codebook


def _looked_up(table: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Bytes [n, m] as [n, m * columns of the table]."""
    return table.index_select(0, data.flatten().int()).view(len(data), -1)


def _on_grid(values: torch.Tensor) -> torch.Tensor:
    return values.round_().clamp_(-127, 127).to(torch.int8)


def _relative_scale(read: Read, rows: Rows) -> torch.Tensor:
    """s_rel as [n, K / G] in fp32. U8 holds e4m3 codes; a group of zeros has the scale zero."""
    relative = read("weight_s_rel", rows.start, rows.stop)
    check_dtype("weight_s_rel", relative, (torch.float8_e4m3fn, torch.uint8, *SCALE_DTYPES))
    values = (relative.view(torch.float8_e4m3fn) if relative.dtype == torch.uint8 else relative).float()
    check_finite_and_positive("weight_s_rel", values, allow_zero=True)
    return values


def _codebook(layer: QuantizedLayer, read: Read, packed: Packing) -> torch.Tensor | None:
    """The levels [16] of the 4-bit codes in fp32, None where they are evenly spaced."""
    if "weight_codebook" not in layer.tensors:
        return None
    codebook = read("weight_codebook")
    if packed.bits == 6:
        raise FormatError("it has a weight_codebook, but its codes have 6 bits")
    if tuple(codebook.shape) != (16,):
        raise FormatError(f"its weight_codebook has shape {list(codebook.shape)}, not [16]")
    check_dtype("weight_codebook", codebook, SCALE_DTYPES)
    codebook = codebook.float()
    check_finite_and_positive("weight_codebook", codebook.abs(), allow_zero=True)
    return codebook


FORMAT = Format(
    "asym_w4a8_int8", ("I8",), ("weight_s_rel", "weight_s_channel"), logical_shape, adopt,
    may_have=("weight_codebook",), ignores=("weight_correction", "input_scale"),
    positive=("weight_s_channel",),
)  # fmt: skip
