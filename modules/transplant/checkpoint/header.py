"""Read and distrust the header of a safetensors file; GGUF files go to gguf.py. No torch, and no tensor data is read.

Format: 8 bytes little-endian length, that many bytes of JSON, then the data
(https://huggingface.co/docs/safetensors, safetensors/src/tensor.rs). The checks are those of the
reference implementation, each with an error of its own; old writers' headers that are not padded
to 8 bytes are accepted.
"""

from __future__ import annotations

import json
import os
import reprlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from transplant.checkpoint.quick import Columns, quick_columns
from transplant.checkpoint.shards import members, named_members, no_model_in
from transplant.checkpoint.sniff import Sniffed, sniff
from transplant.errors import (
    BadHeader,
    BadIndex,
    NotACheckpoint,
    TrailingBytes,
    TruncatedFile,
    UnknownDtype,
    UnreadableFile,
)

MAX_HEADER_BYTES = 100_000_000
"""Cap of the reference implementation."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Every dtype of safetensors 0.8 with its width in bits."""

SAFETENSORS, GGUF = "safetensors", "GGUF"
"""Kinds of files."""

GGUF_MAGIC = b"GGUF"

_PAGE = 4096

MAX_INT = 2**63 - 1
"""The largest size or offset that torch and the file system can express."""


@dataclass(frozen=True)
class FileStamp:
    """What tells one state of a file from another without reading it."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of the file as it is now; of a set the sums over its files. Raises OSError where there is none."""
        try:
            files = [file for file in named_members(path) if file == path or file.is_file()] or [path]
        except BadIndex:
            files = [path]
        every = [file.stat() for file in files]
        return cls(sum(status.st_size for status in every), sum(status.st_mtime_ns for status in every))


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header declares it.

    Attributes:
        name: stored name.
        dtype: safetensors dtype, a key of DTYPE_BITS; of a quantized GGUF tensor the name of its GGML type.
        shape: logical shape; F4, F6 and quantized GGUF tensors count values, not bytes.
        start: offset of its first byte in the file; in a set, its position (see Part).
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """One file of a set. Tensors of a set have positions: that of their file, plus the offset in it.

    Attributes:
        path: the file.
        stamp: its size and time when its header was read.
        position: where it begins, a multiple of a page, so that what is aligned in the file stays so.
    """

    path: Path
    stamp: FileStamp
    position: int


@dataclass(frozen=True)
class Header:
    """A checked header.

    Attributes:
        path: the file; of a set what was chosen: one of its files, its index or its folder.
        stamp: size and time of the file when it was read; of a set the sums.
        metadata: the `__metadata__` object; None where absent, {} where present and empty. The texts of a GGUF file.
        tensors: every tensor by stored name, in the order of its data in the file.
        data_start: offset of the first data byte, equal to the number of bytes read for this header; the sum in a set.
        container: SAFETENSORS or GGUF, whatever the file's suffix says.
        parts: the files of a set; none where there is one file only.
    """

    path: Path
    stamp: FileStamp
    metadata: Mapping[str, str] | None
    tensors: Mapping[str, TensorInfo]
    data_start: int
    container: str = SAFETENSORS
    parts: tuple[Part, ...] = ()

    def part_of(self, info: TensorInfo) -> Part:
        """The file that a tensor is in."""
        if not self.parts:
            return Part(self.path, self.stamp, 0)
        return self.parts[bisect_right(self.parts, info.start, key=lambda part: part.position) - 1]

    def read_bytes(self, info: TensorInfo) -> bytes:
        """The bytes of a tensor, for the few small ones that describe others. Raises OSError."""
        part = self.part_of(info)
        with part.path.open("rb") as file:
            file.seek(info.start - part.position)
            return file.read(info.nbytes)


def read_header(path: Path | str) -> Header:
    """Read and check the header of a safetensors or GGUF file: its first bytes tell which, not its suffix.

    Args:
        path: the file; of a checkpoint in several files one of them, its index or its folder (see shards.py).

    Returns:
        The header; every tensor's range is inside the file and the ranges cover the data exactly, padding aside.

    Raises:
        UnreadableFile: one subclass per fault; the message names the file, the tensor and the way out.
    """
    path = Path(path)
    files = members(path)
    if files == (path,):
        return _read_file(path)
    return _joined(path, [_read_file(file) for file in files])


