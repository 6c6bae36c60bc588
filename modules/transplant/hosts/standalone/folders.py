"""Which base models and overrides there are: folders as in SD.Next, and the Hugging Face cache. No torch.

Names come from the lists that this module makes; a name from outside is looked up there, never joined to a path.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub import constants

from transplant.architectures.detect import TRANSFORMER
from transplant.base_model import INDEXES, BaseModel, read_base
from transplant.checkpoint.shards import INDEX, choices, title
from transplant.errors import BaseModelError, printable, sample
from transplant.inventory import Entry, Inventory
from transplant.slots import DEFAULT, NONE

log = logging.getLogger("transplant")

BASES, OVERRIDES, CHECKPOINTS = "Diffusers", "UNET", "Stable-diffusion"
"""Subfolders of a models folder, SD.Next's own; the last one is for whole models in one file, which are not used."""

SUFFIXES = (".safetensors", ".gguf", INDEX)
RESERVED = (DEFAULT, NONE)
"""Dropdown entries that are no files."""

WITHOUT_WEIGHTS = ("Scheduler", "Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "FeatureExtractor")
"""Ends of the class names of components that have no weights."""

BUILT_IN = Path(__file__).resolve().parents[4] / "demo" / "trained"
"""The models folder that comes with Transplant."""


def _has_index(folder: Path) -> bool:
    """Whether a folder is a pipeline, modular or not."""
    return any((folder / name).is_file() for name in INDEXES)


def list_bases(models_dir: Path, include_hub_cache: bool, folder: Path | None = None) -> dict[str, Path]:
    """Base models by name, sorted.

    Args:
        models_dir: the folder that holds `Diffusers`, whose subfolders are searched too. A folder there may
            be a diffusers pipeline or a repository in the layout of the Hugging Face cache.
        include_hub_cache: also list what lies in the user's own Hugging Face cache.
        folder: another folder instead of that `Diffusers`.

    Returns:
        Folders that hold a model_index.json, named by folder, by relative path where folder names collide,
        and `org/name` for repositories of a cache.
    """
    root = folder or models_dir / BASES
    plain: list[Path] = []
    repositories: list[Path] = []
    for found, _ in _walk(root):
        if found.name.startswith("models--"):
            repositories.append(found)
        elif found != root and _has_index(found):
            plain.append(found)
    if include_hub_cache:
        repositories += sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    named = _named(root, plain, (), lambda path: path.name)
    for repository in repositories:
        snapshot = _snapshot(repository)
        if snapshot is not None:
            named.setdefault(_normal("/".join(repository.name.split("--")[1:])), snapshot)
    return _sorted(named)


def list_overrides(models_dir: Path, folder: Path | None = None) -> dict[str, Path]:
    """Files that can be chosen in place of a transformer, by name, sorted.

    Args:
        models_dir: the folder that holds `UNET`, whose subfolders are searched too.
        folder: another folder instead of that `UNET`.

    Returns:
        Files named by stem, by relative path with suffix where stems collide. A checkpoint in several files is one
        entry: its first file, its index, or the folder that diffusers saved the model in.
    """
    root = folder or models_dir / OVERRIDES
    found: list[Path] = []
    for place, entries in _walk(root):
        files = [entry for entry in entries if entry.name.lower().endswith(SUFFIXES) and entry.is_file()]
        found += choices(place, files, is_root=place == root)
    return _sorted(_named(root, found, RESERVED, title))


def find(names: Mapping[str, Path], wanted: str) -> Path | None:
    """The path behind a name, whichever way its accents are encoded; None where there is none."""
    return names.get(_normal(wanted))


class Catalog:
    """The base models and overrides that can be chosen now; the built-in ones where there is no base model at all.

    Attributes:
        models_dir: the user's models folder.
        built_in_dir: a models folder that is offered while the user's has no base model.
        inventory: what the overrides are.
        bases_dir: the folder with base models.
        overrides_dir: the folder with overrides.
    """

    def __init__(self, models_dir: Path, built_in_dir: Path = BUILT_IN, inventory: Inventory | None = None) -> None:
        self.models_dir = models_dir
        self.built_in_dir = built_in_dir
        self.inventory = inventory or Inventory()
        self.bases_dir, self.overrides_dir = models_dir / BASES, models_dir / OVERRIDES
        self._bases: dict[str, Path] = {}
        self._overrides: dict[str, Path] = {}
        self._entries: dict[str, str] = {}
        self._seen: dict[str, Entry] = {}
        self._lock = threading.Lock()

    @property
    def bases(self) -> dict[str, Path]:
        """Base models by name."""
        with self._lock:
            return dict(self._bases)

    @property
    def overrides(self) -> dict[str, Path]:
        """Overrides by name."""
        with self._lock:
            return dict(self._overrides)

    def entry(self, name: str) -> str:
        """The entry that a name means: a file also goes by its path in its folder. Else the name itself."""
        with self._lock:
            listed = _normal(name) in self._bases or _normal(name) in self._overrides
            return _normal(name) if listed else self._entries.get(_normal(name), _normal(name))

    def name_of(self, path: Path) -> str | None:
        """The entry of a base model's folder or of a file; None where it is not listed."""
        with self._lock:
            named = [*self._bases.items(), *self._overrides.items()]
        return next((name for name, known in named if known == path), None)

    def alike(self, name: str) -> list[str]:
        """Entries of several files that have this one name, so that it means none of them."""
        named = self.overrides
        return [] if find(named, name) else [entry for entry, path in named.items() if _normal(title(path)) == name]

    def misplaced(self) -> dict[Path, Entry]:
        """Files that lie where base models are expected, or whole models in one file, and are transformers."""
        found: list[Path] = []
        for root in (self.bases_dir, self.models_dir / CHECKPOINTS):
            for _, entries in _walk(root):
                found += [path for path in entries if path.name.lower().endswith(SUFFIXES) and path.is_file()]
        described = self.inventory.look_at(found)
        return {path: entry for path, entry in described.items() if entry.kind == TRANSFORMER}

    def described(self) -> dict[str, Entry]:
        """What each override is, by name: kind and architecture. Quick where the files were looked at before."""
        named = self.overrides
        entries = self.inventory.look_at(named.values())
        described = {name: entries[path] for name, path in named.items()}
        with self._lock:
            self._seen = described
        return described

    @property
    def seen(self) -> dict[str, Entry]:
        """What `described` said last; it reads no file."""
        with self._lock:
            return dict(self._seen)

    @property
    def is_built_in(self) -> bool:
        """Whether the base models are the built-in ones."""
        return any(path.is_relative_to(self.built_in_dir) for path in self.bases.values())

    def refresh(self, include_hub_cache: bool, bases_dir: str = "", overrides_dir: str = "") -> None:
        """Look at the folders again; at others than those of the models folder where they are given."""
        self.bases_dir = Path(bases_dir) if bases_dir else self.models_dir / BASES
        self.overrides_dir = Path(overrides_dir) if overrides_dir else self.models_dir / OVERRIDES
        bases = list_bases(self.models_dir, include_hub_cache, self.bases_dir)
        overrides = list_overrides(self.models_dir, self.overrides_dir)
        if not bases:
            bases = list_bases(self.built_in_dir, False)
            overrides = _sorted({**list_overrides(self.built_in_dir), **overrides}) if bases else overrides
        entries = _by_relative_path(self.bases_dir, bases) | _by_relative_path(self.overrides_dir, overrides)
        with self._lock:
            self._bases, self._overrides, self._entries = bases, overrides, entries


def _walk(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """`root` and the folders below it with what lies in each, each real folder once.

    Not the inside of a pipeline or of a repository of a cache.
    """
    waiting, seen = [root], set[str]()
    while waiting:
        folder = waiting.pop()
        real = os.path.realpath(folder)
        if real in seen or not folder.is_dir():
            continue
        seen.add(real)
        if folder != root and (folder.name.startswith("models--") or _has_index(folder)):
            yield folder, []
            continue
        entries = _entries(folder)
        yield folder, entries
        waiting += [entry for entry in reversed(entries) if entry.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, without hidden and temporary entries and names that are no text."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        log.warning("%s cannot be listed (%s)", printable(str(folder)), error.strerror)
        return []
    undecodable = [name for name in names if not _is_text(name)]
    if undecodable:
        log.warning("%s: not listed, their names are no valid text: %s", folder, sample(undecodable))
    return [folder / name for name in names if _is_text(name) and not name.startswith((".", "~"))]


def _is_text(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _named(
    root: Path, paths: Iterable[Path], reserved: Collection[str], short: Callable[[Path], str]
) -> dict[str, Path]:
    """Paths by their short name; by relative path where two have the same, or a reserved one."""
    by_short: dict[str, list[Path]] = {}
    for path in paths:
        by_short.setdefault(_normal(short(path)), []).append(path)
    named = {name: group[0] for name, group in by_short.items() if len(group) == 1 and name not in reserved}
    for name, group in by_short.items():
        if name in named:
            continue
        for path in group:
            named[_free(_normal(path.relative_to(root).as_posix()), named)] = path
    return named


def _by_relative_path(root: Path, named: Mapping[str, Path]) -> dict[str, str]:
    """Entries by the paths of what they stand for, below `root`."""
    below = {name: path for name, path in named.items() if path.is_relative_to(root)}
    return {_normal(path.relative_to(root).as_posix()): name for name, path in below.items()}


def _free(name: str, taken: Collection[str]) -> str:
    """`name`, numbered where it is taken: two names can differ in nothing but how an accent is encoded."""
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{name} ({number})"
    return free


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _sorted(named: Mapping[str, Path]) -> dict[str, Path]:
    return {name: named[name] for name in sorted(named, key=lambda name: (name.casefold(), name))}


def _snapshot(repository: Path) -> Path | None:
    """The snapshot of a cached repository that `main` refers to, else the newest; None unless it can be loaded."""
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    snapshots = [path for path in (repository / "snapshots").glob("*") if _has_index(path)]
    snapshots.sort(key=lambda path: (path.name == revision, path.stat().st_mtime_ns), reverse=True)
    for snapshot in snapshots:
        problem = _incomplete(snapshot)
        if problem is None:
            return snapshot
        log.info("%s: not listed, its download is incomplete (%s)", repository.name, problem)
    return None


def _incomplete(folder: Path) -> str | None:
    """What a pipeline folder lacks, or None. Pickled weights count for nothing: they are never loaded."""
    try:
        base = read_base(folder)
    except BaseModelError as error:
        return str(error)
    return next((f"no {missing}" for name in base.components if (missing := _missing(base, name))), None)


def _missing(base: BaseModel, name: str) -> str | None:
    """The first file that a component lacks."""
    component, folder = base.components[name], base.path / name
    if component.library not in ("diffusers", "transformers"):
        return None
    if not folder.is_dir():
        return name
    if component.cls.endswith(WITHOUT_WEIGHTS):
        return None
    weights = {file.name for file in folder.glob("*.safetensors") if file.is_file()}
    indices = list(folder.glob("*.safetensors.index.json"))
    if not indices:
        return None if weights else f"weights of {name}"
    return next((f"{name}/{shard}" for index in indices for shard in _shards(index) if shard not in weights), None)


def _shards(index: Path) -> list[str]:
    try:
        value: Any = json.loads(index.read_text(encoding="utf-8"))
        return sorted(set(cast("dict[str, str]", value["weight_map"]).values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return [index.name]
