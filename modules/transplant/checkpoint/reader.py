"""Read tensors: as views of a memory map, or by plain sequential reads. Same result, every dtype."""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import torch

from transplant.checkpoint.header import FileStamp, Header, TensorInfo
from transplant.errors import FileChanged, UnreadableFile
from transplant.own_memory import own_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F4": torch.float4_e2m1fn_x2, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
"""Every safetensors dtype that torch can hold. F6_E2M3 and F6_E3M2 it cannot."""


class TensorReader(Protocol):
    """Reads tensors of one file. All readers give equal tensors; only where the bytes lie differs."""

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows `start` to `stop` (dimension 0) of a tensor, all of it by default.

        Args:
            info: the tensor, of this reader's file, with a dtype in TORCH_DTYPES.
            start: first row.
            stop: row after the last; None for all.

        Returns:
            A CPU tensor in the stored dtype. F4 holds two values a byte: its last dimension is halved.

        Raises:
            UnreadableFile: the file could not be read.
        """
        ...


def mmap_by_default() -> bool:
    """Whether files are mapped unless told otherwise. Not on Windows, where a map locks the file."""
    return sys.platform != "win32"


@contextmanager
def open_reader(header: Header, use_mmap: bool) -> Generator[TensorReader, None, None]:
    """Open the file that `header` was read from.

    Args:
        header: the header; the file must not have changed since.
        use_mmap: tensors are private copy-on-write views of a map, which stays open as long as one of
            them lives; else they are read into memory of their own and the file is closed at the end.

    Raises:
        FileChanged: size or time of the file differ from the header's.
        UnreadableFile: the file cannot be opened or mapped.
    """
    with ExitStack() as files:
        if not header.parts:
            yield _opened(header, use_mmap, files)
            return
        each = [replace(header, path=part.path, stamp=part.stamp, parts=()) for part in header.parts]
        yield SetReader(header, [_opened(one, use_mmap, files) for one in each])


def _opened(header: Header, use_mmap: bool, files: ExitStack) -> TensorReader:
    try:
        file = files.enter_context(header.path.open("rb", buffering=0))
    except OSError as error:
        raise _unreadable(header, error) from error
    status = os.fstat(file.fileno())
    if FileStamp(status.st_size, status.st_mtime_ns) != header.stamp:
        raise FileChanged(header.path)
    return MmapReader(header, file) if use_mmap else SequentialReader(header, file)


class SetReader:
    """Reads from the files of a set."""

    def __init__(self, header: Header, readers: Sequence[TensorReader]) -> None:
        """`readers` are those of the header's parts, in order."""
        self._header = header
        self._readers = {part.position: reader for part, reader in zip(header.parts, readers, strict=True)}

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See TensorReader."""
        position = self._header.part_of(info).position
        return self._readers[position].read(replace(info, start=info.start - position), start, stop)


class MmapReader:
    """Tensors as views of a private map: no copy is made until someone writes to one."""

    def __init__(self, header: Header, file: BinaryIO) -> None:
        """Map the whole file. MAP_NORESERVE: a file larger than the memory can be mapped."""
        try:
            if sys.platform == "linux":
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
                self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            else:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise _unreadable(header, error) from error

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See TensorReader. Data that is not aligned to its dtype is copied."""
        dtype, shape, offset, nbytes = _extent(info, start, stop)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:
            data = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)
            return data.clone().view(dtype).reshape(shape)
        count = nbytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)


class SequentialReader:
    """Tensors read with plain reads into memory of their own: for network drives and Windows."""

    def __init__(self, header: Header, file: BinaryIO) -> None:
        """Read from `file`, an unbuffered binary file that the caller closes."""
        self._header = header
        self._file = file

    def read(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See TensorReader."""
        dtype, shape, offset, nbytes = _extent(info, start, stop)
        data = own_memory(nbytes)
        target = memoryview(cast("Buffer", data.numpy()))
        try:
            if self._file.tell() != offset:
                self._file.seek(offset)
            while target:
                count = self._file.readinto(target)  # type: ignore[attr-defined]  # unbuffered files have it
                if not count:
                    raise FileChanged(self._header.path)
                target = target[count:]
        except OSError as error:
            raise _unreadable(self._header, error) from error
        return data.view(dtype).reshape(shape)


def _extent(info: TensorInfo, start: int, stop: int | None) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Torch dtype, shape, file offset and byte count of rows of a tensor."""
    dtype = TORCH_DTYPES[info.dtype]
    rows = info.shape[0] if info.shape else 1
    stop = rows if stop is None else stop
    bits_per_row = info.nbytes * 8 // rows if rows else 0
    offset, nbytes = start * bits_per_row // 8, (stop - start) * bits_per_row // 8
    halves_a_byte = start * bits_per_row % 8 or stop * bits_per_row % 8
    shape = (stop - start, *info.shape[1:]) if info.shape else ()
    if info.dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    if not 0 <= start <= stop <= rows or halves_a_byte or math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{info.name}: {info.dtype} {list(info.shape)} has no rows {start}:{stop} of whole bytes")
    return dtype, shape, info.start + offset, nbytes


def _unreadable(header: Header, error: Exception) -> UnreadableFile:
    reason = getattr(error, "strerror", None) or str(error)
    short = isinstance(error, OSError) and error.errno == errno.ENOMEM
    remedy = "Free some memory, or turn memory mapping off" if short else "Check the disk, or turn memory mapping off"
    return UnreadableFile(header.path, f"cannot be read ({reason})", remedy)
