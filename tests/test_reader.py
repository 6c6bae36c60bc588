"""The two readers: equal to each other and to the safetensors library, bit for bit, and no trace of them is left."""

import gc
import io
import os
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tiny_models import BITS, write_sparse
from transplant.checkpoint.header import DTYPE_BITS, Header, TensorInfo, read_header
from transplant.checkpoint.reader import (
    TORCH_DTYPES,
    MmapReader,
    SequentialReader,
    TensorReader,
    mmap_by_default,
    open_reader,
)
from transplant.errors import FileChanged, UnreadableFile

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BOTH = pytest.mark.parametrize("use_mmap", [True, False], ids=["mmap", "sequential"])
DTYPES = sorted(TORCH_DTYPES)

Layout = Mapping[str, tuple[str, Sequence[int]]]


def random_bytes(dtype: str, shape: Sequence[int], seed: int = 0) -> bytes:
    """Any bit patterns, NaN and denormals among them; 0 and 1 for BOOL."""
    size = BITS[dtype]
    for length in shape:
        size *= length
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "BOOL" else 256, size // 8, dtype=np.uint8)
    return values.tobytes()


def write(path: Path, tensors: Layout, *, padded: bool = True) -> tuple[Header, dict[str, bytes]]:
    """A file of random bits: its header as read back, and the bytes of every tensor."""
    contents = {
        name: random_bytes(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(tensors.items(), 1)
    }
    write_sparse(path, tensors, contents=contents, padded=padded)
    return read_header(path), contents


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row order."""
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def read_all(header: Header, use_mmap: bool) -> dict[str, torch.Tensor]:
    with open_reader(header, use_mmap) as reader:
        return {name: reader.read(info) for name, info in header.tensors.items()}


def open_files(path: Path) -> int:
    """How many descriptors of this process are open on a file."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry) == str(path)
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def every_shape(dtype: str) -> Layout:
    return {
        "odd": ("U8", (3,)),  # what follows lies at odd offsets
        "flat": (dtype, (16,)),
        "matrix": (dtype, (6, 4)),
        "volume": (dtype, (2, 3, 2, 4)),
        "one row": (dtype, (1, 8)),
        "empty": (dtype, (0,)),
        "no rows": (dtype, (0, 4)),
        "no columns": (dtype, (4, 0)),
        **({} if dtype == "F4" else {"scalar": (dtype, ()), "one": (dtype, (1,))}),
    }


# --- equal to each other and to the library -------------------------------------------------------------------------


def test_the_dtypes_are_those_of_the_header_but_for_six_bits() -> None:
    assert set(DTYPE_BITS) - set(TORCH_DTYPES) == {"F6_E2M3", "F6_E3M2"}
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize * 8 == DTYPE_BITS[name] * (2 if name == "F4" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_every_dtype_and_shape(tmp_path: Path, dtype: str, padded: bool) -> None:
    path = tmp_path / "model.safetensors"
    header, contents = write(path, every_shape(dtype), padded=padded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_map, by_read = read_all(header, True), read_all(header, False)
    with safe_open(path, "pt") as file:
        for name, info in header.tensors.items():
            library = file.get_tensor(name)
            assert same(by_map[name], by_read[name]), name
            assert same(by_map[name], library), name
            assert bits(by_map[name]) == contents[name], name
            assert by_map[name].dtype == TORCH_DTYPES[info.dtype], name
            expected = (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape
            assert tuple(by_map[name].shape) == expected, name
            assert by_map[name].is_contiguous(), name
            assert by_read[name].is_contiguous(), name


def test_unpadded_headers_do_shift_the_data(tmp_path: Path) -> None:
    """The test above meets data at offsets that are no multiple of the dtype's size."""
    header, _ = write(tmp_path / "model.safetensors", every_shape("F64"), padded=False)
    assert header.tensors["matrix"].start % 8 != 0


@pytest.mark.parametrize("offset", range(9))
@BOTH
def test_every_offset(tmp_path: Path, offset: int, use_mmap: bool) -> None:
    layout: Layout = {"shift": ("U8", (offset,)), "complex": ("C64", (3,)), "half": ("BF16", (5,)), "last": ("F32", ())}
    header, contents = write(tmp_path / "model.safetensors", layout)
    assert {name: bits(tensor) for name, tensor in read_all(header, use_mmap).items()} == contents


@BOTH
def test_f4_holds_two_values_a_byte(tmp_path: Path, use_mmap: bool) -> None:
    header, contents = write(tmp_path / "model.safetensors", {"w": ("F4", (3, 8)), "flat": ("F4", (6,))})
    with open_reader(header, use_mmap) as reader:
        assert reader.read(header.tensors["w"]).shape == (3, 4)
        assert bits(reader.read(header.tensors["w"], 1, 2)) == contents["w"][4:8]
        assert reader.read(header.tensors["flat"]).shape == (3,)
        assert bits(reader.read(header.tensors["flat"], 2, 6)) == contents["flat"][1:]
        for start, stop in ((1, 6), (0, 5), (1, 5)):
            with pytest.raises(ValueError, match="flat: F4"):
                reader.read(header.tensors["flat"], start, stop)


@BOTH
def test_f4_rows_that_share_a_byte_are_refused(tmp_path: Path, use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"w": ("F4", (4, 3))})
    with open_reader(header, use_mmap) as reader, pytest.raises(ValueError, match="w: F4"):
        reader.read(header.tensors["w"])


@BOTH
@pytest.mark.parametrize("shape", [(5,), (5, 2), ()])
def test_rows_outside_the_tensor_are_refused(tmp_path: Path, shape: tuple[int, ...], use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"w": ("F16", shape), "behind it": ("F16", (40,))})
    rows = shape[0] if shape else 1
    with open_reader(header, use_mmap) as reader:
        for start, stop in ((0, rows + 1), (-1, rows), (rows, rows - 1), (rows + 1, rows + 2), (rows + 1, None)):
            with pytest.raises(ValueError, match="w: F16"):
                reader.read(header.tensors["w"], start, stop)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"])
@BOTH
def test_nan_payloads_survive(tmp_path: Path, dtype: str, use_mmap: bool) -> None:
    patterns = {
        "F32": struct.pack("<4I", 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFFFFFFF),
        "F64": struct.pack("<4Q", 0x7FF8000000000001, 0xFFF0DEADBEEF0001, 0x7FF0000000000001, 2**64 - 1),
        "F16": struct.pack("<4H", 0x7E01, 0xFE23, 0x7C01, 0xFFFF),
        "BF16": struct.pack("<4H", 0x7FC1, 0xFFA5, 0x7F81, 0xFFFF),
        "F8_E4M3": b"\x7f\xff\x7f\xff",
        "F8_E5M2": b"\x7d\x7e\xfd\xff",
        "F8_E8M0": b"\xff\xff\xff\xff",
        "F8_E4M3FNUZ": b"\x80\x80\x80\x80",
    }[dtype]
    path = write_sparse(tmp_path / "model.safetensors", {"nan": (dtype, (4,))}, contents={"nan": patterns})
    tensor = read_all(read_header(path), use_mmap)["nan"]
    assert tensor.float().isnan().all()
    assert bits(tensor) == patterns


# --- row ranges -----------------------------------------------------------------------------------------------------

ROWS_LAYOUT: Layout = {
    f"{dtype} {shape}": (dtype, shape)
    for dtype in DTYPES
    for shape in ((7, 4), (5, 2, 2), (6,), (0, 4), ())
    if dtype != "F4" or shape
}


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return write(tmp_path_factory.mktemp("rows") / "model.safetensors", ROWS_LAYOUT, padded=False)[0]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(ROWS_LAYOUT)), first=st.integers(0, 7), second=st.integers(0, 7))
def test_row_ranges_are_slices_of_the_whole(rows_file: Header, name: str, first: int, second: int) -> None:
    info = rows_file.tensors[name]
    rows = info.shape[0] if info.shape else 1
    start, stop = sorted((min(first, rows), min(second, rows)))
    if not info.shape:
        start, stop = 0, 1
    if info.dtype == "F4" and len(info.shape) == 1:  # two rows a byte
        start, stop = start // 2 * 2, stop // 2 * 2
    with safe_open(rows_file.path, "pt") as file:
        whole = file.get_tensor(name)
    per_row = 2 if info.dtype == "F4" and len(info.shape) == 1 else 1
    expected = whole[start // per_row : stop // per_row] if info.shape else whole
    for use_mmap in (True, False):
        with open_reader(rows_file, use_mmap) as reader:
            assert same(reader.read(info, start, stop), expected)
            if stop == rows:
                assert same(reader.read(info, start), expected)


@BOTH
def test_pieces_in_any_order(tmp_path: Path, use_mmap: bool) -> None:
    header, contents = write(tmp_path / "model.safetensors", {"a": ("BF16", (9, 5)), "b": ("F32", (4, 3))})
    pieces = [("b", 2, 4), ("a", 6, 9), ("a", 0, 3), ("b", 0, 2), ("a", 3, 6), ("a", 0, 9)]
    with open_reader(header, use_mmap) as reader:
        found = [bits(reader.read(header.tensors[name], start, stop)) for name, start, stop in pieces]
    width = {"a": 10, "b": 12}
    assert found == [contents[name][start * width[name] : stop * width[name]] for name, start, stop in pieces]


# --- sequential reads -----------------------------------------------------------------------------------------------


class CountingFile(io.FileIO):
    """A raw file that notes every range that is read of it, and gives no more than `limit` bytes at a time."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        super().__init__(path, "rb")
        self.limit = limit
        self.ranges: list[tuple[int, int]] = []
        self.seeks = 0

    def readinto(self, buffer: memoryview) -> int:
        start = self.tell()
        count = super().readinto(memoryview(buffer)[: self.limit])
        self.ranges.append((start, start + count))
        return count

    def seek(self, *args: int) -> int:
        self.seeks += 1
        return super().seek(*args)


@pytest.mark.parametrize("limit", [None, 1, 7])
def test_every_byte_is_read_once_and_in_order(tmp_path: Path, limit: int | None) -> None:
    layout: Layout = {
        "a": ("BF16", (5, 3)), "none": ("F32", (0, 2)), "b": ("F8_E8M0", (7,)), "c": ("F4", (3, 2)),
        "d": ("F64", ()), "e": ("U8", (1,)),
    }  # fmt: skip
    header, contents = write(tmp_path / "model.safetensors", layout, padded=False)
    with CountingFile(header.path, limit) as file:
        reader = SequentialReader(header, file)
        for name, info in header.tensors.items():
            if name == "a":  # in two halves
                halves = reader.read(info, 0, 2), reader.read(info, 2, 5)
                assert bits(torch.cat(halves)) == contents[name]
            else:
                assert bits(reader.read(info)) == contents[name]
        assert file.seeks <= 1
        position = header.data_start
        for start, stop in file.ranges:
            assert start == position
            position = stop
        assert position == header.stamp.size
        if limit is None:
            assert len(file.ranges) == 6  # one read a piece that has bytes


def test_a_tensor_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (100,)), "b": ("U8", (100,))})
    with open_reader(header, use_mmap=False) as reader:
        reader.read(header.tensors["a"])
        os.truncate(header.path, header.stamp.size - 1)
        with pytest.raises(FileChanged, match="changed on disk"):
            reader.read(header.tensors["b"])


def test_a_disk_that_fails(tmp_path: Path) -> None:
    class Failing(CountingFile):
        def readinto(self, buffer: memoryview) -> int:
            raise OSError(5, "Input/output error")

    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    with Failing(header.path) as file, pytest.raises(UnreadableFile, match=r"model.safetensors: .*Input/output error"):
        SequentialReader(header, file).read(header.tensors["a"])


@ON_LINUX
def test_nothing_keeps_the_file_open_after_sequential_reads(tmp_path: Path) -> None:
    header, _ = write(tmp_path / "model.safetensors", every_shape("BF16"))
    with open_reader(header, use_mmap=False) as reader:
        tensors = [reader.read(info) for info in header.tensors.values()]
        assert open_files(header.path) == 1
    assert open_files(header.path) == 0
    assert not mapped(header.path)
    header.path.unlink()
    assert sum(tensor.numel() for tensor in tensors) > 0


@ON_LINUX
@BOTH
def test_the_file_is_closed_when_a_load_is_broken_off(tmp_path: Path, use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    with pytest.raises(KeyboardInterrupt), open_reader(header, use_mmap) as reader:
        reader.read(header.tensors["a"])
        raise KeyboardInterrupt
    del reader
    gc.collect()
    assert open_files(header.path) == 0
    assert not mapped(header.path)


@BOTH
def test_tensors_of_their_own(tmp_path: Path, use_mmap: bool) -> None:
    """Writing to a tensor changes neither the file nor what is read later with another reader."""
    header, contents = write(tmp_path / "model.safetensors", {"a": ("F32", (64, 64)), "b": ("I8", (5,))})
    before = header.path.read_bytes()
    with open_reader(header, use_mmap) as reader:
        for info in header.tensors.values():
            reader.read(info).zero_()
    assert header.path.read_bytes() == before
    assert {name: bits(tensor) for name, tensor in read_all(header, use_mmap).items()} == contents


# --- maps -----------------------------------------------------------------------------------------------------------


def test_maps_are_the_default_but_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, expected in (("linux", True), ("darwin", True), ("win32", False)):
        monkeypatch.setattr(sys, "platform", platform)
        assert mmap_by_default() is expected


@BOTH
def test_the_kind_of_reader(tmp_path: Path, use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (1,))})
    with open_reader(header, use_mmap) as reader:
        assert isinstance(reader, MmapReader if use_mmap else SequentialReader)


def anonymous_bytes() -> int:
    """Memory of this process that is its own, not the page cache's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        pytest.skip("the system does not tell anonymous memory")
    return int(found[1]) * 1024


def sparse_or_skip(path: Path, tensors: Layout) -> Header:
    try:
        return read_header(write_sparse(path, tensors))
    except OSError as error:
        pytest.skip(f"no sparse file of this size here: {error}")


@ON_LINUX
def test_a_file_larger_than_the_memory(tmp_path: Path) -> None:
    layout: Layout = {f"blocks.{n}": ("BF16", (1024, 1024, 1024)) for n in range(50)}
    header = sparse_or_skip(tmp_path / "model.safetensors", layout)
    assert header.stamp.size > 100_000_000_000
    before = anonymous_bytes()
    with open_reader(header, use_mmap=True) as reader:
        rows = reader.read(header.tensors["blocks.49"], 1000, 1016)  # 32 MiB
        assert not any(row.any() for row in rows)  # row by row: `any` of bf16 makes a bool of each number
        assert anonymous_bytes() - before < 8 << 20
        everything = [reader.read(info) for info in header.tensors.values()]
    assert anonymous_bytes() - before < 8 << 20
    assert sum(tensor.numel() for tensor in everything) == 50 << 30


@ON_LINUX
def test_reading_a_mapped_tensor_takes_no_memory_and_writing_takes_what_is_written(tmp_path: Path) -> None:
    header = sparse_or_skip(tmp_path / "model.safetensors", {"w": ("U8", (64 << 20,))})
    with open_reader(header, use_mmap=True) as reader:
        tensor = reader.read(header.tensors["w"])
    before = anonymous_bytes()
    assert not tensor.any()
    assert anonymous_bytes() - before < 4 << 20
    tensor[: 16 << 20] = 1
    grown = anonymous_bytes() - before
    assert 15 << 20 < grown < 24 << 20
    with header.path.open("rb") as file:
        assert not any(file.read(header.data_start + 4096)[header.data_start :])


@ON_LINUX
def test_a_mapped_tensor_lies_where_the_file_has_it(tmp_path: Path) -> None:
    """No copy is made of what is aligned; what is not aligned is copied, and keeps no map alive."""
    header, _ = write(tmp_path / "model.safetensors", {"a": ("F32", (8,)), "b": ("U8", (1,)), "c": ("F32", (8,))})
    with open_reader(header, use_mmap=True) as reader:
        base = reader.read(header.tensors["b"]).data_ptr()
        a, c = (reader.read(header.tensors[name]) for name in "ac")
    assert base - a.data_ptr() == header.tensors["b"].start - header.tensors["a"].start
    assert c.data_ptr() - base != header.tensors["c"].start - header.tensors["b"].start
    del a, reader
    gc.collect()
    assert not mapped(header.path)
    assert c.data_ptr() % 4 == 0


@ON_LINUX
def test_views_outlive_the_reader_and_the_map_dies_with_the_last(tmp_path: Path) -> None:
    header, contents = write(tmp_path / "model.safetensors", {"a": ("F32", (512, 16)), "b": ("BF16", (4096,))})
    with open_reader(header, use_mmap=True) as reader:
        whole = reader.read(header.tensors["a"])
        rows = reader.read(header.tensors["a"], 256, 512)
        other = reader.read(header.tensors["b"])
    del reader
    gc.collect()
    assert mapped(header.path)
    header.path.unlink()
    del whole
    gc.collect()
    assert bits(rows) == contents["a"][256 * 64 :]
    rows.fill_(1)
    assert bits(other) == contents["b"]
    del rows
    gc.collect()
    assert bits(other) == contents["b"]
    del other
    gc.collect()
    assert not mapped(header.path)
    assert open_files(Path(f"{header.path} (deleted)")) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be written to")
def test_maps_of_one_file_are_private(tmp_path: Path) -> None:
    header, contents = write(tmp_path / "model.safetensors", {"a": ("U8", (10_000,))})
    first, second = (read_all(header, use_mmap=True)["a"] for _ in range(2))
    first.zero_()
    assert bits(second) == contents["a"]
    assert not first.any()


# --- a file that is not the one whose header was read ---------------------------------------------------------------


def replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    os.replace(new, path)


def rewritten(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))


