"""The GGUF parser: equal to the gguf package's where a file is right, one named refusal a fault where it is not."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
import torch
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_files import entry, quantize, raw, tensor, text, write
from tiny_models import save
from transplant import errors
from transplant.checkpoint.gguf import LOADABLE, MAX_NAME_BYTES, MAX_STRING_BYTES, TYPES
from transplant.checkpoint.header import Header, read_header


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right file of 120 tensors, one in three quantized."""
    weights = {f"layers.{n}.weight": torch.randn(8, 32 + n % 2 * 32) for n in range(120)}
    stored = {name: value if n % 3 else quantize(value, "Q8_0") for n, (name, value) in enumerate(weights.items())}
    return write(tmp_path_factory.mktemp("gguf") / "right.gguf", stored)


def read(folder: Path, content: bytes, name: str = "x.gguf") -> Header:
    file = folder / name
    file.write_bytes(content)
    return read_header(file)


def test_types_are_those_of_the_gguf_package() -> None:
    """Numbers, names and sizes; and all that diffusers decodes can be loaded."""
    known = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (kind.name, kind.block, kind.nbytes) for number, kind in TYPES.items()} == known
    assert {kind.name for kind in SUPPORTED_GGUF_QUANT_TYPES} == {*LOADABLE, "BF16"}


@pytest.mark.parametrize("version", [2, 3])
def test_header_equals_the_gguf_reader(version: int, file: Path, tmp_path: Path) -> None:
    """Names, shapes, places and texts, in the order of the data."""
    content = bytearray(file.read_bytes())
    content[4] = version
    header = read(tmp_path, bytes(content))
    theirs = gguf.GGUFReader(file).tensors
    assert list(header.tensors) == [t.name for t in sorted(theirs, key=lambda t: t.data_offset)]
    for t in theirs:
        info = header.tensors[t.name]
        shape = tuple(int(size) for size in reversed(t.shape))
        assert (info.dtype, info.shape, info.start, info.nbytes) == (
            t.tensor_type.name, shape, t.data_offset, t.n_bytes
        )  # fmt: skip
    assert header.metadata == {"general.architecture": "lumina2"}


