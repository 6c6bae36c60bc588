"""The header reader: what the safetensors library accepts is read the same, what it refuses is refused by name."""

import gzip
import io
import json
import os
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tiny_models import BITS, write_from_manifest, write_sparse
from transplant.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, FileStamp, Header, read_header
from transplant.checkpoint.reader import TORCH_DTYPES
from transplant.checkpoint.sniff import sniff
from transplant.errors import (
    BadHeader,
    NotACheckpoint,
    OverrideArchMismatch,
    TrailingBytes,
    TruncatedFile,
    UnknownDtype,
    UnreadableFile,
)

CAP = 100_000_000
"""The library's cap, MAX_HEADER_SIZE in safetensors/src/tensor.rs."""

EXAMPLES = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

Entries = dict[str, Any]
Verdict = tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str] | None]
"""dtype and shape by name in the order of the data, and the metadata."""


def pack(header: bytes, data: bytes = b"") -> bytes:
    """A file: length, header, data."""
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> Entries:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def made(entries: Any, data: bytes = b"", **dumps: Any) -> bytes:
    """A file with an unpadded JSON header."""
    return pack(json.dumps(entries, **dumps).encode(), data)


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refused(folder: Path, content: bytes, error: type[UnreadableFile], *words: str) -> Any:
    """The refusal of a file with this content: of exactly this class, naming the file, with these words."""
    path = write(folder, content)
    with pytest.raises(UnreadableFile) as caught:
        read_header(path)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert caught.value.file == path
    assert message.startswith("model.safetensors: ")
    for word in words:
        assert word in message, message
    assert message == "".join(char if char.isprintable() else "?" for char in message)
    message.encode("utf-8")
    return caught.value


def ours(path: Path) -> Verdict | UnreadableFile:
    try:
        header = read_header(path)
    except UnreadableFile as error:
        return error
    return {name: (info.dtype, info.shape) for name, info in header.tensors.items()}, (
        None if header.metadata is None else dict(header.metadata)
    )


