"""ConvRot: weights stored rotated by a regular Hadamard matrix along their columns."""

from __future__ import annotations

from transplant.formats.base import FormatError, QuantizedLayer


def rotation_size(layer: QuantizedLayer, columns: int, default: int = 256) -> int:
    """The rotation's size from the declaration.

    Raises:
        FormatError: not a power of 4 (SDNQ would take another matrix), or it does not divide the columns.
    """
    size = layer.number("convrot_groupsize", default)
    if size < 4 or size & (size - 1) or size.bit_length() % 2 == 0:
        raise FormatError(f"its rotation has the size {size}, which is not a power of 4")
    if columns % size:
        raise FormatError(f"its rotation of size {size} does not divide its {columns} columns")
    return size
