"""Tell what a file is from its first bytes, for files that are not what their name says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sniffed:
    """A file that is no checkpoint.

    Attributes:
        what: what it is, as the end of "is not a safetensors file but ..." (or GGUF).
        remedy: what the user can do.
    """

    what: str
    remedy: str


_PICKLE = Sniffed(
    "a pickle (PyTorch .ckpt/.pt), which can run code and is never opened",
    "Get the safetensors version, or convert it with a tool that you trust",
)
_PAGE = Sniffed("a web page", "The download went wrong (a login page is usual): download it again while logged in")


def sniff(start: bytes, size: int) -> Sniffed | None:
    """Recognise what begins neither like a safetensors file (a sane length, then a brace) nor like GGUF (its magic).

    Args:
        start: the first bytes of the file, 512 are enough.
        size: the file's size in bytes.

    Returns:
        What the file is, or None where it may be a checkpoint.
    """
    if size == 0:
        return Sniffed("empty (0 bytes)", "The download did not start: download it again")
    if not start.strip(b"\0"):
        return Sniffed("all zeros at its start", "The download was not written to the disk: download it again")
    if start.startswith(b"version https://git-lfs"):
        return Sniffed(
            "a git-lfs pointer, a text file that stands for the real one",
            "Run 'git lfs pull' in the repository it came from, or download the file itself",
        )
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _PICKLE if b"data.pkl" in start or b"archive/" in start else Sniffed("a zip archive", "Unpack it first")
    if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return _PICKLE
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!", b"(\xb5/\xfd")):
        return Sniffed("a compressed archive", "Unpack it first")
    return _sniff_text(start.lstrip(b"\xef\xbb\xbf \t\r\n").lower())


def _sniff_text(text: bytes) -> Sniffed | None:
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        return _PAGE
    if text.startswith((b'{"', b"{\n", b"{\r", b"{ ", b"[")) and b"\0" not in text:
        return Sniffed("a JSON text", "Choose the weights, not their index or an error message saved in their place")
    if len(text) >= 8 and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in text):
        return Sniffed("a text", "The download went wrong: open it in an editor to see what it says")
    return None