def librarys(path: Path) -> Verdict | SafetensorError:
    """What the safetensors library makes of the file. It reports empty metadata like none."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}, file.metadata()
    except SafetensorError as error:
        return error


def assert_agreement(path: Path) -> Header:
    """Both accept, with the same names, dtypes, shapes, order and metadata; the ranges cover the data."""
    library, own = librarys(path), ours(path)
    assert isinstance(library, tuple), library
    assert isinstance(own, tuple), own
    assert_same(own, library)
    header = read_header(path)
    assert_covers(header)
    return header


def assert_same(own: Verdict, library: Verdict) -> None:
    """Where several tensors of no bytes lie at one place the library puts them in an order that changes by run."""
    assert own == library
    assert [name for name, (_, shape) in own[0].items() if 0 not in shape] == [
        name for name, (_, shape) in library[0].items() if 0 not in shape
    ]


def assert_covers(header: Header) -> None:
    size = header.path.stat().st_size
    position = header.data_start
    for name, info in header.tensors.items():
        assert info.name == name
        assert info.start == position
        elements = 1
        for length in info.shape:
            elements *= length
        assert info.nbytes * 8 == elements * BITS[info.dtype]
        position += info.nbytes
    assert position == size
    assert 8 < header.data_start <= size


# --- agreement with the library -------------------------------------------------------------------------------------


def test_the_table_of_dtypes_is_the_librarys(tmp_path: Path) -> None:
    """It lists all it knows when it meets one that it does not."""
    path = write(tmp_path, made({"x": entry("F7", [1], 0, 1)}, b"x"))
    listed = re.search(r"expected one of (.*?) at", str(librarys(path)))
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(DTYPE_BITS)
    assert dict(DTYPE_BITS) == BITS


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_what_the_library_writes(tmp_path: Path, dtype: str) -> None:
    values = torch.arange(96, dtype=torch.uint8)
    tensor = values % 2 == 1 if dtype == "BOOL" else values.view(TORCH_DTYPES[dtype])
    tensors = {
        "flat": tensor,
        "matrix": tensor.clone().reshape(3, -1),
        "cube": tensor.clone().reshape(2, 3, -1),
        "empty": tensor[:0].clone(),
        "no columns": tensor[:0].clone().reshape(4, 0),
    }
    if dtype != "F4":  # four bits are no scalar
        tensors["scalar"] = tensor[0].clone()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = assert_agreement(path)
    assert set(header.tensors) == set(tensors)
    assert header.metadata == {"format": "pt"}
    for name, info in header.tensors.items():
        shape = tuple(tensors[name].shape)
        assert info.dtype == dtype
        assert info.shape == (shape if dtype != "F4" else (*shape[:-1], shape[-1] * 2))
        assert info.nbytes == tensors[name].numel() * tensors[name].element_size()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_written_by_hand(tmp_path: Path, dtype: str) -> None:
    size = 24 * BITS[dtype] // 8
    entries = {"b": entry(dtype, [2, 3, 4], size, 2 * size), "a": entry(dtype, [24], 0, size)}
    header = assert_agreement(write(tmp_path, made(entries, bytes(2 * size))))
    assert list(header.tensors) == ["a", "b"]
    assert [header.tensors[name].start - header.data_start for name in "ab"] == [0, size]
    assert [header.tensors[name].nbytes for name in "ab"] == [size, size]


def test_all_dtypes_in_one_file(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "model.safetensors", {dtype: (dtype, (4, 6)) for dtype in DTYPE_BITS})
    assert [info.dtype for info in assert_agreement(path).tensors.values()] == list(DTYPE_BITS)


def test_order_is_that_of_the_data(tmp_path: Path) -> None:
    entries = {"z": entry("U8", [4], 6, 10), "m": entry("U8", [5], 1, 6), "a": entry("U8", [1], 0, 1)}
    assert list(assert_agreement(write(tmp_path, made(entries, bytes(10)))).tensors) == ["a", "m", "z"]


def test_zero_length_tensors_lie_between_the_others(tmp_path: Path) -> None:
    entries = {
        "data": entry("U8", [4], 0, 4),
        "at the end": entry("F32", [0, 7], 4, 4),
        "at the start": entry("F4", [3, 0], 0, 0),
    }
    header = assert_agreement(write(tmp_path, made(entries, bytes(4))))
    assert list(header.tensors) == ["at the start", "data", "at the end"]


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_the_marker_of_scaled_fp8_files(tmp_path: Path, dtype: str, count: int) -> None:
    entries = {"scaled_fp8": entry(dtype, [count], 0, count), "w": entry("F16", [3], count, count + 6)}
    header = assert_agreement(write(tmp_path, made(entries, bytes(count + 6))))
    assert header.tensors["scaled_fp8"].shape == (count,)


def test_only_zero_length_tensors(tmp_path: Path) -> None:
    header = assert_agreement(write(tmp_path, made({"x": entry("F16", [0], 0, 0)})))
    assert header.data_start == header.stamp.size


@pytest.mark.parametrize("blanks", range(9))
def test_a_header_of_any_padding(tmp_path: Path, blanks: int) -> None:
    text = json.dumps({"x": entry("F64", [2], 0, 16)}).encode() + b" " * blanks
    header = assert_agreement(write(tmp_path, pack(text, bytes(16))))
    assert header.tensors["x"].start == 8 + len(text)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"empty": "", "": "no key", "é": "😀\n\u0000"}])
def test_metadata(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    entries = {"x": entry("U8", [1], 0, 1)} | ({} if metadata is None else {"__metadata__": metadata})
    assert assert_agreement(write(tmp_path, made(entries, b"x"))).metadata == metadata


def test_metadata_null_counts_as_none(tmp_path: Path) -> None:
    content = made({"__metadata__": None, "x": entry("U8", [1], 0, 1)}, b"x")
    assert assert_agreement(write(tmp_path, content)).metadata is None


def test_big_metadata(tmp_path: Path) -> None:
    metadata = {"modelspec.thumbnail": "ab=/" * 7250, "workflow": json.dumps({"nodes": [{"id": 1}]})}
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(3)}, path, metadata=metadata)
    header = assert_agreement(path)
    assert header.metadata == metadata
    assert header.data_start > 29_000


def test_fields_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    content = made({"x": {**entry("U8", [1], 0, 1), "comment": ["any", {"thing": None}]}}, b"x")
    assert list(assert_agreement(write(tmp_path, content)).tensors) == ["x"]


@pytest.mark.parametrize(
    "name", ["", " ", "模型.ü.😀.weight", "a\u0000b", "line\nbreak", "\u202e\x7f", "e\u0301", "x" * 5000]
)
def test_names_of_any_characters(tmp_path: Path, name: str) -> None:
    entries = {name: entry("U8", [1], 0, 1)}
    assert list(assert_agreement(write(tmp_path, made(entries, b"x"))).tensors) == [name]
    assert list(assert_agreement(write(tmp_path, made(entries, b"x", ensure_ascii=False))).tensors) == [name]


@pytest.mark.parametrize(
    "name", ["模型 ü 😀.safetensors", "e\u0301 nfd.safetensors", "\u00e9 nfc.safetensors", "[a] b;c.sft"]
)
def test_paths_of_any_characters(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, made({"x": entry("U8", [1], 0, 1)}, b"x"), name)
    header = read_header(str(path))
    assert header.path == path
    assert header.stamp == FileStamp.of(path) == FileStamp(path.stat().st_size, path.stat().st_mtime_ns)
    path.write_bytes(b"")
    with pytest.raises(NotACheckpoint, match=re.escape(name)):
        read_header(path)


def test_a_path_that_is_not_unicode(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model \xff.safetensors"))
    try:
        path.write_bytes(b"")
    except OSError:
        pytest.skip("the file system takes no such name")
    with pytest.raises(NotACheckpoint) as caught:
        read_header(path)
    str(caught.value).encode("utf-8")


def test_a_header_of_exactly_the_cap_and_one_byte_more(tmp_path: Path) -> None:
    assert MAX_HEADER_BYTES == CAP
    text = json.dumps({"x": entry("U8", [1], 0, 1)}).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", CAP) + text.ljust(CAP) + b"x")
    assert assert_agreement(path).data_start == 8 + CAP
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", CAP + 1))
        file.seek(0, io.SEEK_END)
        file.write(b"x")
    assert isinstance(librarys(path), SafetensorError)
    with pytest.raises(BadHeader, match="100,000,001 bytes long, the most allowed is 100,000,000"):
        read_header(path)


@pytest.mark.parametrize(
    "name",
    ["flux2_klein_4b_bf16", "aio_sd15_fp32", "z_image_turbo_comfy_int8_convrot", "z_image_turbo_kijai_fp8_scaled"],
)
def test_real_headers_at_full_size(tmp_path: Path, name: str) -> None:
    assert_agreement(write_from_manifest(tmp_path / "model.safetensors", name))


# --- refusals: a file that is something else, or not all there --------------------------------------------------------


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"content" * 20)
    return buffer.getvalue()


def torch_saved(legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(64)}, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12309866400\n"
)
INDEX = json.dumps({"metadata": {"total_size": 9}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors"}})

OTHER_FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "empty"),
    ("one zero", b"\0", "zeros"),
    ("zeros", bytes(4096), "zeros"),
    ("html", b"<!DOCTYPE html>\n<html><body>Log in</body></html>", "web page"),
    ("html, lower case", b"<!doctype html><title>404</title>", "web page"),
    ("html, upper case", b"<HTML><HEAD><TITLE>Gateway</TITLE></HEAD></HTML>", "web page"),
    ("html after blanks", b"\r\n\t  \n<html lang='en'>", "web page"),
    ("html after a byte order mark", b"\xef\xbb\xbf<!DOCTYPE html>", "web page"),
    ("html, non-ascii", "<html><title>登录</title></html>".encode(), "web page"),
    ("xml", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web page"),
    ("git-lfs pointer", LFS, "git-lfs pointer"),
    ("torch.save", torch_saved(legacy=False), "pickle"),
    ("torch.save, legacy", torch_saved(legacy=True), "pickle"),
    *((f"pickle {n}", pickle.dumps({"w": [1.5] * 99}, protocol=n), "pickle") for n in (2, 3, 4, 5)),
    ("zip", zipped("model.safetensors"), "zip archive"),
    ("empty zip", b"PK\x05\x06" + bytes(18), "zip archive"),
    ("gzip", gzip.compress(b"content" * 99), "compressed archive"),
    ("zstandard", b"(\xb5/\xfd\x04\x58\x61\x00\x00 compressed", "compressed archive"),
    ("json index", INDEX.encode(), "JSON text"),
    ("json index, indented", json.dumps(json.loads(INDEX), indent=2).encode(), "JSON text"),
    ("json error", b'{"error":"Repository not found"}', "JSON text"),
    ("json list", b'["a.safetensors", "b.safetensors"]', "JSON text"),
    ("text", b"Not Found", "text"),
    ("long text", b"Access to this model is restricted.\n" * 99, "text"),
    ("binary", bytes(range(255, 0, -1)) * 8, "unknown binary data"),
    ("a header that does not begin with a brace", pack(b' {"x":1}'), "unknown binary data"),
    ("a header of no bytes before data", bytes(8) + b"\x01\x02\x03\x04" * 9, "unknown binary data"),
]


@pytest.mark.parametrize(
    ("content", "found"), [case[1:] for case in OTHER_FILES], ids=[case[0] for case in OTHER_FILES]
)
def test_files_of_another_kind(tmp_path: Path, content: bytes, found: str) -> None:
    error = refused(tmp_path, content, NotACheckpoint, "is not a safetensors file but", found)
    assert found in error.found
    assert error.remedy
    assert isinstance(librarys(error.file), SafetensorError)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    for protocol in (2, 3, 4, 5):
        refused(tmp_path, pickle.dumps(Payload(), protocol=protocol), NotACheckpoint, "pickle", "never opened")
    assert not (tmp_path / "executed").exists()


def test_sniffing_needs_512_bytes_and_lets_safetensors_pass() -> None:
    for _, content, found in OTHER_FILES:
        sniffed = sniff(content[:512], len(content))
        if "binary" in found:
            assert sniffed is None
        else:
            assert sniffed is not None
            assert found in sniffed.what
    for name in ("a", "transformer_blocks.0.weight"):
        assert sniff(made({name: entry("U8", [1], 0, 1)}, b"x")[:512], 80) is None


COMPLETE = made({"first": entry("F32", [5], 0, 20), "last": entry("BF16", [2, 5], 20, 40)}, bytes(range(40)))
DATA_START = len(COMPLETE) - 40


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 10, 30, DATA_START - 1])
def test_cut_inside_the_header(tmp_path: Path, kept: int) -> None:
    error = refused(tmp_path, COMPLETE[:kept], TruncatedFile, "incomplete", "header", f"{kept} of at least ", "again")
    assert (error.where, error.found_bytes) == ("header", kept)
    assert error.expected_bytes == (DATA_START if kept > 8 else 10)


@pytest.mark.parametrize("lost", [1, 10, 20, 39, 40])
def test_cut_inside_the_data(tmp_path: Path, lost: int) -> None:
    total = len(COMPLETE)
    words = ("incomplete", "tensor data", f"{total - lost} of {total} bytes", "again")
    error = refused(tmp_path, COMPLETE[:-lost], TruncatedFile, *words)
    assert (error.where, error.found_bytes, error.expected_bytes) == ("data", total - lost, total)


def test_sizes_in_messages_are_grouped(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "model.safetensors", {"w": ("BF16", (2048, 4096))})
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(TruncatedFile, match=f"{size // 2:,} of {size:,} bytes"):
        read_header(path)


@pytest.mark.parametrize("extra", [1, 8, 4096])
def test_trailing_bytes(tmp_path: Path, extra: int) -> None:
    content = COMPLETE + bytes(extra)
    error = refused(tmp_path, content, TrailingBytes, f"{extra:,} byte{'s' if extra > 1 else ''} after its last tensor")
    assert (error.found_bytes, error.expected_bytes) == (len(content), len(COMPLETE))


def test_no_tensors(tmp_path: Path) -> None:
    refused(tmp_path, made({}), UnreadableFile, "holds no tensors")
    refused(tmp_path, made({"__metadata__": {"format": "pt"}}), UnreadableFile, "holds no tensors")
    refused(tmp_path, made({}, b"xyz"), TrailingBytes, "3 bytes")


def test_a_length_over_the_cap(tmp_path: Path) -> None:
    for length in (CAP + 1, 2**40, 2**63, 2**64 - 1):
        content = struct.pack("<Q", length) + COMPLETE[8:]
        refused(tmp_path, content, BadHeader, f"{length:,} bytes long", "100,000,000")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    for name, reason in (("folder.safetensors", "a folder"), ("absent.safetensors", "No such file"), ("a\0b", "null")):
        with pytest.raises(UnreadableFile, match=reason) as caught:
            read_header(tmp_path / name)
        assert type(caught.value) is UnreadableFile
        assert isinstance(caught.value, OverrideArchMismatch)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path, COMPLETE)
    path.chmod(0)
    with pytest.raises(UnreadableFile, match="Permission denied"):
        read_header(path)


# --- refusals: headers that contradict themselves ---------------------------------------------------------------------

X = b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BROKEN_HEADERS: list[tuple[str, bytes]] = [
    ("no bytes", b""),
    ("a brace", b"{"),
    ("not JSON", b"{]"),
    ("cut", b'{"x":{"dtype":"U8","shape":[1],"data_off'),
    ("two objects", b"{" + X + b"}{}"),
    ("zeros for padding", b"{" + X + b"}\0\0"),
    ("single quotes", b"{'x':1}"),
    ("a trailing comma", b"{" + X + b",}"),
    ("a comment", b"{" + X + b"/**/}"),
    ("not UTF-8", b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
    ("a surrogate in UTF-8", b'{"\xed\xa0\x80":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
    ("an overlong NUL", b'{"\xc0\x80":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
    ("a control character that is not escaped", b'{"a\nb":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
    ("deep nesting", DEEP),
    ("5000 digits", b'{"x":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,1]}}'),
    ("metadata that is a list", b'{"__metadata__":[],' + X + b"}"),
    ("metadata with a number", b'{"__metadata__":{"a":1},' + X + b"}"),
    ("metadata with null", b'{"__metadata__":{"a":null},' + X + b"}"),
    ("metadata with an object", b'{"__metadata__":{"a":{}},' + X + b"}"),
    ("metadata, not Unicode", b'{"__metadata__":{"a":"\\ud800"},' + X + b"}"),
    ("metadata key, not Unicode", b'{"__metadata__":{"\\udc00":""},' + X + b"}"),
]


@pytest.mark.parametrize("header", [case[1] for case in BROKEN_HEADERS], ids=[case[0] for case in BROKEN_HEADERS])
def test_headers_that_are_broken_as_a_whole(tmp_path: Path, header: bytes) -> None:
    error = refused(tmp_path, pack(header, b"x" if header else b"{"), BadHeader, "broken header")
    assert error.tensor is None
    assert len(str(error)) < 500
    assert isinstance(librarys(error.file), SafetensorError)


SIZE_OF_U64 = 2**64 - 1
BROKEN_ENTRIES: list[tuple[str, Any, str]] = [
    ("a number", 7, "not a JSON object"),
    ("null", None, "not a JSON object"),
    ("text", "F32", "not a JSON object"),
    ("no fields", {}, "no dtype"),
    ("no dtype", {"shape": [4], "data_offsets": [0, 4]}, "no dtype"),
    ("no shape", {"dtype": "U8", "data_offsets": [0, 4]}, "shape None is not"),
    ("no offsets", {"dtype": "U8", "shape": [4]}, "data_offsets None are not"),
    ("dtype null", entry(None, [4], 0, 4), "no dtype"),
    ("dtype a number", entry(8, [4], 0, 4), "no dtype"),
    ("dtype a list", entry(["U8"], [4], 0, 4), "no dtype"),
    ("shape null", entry("U8", None, 0, 4), "shape None"),
    ("shape a number", entry("U8", 4, 0, 4), "shape 4"),
    ("shape text", entry("U8", "4", 0, 4), "shape '4'"),
    ("shape an object", entry("U8", {"0": 4}, 0, 4), "shape {'0': 4}"),
    ("shape nested", entry("U8", [[4]], 0, 4), "shape [[4]]"),
    ("shape with a float", entry("U8", [4.0], 0, 4), "shape [4.0]"),
    ("shape with a bool", entry("U8", [4, True], 0, 4), "shape [4, True]"),
    ("shape with text", entry("U8", ["4"], 0, 4), "shape ['4']"),
    ("shape negative", entry("U8", [-2, -2], 0, 4), "shape [-2, -2]"),
    ("shape beyond 64 bits", entry("U8", [10**25, 0], 0, 4), "not a list of sizes"),
    ("shape of 4000 digits", entry("U8", [10**4000, 10**4000], 0, 4), "not a list of sizes"),
    ("product beyond 64 bits", entry("U8", [2**40, 2**40], 0, 4), "more elements than can be counted"),
    ("product beyond 64 bits, then zero", entry("U8", [2**40, 2**40, 0], 0, 0), "more elements than can be counted"),
    ("product that wraps to 4", entry("U8", [2**62 + 1, 4], 0, 4), "more elements than can be counted"),
    ("offsets null", {"dtype": "U8", "shape": [4], "data_offsets": None}, "data_offsets None"),
    ("offsets empty", {"dtype": "U8", "shape": [4], "data_offsets": []}, "data_offsets []"),
    ("one offset", {"dtype": "U8", "shape": [4], "data_offsets": [4]}, "data_offsets [4]"),
    ("three offsets", {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}, "data_offsets [0, 4, 8]"),
    ("offsets negative", entry("U8", [4], -4, 0), "data_offsets [-4, 0]"),
    ("offsets with a float", entry("U8", [4], 0, 4.0), "data_offsets [0, 4.0]"),
    ("offsets with a bool", entry("U8", [1], False, True), "data_offsets [False, True]"),
    ("offsets with null", entry("U8", [4], None, 4), "data_offsets [None, 4]"),
    ("offsets not finite", entry("U8", [4], 0, float("inf")), "data_offsets [0, inf]"),
    ("offsets beyond 64 bits", entry("U8", [4], SIZE_OF_U64 + 1, SIZE_OF_U64 + 5), "are not a range"),
    ("offsets of 4000 digits", entry("U8", [4], 10**4000, 10**4000 + 4), "are not a range"),
    ("start after end", entry("U8", [4], 4, 0), "data_offsets [4, 0]"),
    ("range too short", entry("F32", [4], 0, 4), "F32 [4] takes 16 bytes, its range has 4"),
    ("range too long", entry("U8", [3], 0, 4), "U8 [3] takes 3 bytes, its range has 4"),
    ("range for nothing", entry("U8", [0], 0, 4), "U8 [0] takes 0 bytes, its range has 4"),
    ("scalar of two", entry("BF16", [], 0, 4), "BF16 [] takes 2 bytes, its range has 4"),
    ("half a byte over", entry("F4", [7], 0, 4), "F4 [7] takes 28 bits, not whole bytes"),
    ("half a byte short", entry("F4", [3, 3], 0, 4), "F4 [3, 3] takes 36 bits, not whole bytes"),
    ("a scalar of half a byte", entry("F4", [], 0, 1), "F4 [] takes 4 bits, not whole bytes"),
    ("six bits", entry("F6_E2M3", [5], 0, 4), "F6_E2M3 [5] takes 30 bits, not whole bytes"),
    ("F4 counted in bytes", entry("F4", [4], 0, 4), "F4 [4] takes 2 bytes, its range has 4"),
    ("not at the start", entry("U8", [3], 1, 4), "leaves a gap"),
]


@pytest.mark.parametrize(
    ("broken", "words"), [case[1:] for case in BROKEN_ENTRIES], ids=[case[0] for case in BROKEN_ENTRIES]
)
def test_entries_that_are_broken(tmp_path: Path, broken: Any, words: str) -> None:
    error = refused(tmp_path, made({"blocks.0.weight": broken}, bytes(4)), BadHeader, "tensor blocks.0.weight: ", words)
    assert error.tensor == "blocks.0.weight"
    assert len(str(error)) < 500
    assert isinstance(librarys(error.file), SafetensorError)


@pytest.mark.parametrize("dtype", ["F7", "f32", "float32", "", "BF16 ", "Q4_0", "F8", "\ud800", "a\nb"])
def test_unknown_dtypes(tmp_path: Path, dtype: str) -> None:
    error = refused(tmp_path, made({"w": entry(dtype, [4], 0, 4)}, bytes(4)), UnknownDtype, "tensor w", "dtype")
    assert (error.tensor, error.dtype) == ("w", dtype)
    assert isinstance(librarys(error.file), SafetensorError)


def test_ranges_that_overlap_or_leave_gaps(tmp_path: Path) -> None:
    first = entry("U8", [4], 0, 4)
    cases: list[tuple[Entries, str]] = [
        (entry("U8", [4], 3, 7), "overlaps"),
        (entry("U8", [4], 0, 4), "overlaps"),
        (entry("U8", [3], 1, 4), "overlaps"),
        (entry("U8", [3], 5, 8), "leaves a gap"),
        (entry("U8", [0], 2, 2), "overlaps"),
        (entry("U8", [0], 8, 8), "leaves a gap"),
    ]
    for second, word in cases:
        error = refused(tmp_path, made({"a": first, "b": second}, bytes(8)), BadHeader, "tensor b: ", word)
        assert error.tensor == "b"
        assert isinstance(librarys(error.file), SafetensorError)


def test_a_range_beyond_the_file_is_a_file_that_was_cut(tmp_path: Path) -> None:
    content = made({"a": entry("U8", [2**62], 0, 2**62)})
    refused(tmp_path, content + bytes(4), TruncatedFile, f" of {len(content) + 2**62:,} bytes")


@pytest.mark.parametrize(
    "text",
    [
        '{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        '{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"\\u0077":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    ],
)
def test_a_name_twice(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, pack(text.encode(), bytes(2)), BadHeader, "tensor w: ", "twice").tensor == "w"


def test_a_name_twice_at_the_end_of_a_long_header(tmp_path: Path) -> None:
    names = [*(f'"t{n}":0' for n in range(100_000)), '"last":1', '"last":2']
    before = time.process_time()
    assert refused(tmp_path, pack(("{" + ",".join(names) + "}").encode()), BadHeader, "twice").tensor == "last"
    assert time.process_time() - before < 10


def test_the_shortest_message_for_the_longest_header(tmp_path: Path) -> None:
    wide = [3] * 200_000
    flat = [1] * 200_000
    for shape, offsets in ((wide, [0, 1]), ([*wide, -1], [0, 1]), ([*flat, 2], [0, 1]), ([1], wide)):
        content = made({"w": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}, b"x")
        assert len(str(refused(tmp_path, content, BadHeader, "tensor w: "))) < 500


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\u0000b", "a\\x00b"), ("a\nb", "a\\nb"), ("\x1b[31mred", "\\x1b[31mred"), ("\u202egnp", "\\u202egnp")],
)
def test_names_are_shown_with_control_characters_escaped(tmp_path: Path, name: str, shown: str) -> None:
    error = refused(tmp_path, made({name: entry("U8", [3], 0, 2)}, bytes(2)), BadHeader, f"tensor {shown}: ")
    assert error.tensor == name
    refused(tmp_path, made({name: entry("F7", [3], 0, 2)}, bytes(2)), UnknownDtype, f"tensor {shown} ")


@pytest.mark.parametrize("name", ["\ud83d", "blocks.\udc00.weight", "\udc00\ud800"])
def test_names_with_half_a_surrogate_pair(tmp_path: Path, name: str) -> None:
    error = refused(tmp_path, made({name: entry("U8", [2], 0, 2)}, bytes(2)), BadHeader, "not valid Unicode", "\\ud")
    assert error.tensor == name
    assert isinstance(librarys(error.file), SafetensorError)


def test_messages_show_names_that_are_not_ascii_as_they_are(tmp_path: Path) -> None:
    refused(tmp_path, made({"模型.😀": entry("U8", [3], 0, 2)}, bytes(2)), BadHeader, "tensor 模型.😀: ")


def test_an_unreadable_file_is_the_recoverable_error_of_a_load() -> None:
    for error in (NotACheckpoint, TruncatedFile, TrailingBytes, BadHeader, UnknownDtype):
        assert issubclass(error, UnreadableFile)
    assert issubclass(UnreadableFile, OverrideArchMismatch)


# --- where we and the library part ------------------------------------------------------------------------------------

LENIENT: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "-0 is the integer 0": (
        lambda text: re.search(rb"-0(?![.\deE])", text),
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}',
    ),
    "NaN and Infinity, in fields that are ignored": (
        lambda text: re.search(rb"NaN|Infinity", text),
        b"{" + X[:-1] + b',"y":[NaN,-Infinity]}}',
    ),
    "floats beyond 64 bits, in fields that are ignored": (
        lambda text: re.search(rb"\d[eE]\+?\d{3}", text),
        b"{" + X[:-1] + b',"y":1e999}}',
    ),
    "escaped halves of surrogate pairs, in fields that are ignored": (
        lambda text: re.search(rb"\\u[dD][89a-fA-F]", text),
        b"{" + X[:-1] + b',"y":"\\ud800"}}',
    ),
    "nesting of 128 and more, in fields that are ignored": (
        lambda text: max(text.count(b"["), text.count(b"{")) > 100,
        b"{" + X[:-1] + b',"y":' + b"[" * 200 + b"]" * 200 + b"}}",
    ),
}
"""Why we may accept a header that the library refuses, with an example. None of them changes what a tensor is."""

STRICT: dict[str, tuple[Callable[[Exception, bytes], object], bytes]] = {
    "a name twice, of which the library takes the last": (
        lambda error, _: "twice" in str(error),
        b'{"x":{"dtype":"U8","shape":[9],"data_offsets":[0,9]},' + X + b"}",
    ),
    "a metadata key twice": (
        lambda error, _: "twice" in str(error),
        b'{"__metadata__":{"a":"1","a":"2"},' + X + b"}",
    ),
    "a field twice that is ignored": (
        lambda error, _: "twice" in str(error),
        b"{" + X[:-1] + b',"y":1,"y":2}}',
    ),
    "a header that begins with a blank": (
        lambda error, text: isinstance(error, NotACheckpoint) and text[:1] in b" \t\r\n",
        b" {" + X + b"}",
    ),
    "sizes of 2**63 and more, beside a zero": (
        lambda error, text: "is not a list of sizes" in str(error) and re.search(rb"\d{19}", text),
        b'{"e":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]},' + X + b"}",
    ),
    "an entry written as a list": (
        lambda error, _: "entry is not a JSON object" in str(error),
        b'{"x":["U8",[1],[0,1]]}',
    ),
    "a dtype written as an object": (
        lambda error, _: "entry has no dtype" in str(error),
        b'{"x":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
    ),
}
"""Why we may refuse a header that the library accepts, with an example. A file without tensors is the last."""


@pytest.mark.parametrize("reason", LENIENT)
def test_each_leniency_is_one(tmp_path: Path, reason: str) -> None:
    applies, text = LENIENT[reason]
    path = write(tmp_path, pack(text, b"x"))
    assert isinstance(librarys(path), SafetensorError)
    assert ours(path) == ({"x": ("U8", (1,))}, None)
    assert applies(text)


@pytest.mark.parametrize("reason", STRICT)
def test_each_strictness_is_one(tmp_path: Path, reason: str) -> None:
    applies, text = STRICT[reason]
    path = write(tmp_path, pack(text, b"x"))
    library, own = librarys(path), ours(path)
    assert isinstance(library, tuple), library
    assert isinstance(own, UnreadableFile)
    assert applies(own, text)


def compare(path: Path, text: bytes) -> Verdict | UnreadableFile:
    """Ours and the library's verdict agree, or the difference is one of those listed above."""
    library, own = librarys(path), ours(path)
    if isinstance(own, UnreadableFile):
        agreed = isinstance(library, SafetensorError) or library[0] == {}
        assert agreed or any(applies(own, text) for applies, _ in STRICT.values()), (own, library, text)
        return own
    assert_covers(read_header(path))
    if isinstance(library, SafetensorError):
        assert any(applies(text) for applies, _ in LENIENT.values()), (library, text)
    else:
        assert_same(own, library)
    return own