def grown(path: Path) -> None:
    """By a byte, with the old time put back."""
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncated(path: Path) -> None:
    status = path.stat()
    os.truncate(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def set_back(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


@BOTH
@pytest.mark.parametrize("change", [replaced, rewritten, grown, truncated, emptied, set_back])
def test_a_file_that_changed(tmp_path: Path, change: Callable[[Path], None], use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    change(header.path)
    with pytest.raises(FileChanged, match=r"model.safetensors: .*Choose it again"), open_reader(header, use_mmap):
        pytest.fail("it was opened")
    if sys.platform == "linux":
        assert open_files(header.path) == 0


@BOTH
def test_a_file_that_only_was_read_again_has_not_changed(tmp_path: Path, use_mmap: bool) -> None:
    header, contents = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    header.path.read_bytes()
    header.path.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(header.path)
    assert bits(read_all(header, use_mmap)["a"]) == contents["a"]


@BOTH
def test_a_file_that_is_gone(tmp_path: Path, use_mmap: bool) -> None:
    header, _ = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    header.path.unlink()
    with pytest.raises(UnreadableFile, match="No such file") as caught, open_reader(header, use_mmap):
        pytest.fail("it was opened")
    assert not isinstance(caught.value, FileChanged)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    header, contents = write(tmp_path / "model.safetensors", {"a": ("U8", (100,))})
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(UnreadableFile, match=r"Cannot allocate memory.*turn memory mapping off"):
        read_all(header, use_mmap=True)
    assert bits(read_all(header, use_mmap=False)["a"]) == contents["a"]


# --- any file -------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = st.lists(st.integers(0, 4), max_size=3)
    drawn = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5))
    return {f"t{n}": (dtype, [*shape, 4] if dtype == "F4" else shape) for n, (dtype, shape) in enumerate(drawn)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), padded=st.booleans())
def test_any_file(tmp_path: Path, layout: Layout, padded: bool) -> None:
    header, contents = write(tmp_path / "model.safetensors", layout, padded=padded)
    by_map, by_read = read_all(header, True), read_all(header, False)
    with safe_open(header.path, "pt") as file:
        for name in layout:
            assert same(by_map[name], by_read[name])
            assert same(by_map[name], file.get_tensor(name))
            assert bits(by_map[name]) == contents[name]


def test_readers_follow_one_protocol(tmp_path: Path) -> None:
    def rows_of(reader: TensorReader, info: TensorInfo) -> Iterator[torch.Tensor]:
        yield from (reader.read(info, row, row + 1) for row in range(info.shape[0]))

    header, contents = write(tmp_path / "model.safetensors", {"a": ("I16", (6, 3))})
    for use_mmap in (True, False):
        with open_reader(header, use_mmap) as reader:
            assert bits(torch.cat(list(rows_of(reader, header.tensors["a"])))) == contents["a"]
