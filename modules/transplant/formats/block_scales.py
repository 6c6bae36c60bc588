"""Block scales of nvfp4 and mxfp8: their layout in the file, their padding, how they reach SDNQ's groups.

Both formats hold one byte per block of columns, in the tiles that cuBLAS reads:
https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout, comfy-kitchen
`float_utils.py` (to_blocked, from_blocked). Weights are padded to whole blocks, and the file does not say
by how much: the logical shape is that of the module they are for.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from transplant.formats.base import (
    FormatError,
    QuantizedLayer,
    Read,
    Rows,
    check_finite_and_positive,
    divisor,
    matrix_shape,
)

TILE = (128, 4)
"""Rows and columns of scales in one cuBLAS tile."""

_LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e8m0fnu: 0xFE}
"""The byte of the largest scale; NaN and, in e4m3, negative values are above it."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def swizzled_shape(rows: int, columns: int) -> tuple[int, int]:
    """The stored shape of a matrix of scales: padded to whole tiles."""
    return round_up(rows, TILE[0]), round_up(columns, TILE[1])


def unswizzled(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales in the order of the weight's blocks.

    Tiles of 128 x 4 scales lie row-major; inside one, (r, c) is byte `r % 32 * 16 + r // 32 * 4 + c`.

    Args:
        stored: [round_up(rows, 128), round_up(columns, 4)] of a 1-byte dtype, or its bytes in another shape.
        rows: rows of the weight.
        columns: blocks in a row.

    Returns:
        [rows, columns] in the dtype of `stored`.
    """
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    tiles = stored.view(torch.uint8).reshape(down, across, 32, 4, 4)  # tile, tile, r % 32, r // 32, c
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE[0], across * TILE[1])
    return plain[:rows, :columns].view(stored.dtype)


def padded_shape(layer: QuantizedLayer, codes_a_byte: int, multiple: int) -> tuple[int, int]:
    """(N, K) of a layer as far as the file says it.

    Args:
        layer: the layer; `orig_shape` in its declaration is the shape without padding.
        codes_a_byte: how many of its codes share a byte.
        multiple: what rows and columns are padded to.

    Returns:
        The declared shape, else the padded one.

    Raises:
        FormatError: not a padded matrix, or a declared shape that does not pad to it.
    """
    rows, stored = matrix_shape(layer)
    columns = stored * codes_a_byte
    if rows < 1 or columns < 1 or rows % multiple or columns % multiple:
        raise FormatError(f"its weight holds {rows} x {columns} values, which is not padded to {multiple} x {multiple}")
    declared = layer.params.get("orig_shape")
    if declared is None:
        return rows, columns
    numbers = cast("list[Any]", declared) if isinstance(declared, list) else []
    if len(numbers) != 2 or not all(type(number) is int and number > 0 for number in numbers):
        raise FormatError("its orig_shape is not a list of two positive numbers")
    if (round_up(numbers[0], multiple), round_up(numbers[1], multiple)) != (rows, columns):
        raise FormatError(f"its orig_shape is {numbers}, but its weight holds {rows} x {columns} values")
    return numbers[0], numbers[1]


def check_blocks(layer: QuantizedLayer, told: tuple[int, int], rows: Rows, multiple: int, block: int) -> None:
    """Check a layer's declaration and padding against the module it is for.

    Args:
        layer: the layer.
        told: what `padded_shape` says.
        rows: the rows that are wanted of it, and the shape that the module gives it.
        multiple: what rows and columns are padded to.
        block: columns that share a scale in this format.

    Raises:
        FormatError: the shapes contradict each other, another block size, or a rotation, which this format
            does not have.
    """
    padded = round_up(rows.shape[0], multiple), round_up(rows.shape[1], multiple)
    if told not in (rows.shape, padded) or (layer.params.get("orig_shape") is not None and told != rows.shape):
        raise FormatError(f"it stands for {told[0]} x {told[1]} values, not {rows.shape[0]} x {rows.shape[1]}")
    size = layer.number("group_size", block)
    if size != block:
        raise FormatError(f"its group_size is {size}; {layer.format} has only {block}")
    if layer.params.get("convrot"):
        raise FormatError(f"it is declared with convrot, which {layer.format} does not have")


def block_scales(read: Read, rows: Rows, block: int, dtype: torch.dtype) -> torch.Tensor:
    """The scales of some rows, one an SDNQ group, as their stored bytes.

    SDNQ's groups cannot reach past the last column. Where `block` does not divide the columns, groups are
    as large as divides both, and each block's scale is repeated for its groups.

    Args:
        read: reads the layer's tensors.
        rows: which rows, and the layer's shape (N, K).
        block: columns that share a stored scale.
        dtype: what the bytes are; stored in it or as U8.

    Returns:
        [n, K / group, 1] in `dtype`, with group = divisor(block, K), in memory of its own.

    Raises:
        FormatError: another dtype or shape, NaN, infinite or negative scales. Zero is one, of a block of zeros.
    """
    stored = read("weight_scale")
    if stored.dtype not in (dtype, torch.uint8):
        raise FormatError(f"its weight_scale is stored as {stored.dtype}, not as {dtype} or bytes")
    (n, k), group = rows.shape, divisor(block, rows.shape[1])
    blocks = -(-k // block)
    if tuple(stored.shape) != swizzled_shape(n, blocks):
        expected = list(swizzled_shape(n, blocks))
        raise FormatError(f"its weight_scale has shape {list(stored.shape)}, not {expected} (tiles of 128 x 4)")
    scale = unswizzled(stored.view(dtype), n, blocks)[rows.start : rows.stop]
    coded = scale.view(torch.uint8)
    if not coded.is_meta and coded.numel() and int(coded.max()) > _LARGEST[dtype]:
        check_finite_and_positive("weight_scale", scale, allow_zero=True)
    repeated = coded.unsqueeze(-1).expand(-1, -1, block // group).flatten(1)[:, : k // group]
    return repeated.clone(memory_format=torch.contiguous_format).view(dtype).unsqueeze(-1)
