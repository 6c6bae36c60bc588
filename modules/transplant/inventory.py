"""What the checkpoints of a folder are: kind and architecture of each, from headers alone, remembered across runs.

No torch. An answer holds while path, size and time of the file are the same, and while the way of asking is.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import transplant
from transplant.architectures import SPECS, detect
from transplant.checkpoint.header import FileStamp, read_names
from transplant.checkpoint.naming import normalise
from transplant.checkpoint.shards import INDEX, choices
from transplant.errors import MissingShards, OverrideArchMismatch
from transplant.storage import write_atomically

log = logging.getLogger("transplant")

SUFFIXES = (".safetensors", ".gguf", INDEX)
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Entry:
    """What one checkpoint is.

    Attributes:
        kind: as in Detection; "pipeline shard" where files of its set are missing, "unreadable" where it is no
            checkpoint or a broken one.
        architecture: name of the transformer's architecture, "" where it is none or an unknown one.
        variant: which network of the architecture, "" where it has one only.
        layout: how its keys are written, "" where it is no known transformer.
        tensors: how many it holds.
        nbytes: size of its files.
        why: the keys that decided, or what is wrong with it.
        or_else: another architecture that it may be just as well, as an Anima file without its conditioner may be a
            Cosmos one, and the other way round; "" where it can be no other.
    """

    kind: str
    architecture: str = ""
    variant: str = ""
    layout: str = ""
    tensors: int = 0
    nbytes: int = 0
    why: str = ""
    or_else: str = ""

    @property
    def title(self) -> str:
        """What it may be."""
        return f"{self.architecture} or {self.or_else}" if self.or_else else self.architecture


class Inventory:
    """Looks at checkpoints once and remembers what they are. Safe to use from several threads."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` is a JSON file of our own; None remembers for this run only."""
        self._cache = cache
        self._known = _read_cache(cache)
        self._changed = False
        self._lock = threading.Lock()

    def look(self, path: Path) -> Entry:
        """What a checkpoint is; a file, one of a set, an index or a model's folder."""
        return self.look_at([path])[path]

    def look_at(self, paths: Iterable[Path]) -> dict[Path, Entry]:
        """What each checkpoint is. Those that are not remembered cost one read of their header each."""
        with self._lock:
            found = {path: self._entry(path) for path in paths}
            if self._changed:
                self._save()
            return found

    def _entry(self, path: Path) -> Entry:
        try:
            stamp = FileStamp.of(path)
        except OSError as error:
            return Entry(UNREADABLE, why=f"cannot be read ({error.strerror})")
        key = os.path.abspath(path)
        known = self._known.get(key)
        if known is None or known[:2] != [stamp.size, stamp.mtime_ns]:
            entry = replace(identified(path), nbytes=stamp.size)
            known = self._known[key] = [stamp.size, stamp.mtime_ns, *asdict(entry).values()]
            self._changed = True
        return Entry(*known[2:])

    def _save(self) -> None:
        self._changed = False
        if self._cache is None:
            return
        try:
            write_atomically(self._cache, json.dumps({"version": _VERSION, "entries": self._known}))
        except OSError as error:
            log.debug("what the checkpoints are could not be saved (%s)", error)


def identified(path: Path) -> Entry:
    """What a checkpoint is, from its header. Never raises for what is in the file."""
    try:
        names = read_names(path)
        keys = normalise(path, names.names)
        found = detect.identify(keys, metadata=names.metadata)
    except MissingShards as error:
        return Entry(detect.SHARD, why=error.problem)
    except OverrideArchMismatch as error:
        return Entry(UNREADABLE, why=error.problem)
    return Entry(
        found.kind, found.architecture or "", str(found.variant or ""), found.layout.name if found.layout else "",
        len(names.names), why=found.why, or_else=" or ".join(found.may_be[1:]),
    )  # fmt: skip


def checkpoints_in(folder: Path) -> list[Path]:
    """Every checkpoint in a folder and below it, a set once; nothing hidden, each real folder once."""
    found: list[Path] = []
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        listed = [name for name in files if name.lower().endswith(SUFFIXES) and not name.startswith((".", "~"))]
        if listed:
            found += choices(Path(root), [Path(root, name) for name in listed], is_root=Path(root) == folder)
    return found


def default_cache() -> Path:
    """Where the user's caches lie on this system."""
    home = Path.home()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(home / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(home / ".cache")
    return Path(base) / "transplant" / "inventory.json"


def _fingerprint() -> str:
    """Changes with whatever the answers depend on."""
    told = [(spec.name, spec.variants, [(layout.name, layout.keys) for layout in spec.layouts]) for spec in SPECS]
    return f"{transplant.__version__}-{zlib.crc32(repr((told, detect.MARKERS)).encode()):08x}"


_VERSION = _fingerprint()


def _read_cache(cache: Path | None) -> dict[str, list[Any]]:
    """What was remembered; nothing where the file is missing, damaged, or of another version."""
    if cache is None:
        return {}
    try:
        value: Any = json.loads(cache.read_text(encoding="utf-8"))
        entries: Any = value["entries"] if value["version"] == _VERSION else {}
        return {key: entry for key, entry in cast("dict[str, Any]", entries).items() if _is_entry(entry)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


_TYPES = [int, int, str, str, str, str, int, int, str, str]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list) and [type(value) for value in cast("list[Any]", entry)] == _TYPES
