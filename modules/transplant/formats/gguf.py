"""gguf: blocks of codes with their scales among them, one after the other; a row is a whole number of blocks.

Byte layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. They are not looked into here: rows
of blocks are cut and joined as bytes, and decoded by diffusers.
"""

from __future__ import annotations

from transplant.formats.base import Codes, Form, Format, Portable, QuantizedLayer, Read, Rows, Shape


def logical_shape(layer: QuantizedLayer) -> Shape:
    """The shape in values; the stored one is in bytes."""
    return layer.params["shape"]


def in_rows(layer: QuantizedLayer) -> bool:
    """Whether rows are whole blocks: not so for vectors and for tensors that were reshaped to fit the blocks."""
    return len(layer.tensors["weight"].shape) == 2


def adopt(layer: QuantizedLayer, read: Read, rows: Rows, portable: Portable) -> Codes:
    """The blocks as stored, [n, bytes a row], or [bytes] of all rows where rows are not whole blocks."""
    blocks = read("weight", rows.start, rows.stop) if in_rows(layer) else read("weight")
    return Codes(Form(layer.params["type"], holder="gguf"), blocks, blocks.new_empty(0))


FORMAT = Format("gguf", ("U8",), (), logical_shape, adopt, in_rows=in_rows)
