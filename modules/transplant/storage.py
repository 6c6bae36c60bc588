"""Write a file so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` beside `path` and rename it into place.

    Raises:
        OSError: the folder cannot be written or the disk is full; the old file is untouched.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)  # gone already where it was renamed


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders of one disk change names in one step, which Python's own renames cannot.

    Returns:
        Whether it was done: not on Windows, nor on file systems that cannot.
    """
    if sys.platform == "linux":
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of renameat2(2)
        arguments, name = (here, os.fsencode(one), here, os.fsencode(other), swap), "renameat2"
    elif sys.platform == "darwin":
        swap = 2  # RENAME_SWAP of renamex_np(2)
        arguments, name = (os.fsencode(one), os.fsencode(other), swap), "renamex_np"
    else:
        return False
    function = getattr(ctypes.CDLL(None), name, None)
    return function is not None and function(*arguments) == 0
