"""Checkpoints in several files: which files a chosen path stands for. No torch; of the files only the index is read.

A set is `x-00001-of-00003.safetensors` and its like, the files that an `x.safetensors.index.json` lists, or a folder
that diffusers saved a model in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

from transplant.errors import BadIndex, MissingShards, sample

INDEX = ".safetensors.index.json"
MODEL = "diffusion_pytorch_model"
"""What diffusers calls the weights in a model's folder."""

PICKLES = (".bin", ".ckpt", ".pt", ".pth")

MAX_SHARDS = 1000

_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.gguf)", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True)
class ShardName:
    """The name of one file of a set.

    Attributes:
        stem: what all of them begin with.
        number: which it is, from 1.
        count: how many there are.
        suffix: `.safetensors` or `.gguf`, as it is written.
    """

    stem: str
    number: int
    count: int
    suffix: str

    @classmethod
    def of(cls, name: str) -> ShardName | None:
        """The parts of a name; None where it is no shard's."""
        match = _SHARD.fullmatch(name)
        if match is None:
            return None
        number, count = int(match["number"]), int(match["count"])
        return cls(match["stem"], number, count, match["suffix"]) if 0 < number <= count <= MAX_SHARDS else None

    def every(self) -> list[str]:
        """The names of the whole set, in order."""
        return [f"{self.stem}-{i:05d}-of-{self.count:05d}{self.suffix}" for i in range(1, self.count + 1)]


def members(path: Path) -> tuple[Path, ...]:
    """The files that a path stands for, in order; the path itself where it is a single file, or none at all.

    Args:
        path: a file, one file of a set, the index of a set, or a folder that diffusers saved a model in.

    Raises:
        MissingShards: files of the set are not there.
        BadIndex: an index that cannot be read or lists what cannot be a part.
    """
    every = named_members(path)
    missing = [member.name for member in every if member != path and not member.is_file()]
    if missing:
        raise MissingShards(path, missing, len(every))
    return every


def named_members(path: Path) -> tuple[Path, ...]:
    """As `members`, whether they are there or not. Raises BadIndex."""
    inside = model_in(path) if path.is_dir() else path
    if inside is None:
        return (path,)
    if inside.name.lower().endswith(INDEX):
        return tuple(inside.parent / name for name in _indexed(inside))
    shard = ShardName.of(inside.name)
    return tuple(inside.parent / name for name in shard.every()) if shard else (inside,)


def model_in(folder: Path) -> Path | None:
    """The weights of a model that diffusers saved in a folder: their index, their first file, or the only one."""
    for name in (f"{MODEL}{INDEX}", f"{MODEL}.safetensors"):
        if (folder / name).is_file():
            return folder / name
    return min(folder.glob(f"{MODEL}-[0-9]*-of-[0-9]*.safetensors"), default=None)


def no_model_in(folder: Path) -> tuple[str, str]:
    """What is wrong with a folder that is chosen as a file and holds no model, and what to choose instead."""
    problem = f"is a folder without {MODEL}.safetensors, its index or its parts, which diffusers saves a model in"
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        return f"cannot be read ({error.strerror})", "Check that it may be read"
    models = [path.name for path in inside if path.is_dir() and model_in(path) is not None]
    if models:
        best = next((name for name in ("transformer", "unet") if name in models), models[0])
        return problem, f"It looks like a whole pipeline: choose {best} in it, or use it as base model"
    files = [path for path in inside if path.name.lower().endswith((".safetensors", ".gguf", INDEX))]
    if files:
        return problem, f"Choose in it {sample([path.name for path in choices(folder, files)], 3)}"
    if any(path.suffix.lower() in PICKLES for path in inside):
        return problem, "It holds pickled weights, which are never opened: convert them to safetensors first"
    return problem, "It holds no checkpoint: choose a .safetensors or .gguf file, or a folder with one of those names"


def choices(folder: Path, files: Iterable[Path], is_root: bool = False) -> list[Path]:
    """What can be chosen of the checkpoints in a folder: every file once, a set as one.

    Args:
        folder: the folder; it stands for the model that diffusers saved in it.
        files: safetensors and GGUF files and indices that lie in it.
        is_root: whether it is the folder that models are kept in, which is no model itself.

    Returns:
        Files, the first file that is there of each set, indices of sets with names of their own, and the folder.
    """
    left = dict.fromkeys(sorted(files))
    found: list[Path] = []
    if not is_root and model_in(folder) is not None:
        found.append(folder)
        _drop(left, folder)
    for path in [path for path in left if ShardName.of(path.name)]:
        if path in left:
            found.append(path)
            _drop(left, path)
    for path in [path for path in left if path.name.lower().endswith(INDEX)]:
        if not any(ShardName.of(member.name) for member in _named_or_none(path)):
            found.append(path)
            _drop(left, path)
    return sorted([*found, *(path for path in left if not path.name.lower().endswith(INDEX))])


def title(path: Path) -> str:
    """What a choice is called: without suffix and number; a folder by its name."""
    shard = ShardName.of(path.name)
    if shard:
        return shard.stem
    if path.name.lower().endswith(INDEX):
        return path.name[: -len(INDEX)]
    return path.name if path.is_dir() else path.stem


def _drop(left: dict[Path, None], chosen: Path) -> None:
    """Take out what a choice stands for, and the index that says so, also where it is broken."""
    index = model_in(chosen) if chosen.is_dir() else chosen
    for member in (index, *_named_or_none(chosen)):
        if member is not None:
            left.pop(member, None)


def _named_or_none(path: Path) -> tuple[Path, ...]:
    try:
        return named_members(path)
    except BadIndex:
        return ()


def _indexed(index: Path) -> list[str]:
    """The files that an index lists, in the order of their names."""
    try:
        value: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in cast("dict[str, Any]", value["weight_map"]).values()})
    except OSError as error:
        raise BadIndex(index, f"cannot be read ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadIndex(index, "holds no weight_map of tensor names and file names") from error
    strangers = [name for name in names if PurePath(name).name != name or name in ("", "..") or "\\" in name]
    if strangers or not 0 < len(names) <= MAX_SHARDS:
        raise BadIndex(index, f"lists {strangers[0]!r}, which is no file beside it" if strangers else "lists no files")
    if not all(name.lower().endswith(".safetensors") for name in names):
        raise BadIndex(index, "lists files that are no safetensors files")
    return names