def test_header_kinds(tmp_path: Path) -> None:
    """Every metadata type, dimensions from none to five, alignment, no padding behind the last tensor."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(64)
        numbers = ((writer.add_uint8, 1), (writer.add_int64, -1), (writer.add_float32, 1.5), (writer.add_bool, True))
        for add, value in (*numbers, (writer.add_array, [[1, 2], [3]]), (writer.add_string, "ä")):
            add(f"x.{add.__name__}", value)

    shapes = ((), (3,), (2, 3), (1, 2, 3, 4, 5), (0, 4))
    tensors = {f"t{len(shape)}{shape[:1]}": torch.zeros(shape) for shape in shapes}
    file = write(tmp_path / "x.gguf", {**tensors, "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, change=change)
    header = read_header(file)
    assert {name: info.shape for name, info in header.tensors.items()} == {
        **{name: tuple(t.shape) for name, t in tensors.items()}, "b": (2, 2)
    }  # fmt: skip
    assert header.tensors["b"].dtype == "BF16"
    assert header.data_start % 64 == 0
    assert header.metadata == {"general.architecture": "lumina2", "x.add_string": "ä"}
    assert read(tmp_path, raw([tensor(b"a", (3,))], data=12)).tensors["a"].nbytes == 12


def test_nothing_but_the_header_is_read(file: Path) -> None:
    """The rest of one buffer at most."""
    counter = Path("/proc/self/io")
    if not counter.exists():
        pytest.skip("the system does not count")
    before = int(counter.read_text().split()[1])
    header = read_header(file)
    assert int(counter.read_text().split()[1]) - before < header.data_start + 3 * 8192


U32, TEXT, ARRAY, U64 = 4, 8, 9, 10
HUGE = 2**63
ORIGINAL = b"comfy.gguf.orig_shape.a"


def shape_entry(*sizes: int, kind: int = 5) -> bytes:
    return entry(ORIGINAL, ARRAY, struct.pack("<IQ", kind, len(sizes)) + struct.pack(f"<{len(sizes)}i", *sizes))


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (raw(version=1), errors.UnreadableFile, "version 1"),
        (raw(version=4), errors.UnreadableFile, "version 4"),
        (raw(version=3 << 24), errors.UnreadableFile, "big-endian"),
        (raw(counts=(2**40, 0)), errors.BadHeader, "tensors"),
        (raw(counts=(1, 2**40)), errors.BadHeader, "metadata entries"),
        (raw(counts=(0, 0), tensors=[]), errors.UnreadableFile, "no tensors"),
        (raw([struct.pack("<Q", HUGE)]), errors.BadHeader, "text claims"),
        (raw([struct.pack("<Q", MAX_NAME_BYTES + 1)]), errors.BadHeader, "text claims"),
        (raw([struct.pack("<Q", MAX_NAME_BYTES)]), errors.TruncatedFile, "inside the header"),
        (raw(entries=[entry(b"k", TEXT, struct.pack("<Q", MAX_STRING_BYTES + 1))]), errors.BadHeader, "text claims"),
        (raw([text(b"\xff\xfe")]), errors.BadHeader, "UTF-8"),
        (raw([tensor(b"a"), tensor(b"a", offset=32)], data=64), errors.BadHeader, "twice"),
        (raw([tensor(b"a", (1,) * 9)]), errors.BadHeader, "9 dimensions"),
        (raw([tensor(b"a", (2**40, 2**40))]), errors.BadHeader, "more elements"),
        (raw([tensor(b"a", (2**61,))]), errors.BadHeader, "past what a file"),
        (raw([tensor(b"a", (33,), 2)]), errors.BadHeader, r"whole Q4_0 blocks of 32"),
        (raw([tensor(b"a", (), 8)]), errors.BadHeader, "whole Q8_0 blocks"),
        (raw([tensor(b"a", kind=99)]), errors.UnknownDtype, "GGML type 99.*Q8_0.*BF16"),
        (raw([tensor(b"a", kind=4)]), errors.UnknownDtype, "GGML type 4"),
        (raw([tensor(b"a"), tensor(b"b", offset=33)], data=96), errors.BadHeader, "b: its offset 33"),
        (raw([tensor(b"a"), tensor(b"b", offset=0)]), errors.BadHeader, "b: its range overlaps"),
        (raw([tensor(b"a", (16,)), tensor(b"b", offset=32)], data=96), errors.BadHeader, "b: its range overlaps"),
        (raw([tensor(b"a"), tensor(b"b", offset=64)], data=96), errors.BadHeader, "b: its range leaves a gap"),
        (raw([tensor(b"a", offset=32)], data=64), errors.BadHeader, "a: its range leaves a gap"),
        (raw([tensor(b"a", offset=2**62)]), errors.BadHeader, "a: its range leaves a gap"),
        (raw(data=31), errors.TruncatedFile, "95 of 96 bytes"),
        (raw(data=0), errors.TruncatedFile, "inside the tensor data"),
        (raw()[:20], errors.TruncatedFile, "20 of at least 24 bytes"),
        (raw()[:30], errors.TruncatedFile, "inside the header"),
        (raw(data=64), errors.TrailingBytes, "32 bytes after"),
        (raw([tensor(b"a", (9,))], data=65), errors.TrailingBytes, "1 byte after"),
        (raw(entries=[entry(b"k", 13, b"")]), errors.BadHeader, "k has the unknown type 13"),
        (raw(entries=[entry(b"k", ARRAY, struct.pack("<IQ", 13, 1))]), errors.BadHeader, "unknown type 13"),
        (raw(entries=[entry(b"k", ARRAY, struct.pack("<IQ", U64, 2**60))]), errors.BadHeader, "items"),
        (raw(entries=[entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)]), errors.BadHeader, "deep"),
        (raw(entries=[entry(b"k", U32, bytes(4))] * 2), errors.BadHeader, "k occurs twice"),
        (raw(entries=[entry(b"general.alignment", U32, struct.pack("<I", 24))]), errors.BadHeader, "alignment is 24"),
        (raw(entries=[entry(b"general.alignment", U32, bytes(4))]), errors.BadHeader, "alignment is 0"),
        (raw(entries=[entry(b"general.alignment", TEXT, text(b"32"))]), errors.BadHeader, "alignment is '32'"),
        (raw(entries=[shape_entry(3, 3)]), errors.BadHeader, r"original shape \[3, 3\]"),
        (raw(entries=[shape_entry(-2, -4)]), errors.BadHeader, "not a list of sizes"),
        (raw(entries=[shape_entry(*(1,) * 9)]), errors.BadHeader, "not a list of sizes"),
        (raw(entries=[entry(ORIGINAL, TEXT, text(b"8"))]), errors.BadHeader, "not a list of sizes"),
        (b"XXXX" + raw()[4:], errors.NotACheckpoint, "is not a GGUF file but unknown binary data"),
        (b"<!DOCTYPE html><html>", errors.NotACheckpoint, "is not a GGUF file but a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", errors.NotACheckpoint, "git-lfs pointer"),
        (b"\x80\x02}q\x00." + bytes(20), errors.NotACheckpoint, "pickle"),
        (b"", errors.NotACheckpoint, "empty"),
        (b"GG", errors.NotACheckpoint, "unknown binary data"),
        (b"GGUF", errors.TruncatedFile, "4 of at least 8 bytes"),
    ],
)  # fmt: skip
def test_refusals(content: bytes, error: type[Exception], said: str, tmp_path: Path) -> None:
    """C03: one fault each, named."""
    with pytest.raises(error, match=said) as refused:
        read(tmp_path, content)
    assert type(refused.value) is error


def test_safetensors_under_the_suffix(tmp_path: Path) -> None:
    """A .gguf file that is safetensors is named as such."""
    content = save(tmp_path / "x.safetensors", {"a": torch.ones(2)}).read_bytes()
    with pytest.raises(errors.NotACheckpoint, match=r"not a GGUF file but a safetensors file. Give it the suffix"):
        read(tmp_path, content)


def test_cut_by_200_bytes(file: Path, tmp_path: Path) -> None:
    """C03: how much is there and how much should be."""
    content = file.read_bytes()
    with pytest.raises(errors.TruncatedFile, match=f"{len(content) - 200:,} of ") as refused:
        read(tmp_path, content[:-200])
    assert len(content) - 32 < refused.value.expected_bytes <= len(content)


HEADER = raw(
    [tensor(b"a", (32, 2), 8), tensor(b"b", (3,), offset=96)],
    [entry(b"general.architecture", TEXT, text(b"flux")), shape_entry(4, 16),
     entry(b"k", ARRAY, struct.pack("<IQ", TEXT, 2) + text(b"x") * 2)], 108,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(HEADER) - 109), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, len(HEADER)),
)
def test_any_header_is_read_or_refused(
    changes: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Damaged bytes never raise anything else, and what is read lies inside the file."""
    content = bytearray(HEADER if cut % 2 else HEADER[:cut])
    for position, value in changes:
        content[position % max(len(content), 1) : position + 1] = bytes([value])
    file = tmp_path_factory.getbasetemp() / "mutated.gguf"
    file.write_bytes(content)
    try:
        header = read_header(file)
    except errors.UnreadableFile:
        return
    assert all(info.start + info.nbytes <= len(content) for info in header.tensors.values())
