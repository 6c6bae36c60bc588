"""Short hashes of model files, as pictures' metadata name them: the first ten digits of the file's SHA-256."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, cast

from transplant.checkpoint.header import FileStamp
from transplant.checkpoint.shards import members
from transplant.errors import UnreadableFile
from transplant.slots import stamp_of
from transplant.storage import write_atomically

log = logging.getLogger("transplant")

DIGITS = 10


class Digests:
    """Hashes files once and remembers the result by path, size and time, also across runs."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` is a JSON file of our own; None remembers for this run only."""
        self._cache = cache
        self._known: dict[str, list[Any]] = _read_cache(cache)
        self._lock = threading.Lock()

    def short(self, path: Path) -> str:
        """The first ten hex digits of the file's SHA-256, as SD.Next and others show it; of a set of its files' bytes.

        Reads the whole file the first time. Raises OSError where it cannot be read.
        """
        with self._lock:
            stamp = FileStamp.of(path)
            key, wanted = _key(path), [stamp.size, stamp.mtime_ns]
            entry = self._known.get(key)
            if entry is None or entry[:2] != wanted:
                entry = self._known[key] = [*wanted, _sha256(path)]
                self._save()
            return str(entry[2])[:DIGITS]

    def of_loaded(self, path: Path, stamp: FileStamp | None) -> str | None:
        """The hash of what was loaded from a file, also where the file is gone or another one since; None if unknown.

        Args:
            path: the file.
            stamp: its state when it was loaded.

        Raises:
            OSError: it is there as it was and cannot be read.
        """
        return self.known(path, stamp) or (self.short(path) if stamp_of(path) == stamp else None)

    def known(self, path: Path, stamp: FileStamp | None = None) -> str | None:
        """What `short` would say, where that is known without reading the file.

        Args:
            path: the file, which need not be there any more where a stamp is given.
            stamp: the state of the file that is asked about; None for the one that it has now.
        """
        try:
            stamp = stamp or FileStamp.of(path)
        except OSError:
            return None
        entry = self._known.get(_key(path))
        return str(entry[2])[:DIGITS] if entry is not None and entry[:2] == [stamp.size, stamp.mtime_ns] else None

    def start(self, path: Path) -> None:
        """Begin to hash a file in the background, so that `short` need not wait later."""
        threading.Thread(target=self._quietly, args=(path,), daemon=True, name="transplant-digest").start()

    def _quietly(self, path: Path) -> None:
        try:
            self.short(path)
        except OSError as error:
            log.debug("%s: no hash (%s)", path.name, error)

    def _save(self) -> None:
        if self._cache is None:
            return
        try:
            write_atomically(self._cache, json.dumps(self._known))
        except OSError as error:
            log.debug("the hashes could not be saved (%s)", error)


def _key(path: Path) -> str:
    """What a file is remembered by: also a link that is gone is found again under it."""
    return os.path.abspath(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        files = members(path)
    except UnreadableFile as error:
        raise OSError(str(error)) from error
    for part in files:
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _read_cache(cache: Path | None) -> dict[str, list[Any]]:
    if cache is None or not cache.is_file():
        return {}
    try:
        value: Any = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    lists = {key: cast("list[Any]", entry) for key, entry in entries.items() if isinstance(entry, list)}
    return {key: entry for key, entry in lists.items() if len(entry) == 3}