# --- properties -------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=6).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Entries, bytes]:
    """A valid header, entries in any order, with its data."""
    order = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    entries: Entries = {}
    end = 0
    for name in order:
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(SHAPES)
        bits = BITS[dtype]
        for length in shape:
            bits *= length
        if bits % 8:
            shape, bits = [*shape, 4], bits * 4
        entries[name] = entry(dtype, shape, end, end + bits // 8)
        end += bits // 8
    metadata = draw(st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=9), max_size=3))
    if metadata is not None:
        entries["__metadata__"] = metadata
    shuffled = {name: entries[name] for name in draw(st.permutations(sorted(entries)))}
    return shuffled, draw(st.binary(min_size=end, max_size=end)) if end <= 64 else bytes(end)


@EXAMPLES
@given(content=st.binary(max_size=300))
def test_any_bytes_give_a_header_or_a_refusal(tmp_path: Path, content: bytes) -> None:
    compare(write(tmp_path, content), content[8:])


@EXAMPLES
@given(text=st.binary(max_size=80), data=st.binary(max_size=40))
def test_any_bytes_in_a_header(tmp_path: Path, text: bytes, data: bytes) -> None:
    compare(write(tmp_path, pack(b"{" + text, data)), b"{" + text)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(sorted(DTYPE_BITS)),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=6,
)
LOOSE_ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F4", "BF16"]) | JSON_VALUES,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(0, 8), min_size=2, max_size=2) | JSON_VALUES,
        "extra": JSON_VALUES,
    },
)