@dataclass(frozen=True)
class Names:
    """What detection needs of a header.

    Attributes:
        names: stored names, in the order of their data.
        metadata: as in Header.
    """

    names: Sequence[str]
    metadata: Mapping[str, str] | None


def read_names(path: Path) -> Names:
    """Read and check a header as `read_header` does, for its names alone. Raises what it raises."""
    files = members(path)
    if files == (path,) and path.is_file() and path.suffix.lower() == ".safetensors":
        with suppress(OSError, UnreadableFile), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = _read_raw_header(path, file, size)
            quick = quick_columns(raw, size - 8 - len(raw), DTYPE_BITS, MAX_INT)
            if quick is not None:
                return Names(quick.names, quick.metadata)
    header = read_header(path)
    return Names(list(header.tensors), header.metadata)


def _joined(path: Path, headers: Sequence[Header]) -> Header:
    """The headers of a set's files as one."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    parts: list[Part] = []
    position = 0
    for header in headers:
        parts.append(Part(header.path, header.stamp, position))
        for name, info in header.tensors.items():
            if name in tensors:
                raise BadHeader(path, f"it is in {header.path.name} and in another file of the set", name)
            tensors[name] = replace(info, start=position + info.start)
        for key, text in (header.metadata or {}).items():
            if key.startswith("_") and metadata.get(key, text) != text:
                raise BadHeader(path, f"the files of the set contradict each other in {key!r}")
            metadata.setdefault(key, text)
        position += -(-header.stamp.size // _PAGE) * _PAGE
    containers = {header.container for header in headers}
    if len(containers) > 1:
        raise BadHeader(path, f"the set mixes {' and '.join(sorted(containers))}")
    stamp = FileStamp(sum(part.stamp.size for part in parts), sum(part.stamp.mtime_ns for part in parts))
    described = metadata if any(header.metadata is not None for header in headers) else None
    return Header(
        path, stamp, described, tensors, sum(header.data_start for header in headers), containers.pop(), tuple(parts)
    )


def _read_file(path: Path) -> Header:
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise UnreadableFile(path, *no_model_in(path))
        raise UnreadableFile(path, "cannot be read (it is not a regular file)", "Choose a file")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = FileStamp(status.st_size, status.st_mtime_ns)
            if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
                from transplant.checkpoint.gguf import read_gguf  # which needs this module

                return read_gguf(path, file, stamp)
            file.seek(0)
            raw = _read_raw_header(path, file, stamp.size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableFile(path, f"cannot be read ({reason})", "Check that it exists and may be read") from error
    data_start = 8 + len(raw)
    quick = quick_columns(raw, stamp.size - data_start, DTYPE_BITS, MAX_INT)
    if quick is not None:
        return Header(path, stamp, quick.metadata, _as_infos(quick, data_start), data_start)
    entries = _parse_json(path, raw)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    tensors = [_tensor_info(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_coverage(path, tensors, data_start, stamp.size)
    return Header(path, stamp, metadata, {tensor.name: tensor for tensor in tensors}, data_start)


def _as_infos(columns: Columns, data_start: int) -> dict[str, TensorInfo]:
    rows = zip(columns.names, columns.dtypes, columns.shapes, columns.starts, columns.ends, strict=True)
    return {
        name: TensorInfo(name, dtype, tuple(shape), data_start + start, end - start)
        for name, dtype, shape, start, end in rows
    }


def _read_raw_header(path: Path, file: BinaryIO, size: int) -> bytes:
    start = file.read(512)
    length = int.from_bytes(start[:8], "little")
    if path.suffix.lower() == ".gguf":
        raise _not_gguf(path, start, size)
    if size < 9 or length > MAX_HEADER_BYTES or start[8:9] != b"{":
        raise _not_safetensors(path, start, size)
    if 8 + length > size:
        raise TruncatedFile(path, size, 8 + length, "header")
    file.seek(8)
    raw = file.read(length)
    if len(raw) < length:
        raise TruncatedFile(path, 8 + len(raw), 8 + length, "header")
    return raw


def _not_gguf(path: Path, start: bytes, size: int) -> NotACheckpoint:
    """A file of that suffix without the magic."""
    length = int.from_bytes(start[:8], "little")
    unknown = Sniffed("unknown binary data", "Download it again, or choose another file")
    renamed = Sniffed("a safetensors file", "Give it the suffix .safetensors")
    like_safetensors = start[8:9] == b"{" and length <= MAX_HEADER_BYTES
    other = sniff(start, size) or (renamed if like_safetensors else unknown)
    return NotACheckpoint(path, other.what, other.remedy)


def _not_safetensors(path: Path, start: bytes, size: int) -> UnreadableFile:
    other = sniff(start, size)
    if other is not None:
        return NotACheckpoint(path, other.what, other.remedy)
    if size < 9:
        return TruncatedFile(path, size, 10, "header")
    if start[8:9] == b"{":
        length = int.from_bytes(start[:8], "little")
        return BadHeader(path, f"it claims to be {length:,} bytes long, the most allowed is {MAX_HEADER_BYTES:,}")
    return NotACheckpoint(path, "unknown binary data", "Download it again, or convert it to safetensors")


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = dict(pairs)
        if len(result) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise BadHeader(path, "the name occurs twice", twice)
        return result

    try:
        entries: Any = json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise BadHeader(path, f"it is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise BadHeader(path, "it is not a JSON object")
    return cast("dict[str, Any]", entries)


def _metadata(path: Path, value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadHeader(path, "__metadata__ is not a JSON object")
    metadata = cast("dict[str, object]", value)
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise BadHeader(path, f"__metadata__ entry {key!r} is not a string")
        if not _is_unicode(key + text):
            raise BadHeader(path, f"__metadata__ entry {key!r} is not valid Unicode")
    return cast("dict[str, str]", metadata)


def _tensor_info(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    if not _is_unicode(name):
        raise BadHeader(path, "its name is not valid Unicode", name)
    if not isinstance(entry, dict):
        raise BadHeader(path, "its entry is not a JSON object", name)
    fields = cast("dict[str, object]", entry)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str):
        raise BadHeader(path, "its entry has no dtype", name)
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise UnknownDtype(path, name, dtype)
    shape = _sizes(fields.get("shape"))
    if shape is None:
        raise BadHeader(path, f"its shape {reprlib.repr(fields.get('shape'))} is not a list of sizes", name)
    offsets = _sizes(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadHeader(path, f"its data_offsets {reprlib.repr(fields.get('data_offsets'))} are not a range", name)
    start, end = offsets
    count = element_count(shape)
    if count is None:
        raise BadHeader(path, f"its shape {reprlib.repr(list(shape))} has more elements than can be counted", name)
    promised = count * bits
    if (end - start) * 8 != promised:
        needed = promised // 8 if promised % 8 == 0 else f"{promised} bits, not whole"
        takes = f"{dtype} {reprlib.repr(list(shape))} takes {needed} bytes"
        raise BadHeader(path, f"{takes}, its range has {end - start}", name)
    return TensorInfo(name, dtype, shape, data_start + start, end - start)


def _is_unicode(text: str) -> bool:
    """False where the text holds half of a surrogate pair, which JSON can escape and no file can store."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    sizes = cast("list[object]", value)
    valid = all(type(n) is int and 0 <= n <= MAX_INT for n in sizes)
    return cast("tuple[int, ...]", tuple(sizes)) if valid else None


def element_count(shape: Sequence[int]) -> int | None:
    """The product of the sizes, or None once it passes 64 bits: a long header cannot make it long to compute."""
    count = 1
    for size in shape:
        count *= size
        if count > MAX_INT:
            return None
    return count


def _check_coverage(path: Path, tensors: list[TensorInfo], data_start: int, size: int) -> None:
    """Ranges must follow each other without gap or overlap, and end where the file ends."""
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            what = "overlaps the tensor before it" if tensor.start < position else "leaves a gap before it"
            raise BadHeader(path, f"its range {what}", tensor.name)
        position += tensor.nbytes
    if size < position:
        raise TruncatedFile(path, size, position, "data")
    if size > position:
        raise TrailingBytes(path, size, position)
    if not tensors:
        raise UnreadableFile(path, "holds no tensors", "Download it again, or choose another file")
