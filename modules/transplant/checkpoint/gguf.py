"""Read and distrust a GGUF header. No torch, no gguf package, and no byte of tensor data is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Magic, version,
number of tensors, number of metadata entries; the entries; name, dimensions (the innermost first), type and offset
of each tensor; then the data, from the next multiple of the alignment on, each tensor padded to the alignment.

A tensor whose rows are not whole blocks may be stored as rows of 256 values; `comfy.gguf.orig_shape.<name>` then
holds its true shape (https://github.com/city96/ComfyUI-GGUF, tools/convert.py).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transplant.checkpoint.header import (
    GGUF,
    MAX_HEADER_BYTES,
    MAX_INT,
    FileStamp,
    Header,
    TensorInfo,
    element_count,
)
from transplant.errors import BadHeader, TrailingBytes, TruncatedFile, UnknownDtype, UnreadableFile, printable

MAX_TENSORS = 100_000
MAX_ENTRIES = 100_000
MAX_ITEMS = 1 << 22
"""Items of one metadata array; the largest vocabularies have some hundred thousand."""
MAX_STRING_BYTES = 1 << 24
MAX_NAME_BYTES = 65535
"""As the specification says of keys; it allows tensor names 64, which converters do not keep to."""
MAX_DIMS = 8
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."


@dataclass(frozen=True)
class GgmlType:
    """How GGML stores values.

    Attributes:
        name: GGML's name; that of the safetensors dtype for plain types.
        block: values that are stored together; 1 for plain types.
        nbytes: bytes of one block.
    """

    name: str
    block: int
    nbytes: int


TYPES: Mapping[int, GgmlType] = {number: GgmlType(*fields) for number, fields in {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}.items()}  # fmt: skip
"""Every type of gguf 0.19 by its number in the file (`GGMLQuantizationType`, `GGML_QUANT_SIZES`)."""

BLOCK_TYPES: Mapping[str, GgmlType] = {kind.name: kind for kind in TYPES.values() if kind.block > 1}
"""The quantized types by name."""

LOADABLE = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""The quantized types that diffusers can decode."""

_PLAIN = ("BF16", "F16", "F32")