@EXAMPLES
@given(entries=st.dictionaries(NAMES, LOOSE_ENTRIES | JSON_VALUES, max_size=3), size=st.integers(0, 8))
def test_any_json_in_a_header(tmp_path: Path, entries: Entries, size: int) -> None:
    text = json.dumps(entries).encode()
    compare(write(tmp_path, pack(text, bytes(size))), text)


@EXAMPLES
@given(made_up=headers(), blanks=st.integers(0, 9), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_valid_headers_round_trip(
    tmp_path: Path, made_up: tuple[Entries, bytes], blanks: int, ascii_only: bool, indent: int | None
) -> None:
    entries, data = made_up
    text = json.dumps(entries, ensure_ascii=ascii_only, indent=indent).encode() + b" " * blanks
    path = write(tmp_path, pack(text, data))
    header = assert_agreement(path)
    start = 8 + len(text)
    found = {
        name: entry(info.dtype, list(info.shape), info.start - start, info.start - start + info.nbytes)
        for name, info in header.tensors.items()
    }
    assert found == {name: fields for name, fields in entries.items() if name != "__metadata__"}
    assert header.metadata == entries.get("__metadata__")
    assert header.data_start == start


@EXAMPLES
@given(made_up=headers(), position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_one_byte_of_a_valid_header_changed(
    tmp_path: Path, made_up: tuple[Entries, bytes], position: int, byte: int
) -> None:
    entries, data = made_up
    content = bytearray(made(entries, data))
    content[position % (len(content) - len(data))] = byte
    compare(write(tmp_path, bytes(content)), bytes(content[8:]))


@pytest.mark.parametrize("digit", b'0123456789-+.eE,:[]{}" \\nX\x00\xff')
def test_every_byte_of_one_header_changed(tmp_path: Path, digit: int) -> None:
    valid = made(
        {"a": entry("F8_E4M3", [2, 2], 0, 4), "b": entry("I16", [], 4, 6), "c": entry("F4", [0], 6, 6)}, b"123456"
    )
    accepted = 0
    for position in range(len(valid) - 6):
        content = bytearray(valid)
        content[position] = digit
        accepted += isinstance(compare(write(tmp_path, bytes(content)), bytes(content[8:])), tuple)
    assert accepted < len(valid) / 4


@EXAMPLES
@given(made_up=headers(), cut=st.integers(1, 10_000))
def test_no_part_of_a_file_is_a_file(tmp_path: Path, made_up: tuple[Entries, bytes], cut: int) -> None:
    entries, data = made_up
    content = made(entries, data)
    kept = len(content) - 1 - cut % len(content)
    verdict = ours(write(tmp_path, content[:kept]))
    assert isinstance(verdict, TruncatedFile) or (kept == 0 and isinstance(verdict, NotACheckpoint))


# --- no more is read than the header ----------------------------------------------------------------------------------


def bytes_read() -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        pytest.skip("the system does not count reads")
    return int(re.findall(r"rchar: (\d+)", counters.read_text())[0])


def test_only_the_header_of_a_file_of_20_gb_is_read(tmp_path: Path) -> None:
    tensors: dict[str, tuple[str, Iterable[int]]] = {f"blocks.{n}.weight": ("BF16", (4096, 12288)) for n in range(200)}
    path = write_sparse(tmp_path / "model.safetensors", {name: (d, list(s)) for name, (d, s) in tensors.items()})
    assert path.stat().st_size > 20_000_000_000
    before = bytes_read()
    overhead = bytes_read() - before
    before = bytes_read()
    header = read_header(path)
    read = bytes_read() - before - overhead
    assert len(header.tensors) == 200
    assert header.data_start > 15_000
    assert header.data_start <= read <= header.data_start + 16_384  # one block of the buffered reader more