_INTEGERS: Mapping[int, str] = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_WIDTHS: Mapping[int, int] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the metadata types of fixed size."""
_STRING, _ARRAY = 8, 9

_Value = str | int | tuple[int, ...] | None
"""A metadata value as far as anyone asks for it: texts, integers, short lists of integers."""


def read_gguf(path: Path, file: BinaryIO, stamp: FileStamp) -> Header:
    """Read and check the header of a GGUF file.

    Args:
        path: the file, for messages.
        file: the file, behind its magic.
        stamp: its size and time.

    Returns:
        The header. Quantized tensors have the name of their GGML type as dtype; metadata are the texts.

    Raises:
        UnreadableFile: one subclass per fault; the message names the file, the tensor and the way out.
    """
    cursor = _Cursor(path, file, stamp.size)
    _check_version(path, cursor.number("<I"))
    tensor_count, entry_count = cursor.number("<Q"), cursor.number("<Q")
    for count, most, what in ((tensor_count, MAX_TENSORS, "tensors"), (entry_count, MAX_ENTRIES, "metadata entries")):
        if count > most:
            raise BadHeader(path, f"it claims to have {count:,} {what}, the most allowed is {most:,}")
    entries = _entries(cursor, entry_count)
    alignment = _alignment(path, entries.get("general.alignment", 32))
    stored = _stored_tensors(cursor, tensor_count)
    data_start = _padded(cursor.position, alignment)
    if not stored:
        raise UnreadableFile(path, "holds no tensors", "Download it again, or choose another file")
    tensors = [_tensor_info(path, tensor, entries, data_start, alignment) for tensor in stored.values()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_coverage(path, tensors, data_start, alignment, stamp.size)
    texts = {key: value for key, value in entries.items() if isinstance(value, str)}
    return Header(path, stamp, texts, {tensor.name: tensor for tensor in tensors}, data_start, GGUF)


class _Cursor:
    """Reads a header front to back and never past its end, the file's end or the most that is allowed."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.position = file.tell()
        self._file = file
        self._size = size

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._check_room(count)
        data = self._file.read(count)
        if len(data) < count:
            raise TruncatedFile(self.path, self.position + len(data), self.position + count, "header")
        self.position += count
        return data

    def skip(self, count: int) -> None:
        """Leave bytes out."""
        self._check_room(count)
        self._file.seek(count, 1)
        self.position += count

    def number(self, code: str) -> int:
        """The next integer, `code` as in struct."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text_length(self, most: int = MAX_STRING_BYTES) -> int:
        """The length in front of a text."""
        length = self.number("<Q")
        if length > most:
            raise BadHeader(self.path, f"a text claims to be {length:,} bytes long, {most:,} are allowed")
        return length

    def name(self, what: str) -> str:
        """The next text, which must be one."""
        try:
            return self.take(self.text_length(MAX_NAME_BYTES)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadHeader(self.path, f"the name of {what} is not valid UTF-8") from error

    def _check_room(self, count: int) -> None:
        end = self.position + count
        if end > MAX_HEADER_BYTES:
            raise BadHeader(self.path, f"it claims to be {end:,} bytes long, the most allowed is {MAX_HEADER_BYTES:,}")
        if end > self._size:
            raise TruncatedFile(self.path, self._size, end, "header")


@dataclass(frozen=True)
class _Stored:
    """A tensor as the file lists it: dimensions with the innermost first, offset from the start of the data."""

    name: str
    dims: tuple[int, ...]
    type_number: int
    offset: int


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version & 0xFFFF == 0 and version:
        raise UnreadableFile(path, "is a GGUF file in big-endian byte order", "Get the little-endian version")
    told = "is a GGUF file of version 1, which was given up in 2023" if version == 1 else (
        f"is a GGUF file of version {version}; known are 2 and 3"
    )  # fmt: skip
    raise UnreadableFile(path, told, "Get another version of the file, or convert the original again")


def _entries(cursor: _Cursor, count: int) -> dict[str, _Value]:
    entries: dict[str, _Value] = {}
    for _ in range(count):
        key = cursor.name("a metadata entry")
        if key in entries:
            raise BadHeader(cursor.path, f"the metadata entry {printable(key)} occurs twice")
        entries[key] = _value(cursor, key, cursor.number("<I"))
    return entries


def _value(cursor: _Cursor, key: str, kind: int) -> _Value:
    if kind == _STRING:
        return cursor.take(cursor.text_length()).decode("utf-8", errors="replace")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind in _INTEGERS:
        return cursor.number(_INTEGERS[kind])
    if kind not in _WIDTHS:
        raise BadHeader(cursor.path, f"the metadata entry {printable(key)} has the unknown type {kind}")
    cursor.skip(_WIDTHS[kind])
    return None


def _array(cursor: _Cursor, key: str, depth: int = 0) -> tuple[int, ...] | None:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if count > MAX_ITEMS or depth > 3:
        raise BadHeader(cursor.path, f"the metadata entry {printable(key)} has {count:,} items, {depth + 1} deep")
    if kind in _INTEGERS and count <= MAX_DIMS:
        return tuple(cursor.number(_INTEGERS[kind]) for _ in range(count))
    if kind in _WIDTHS:
        cursor.skip(count * _WIDTHS[kind])
    elif kind == _STRING:
        for _ in range(count):
            cursor.skip(cursor.text_length())
    elif kind == _ARRAY:
        for _ in range(count):
            _array(cursor, key, depth + 1)
    else:
        raise BadHeader(cursor.path, f"the metadata entry {printable(key)} has items of the unknown type {kind}")
    return None


def _alignment(path: Path, value: _Value) -> int:
    if not isinstance(value, int) or value < 8 or value > 1 << 20 or value & (value - 1):
        raise BadHeader(path, f"its general.alignment is {value!r}, not a power of two from 8 on")
    return value


def _stored_tensors(cursor: _Cursor, count: int) -> dict[str, _Stored]:
    tensors: dict[str, _Stored] = {}
    for _ in range(count):
        name = cursor.name("a tensor")
        dim_count = cursor.number("<I")
        if dim_count > MAX_DIMS:
            raise BadHeader(cursor.path, f"it has {dim_count:,} dimensions, {MAX_DIMS} are allowed", name)
        dims = tuple(cursor.number("<Q") for _ in range(dim_count))
        if name in tensors:
            raise BadHeader(cursor.path, "the name occurs twice", name)
        tensors[name] = _Stored(name, dims, cursor.number("<I"), cursor.number("<Q"))
    return tensors


def _tensor_info(
    path: Path, stored: _Stored, entries: Mapping[str, _Value], data_start: int, alignment: int
) -> TensorInfo:
    kind = TYPES.get(stored.type_number)
    if kind is None:
        raise UnknownDtype(path, stored.name, f"GGML type {stored.type_number}", (*LOADABLE, *_PLAIN))
    count = element_count(stored.dims)
    if count is None:
        raise BadHeader(path, "its shape has more elements than can be counted", stored.name)
    innermost = stored.dims[0] if stored.dims else 1
    if innermost % kind.block:
        detail = f"its rows of {innermost:,} values are not whole {kind.name} blocks of {kind.block}"
        raise BadHeader(path, detail, stored.name)
    if stored.offset % alignment:
        raise BadHeader(path, f"its offset {stored.offset:,} is not a multiple of {alignment}", stored.name)
    nbytes = count // kind.block * kind.nbytes
    if data_start + stored.offset + nbytes > MAX_INT:
        raise BadHeader(path, "its range ends past what a file can hold", stored.name)
    shape = tuple(reversed(stored.dims))
    if ORIGINAL_SHAPE + stored.name in entries:
        shape = _true_shape(path, stored.name, entries[ORIGINAL_SHAPE + stored.name], count)
    return TensorInfo(stored.name, kind.name, shape, data_start + stored.offset, nbytes)


def _true_shape(path: Path, name: str, shape: _Value, count: int) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or any(size < 0 for size in shape):
        raise BadHeader(path, "its entry in the metadata of original shapes is not a list of sizes", name)
    if element_count(shape) != count:
        raise BadHeader(path, f"its original shape {list(shape)} does not have the {count:,} values stored", name)
    return shape


def _check_coverage(path: Path, tensors: Sequence[TensorInfo], data_start: int, alignment: int, size: int) -> None:
    """Ranges must follow each other with nothing but padding between them, and end where the file ends."""
    end = data_start
    for tensor in tensors:
        if tensor.start != _padded(end, alignment):
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a gap before it"
            raise BadHeader(path, f"its range {what}", tensor.name)
        end = tensor.start + tensor.nbytes
    if size < end:
        raise TruncatedFile(path, size, end, "data")
    if size > _padded(end, alignment):
        raise TrailingBytes(path, size, _padded(end, alignment))


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
