"""Transformers that were swapped out and stay in RAM, so that going back and forth between files is instant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transplant.slots import Loaded, Override

if TYPE_CHECKING:
    from pathlib import Path

    from transplant.checkpoint.header import FileStamp
    from transplant.hosts.base import LoadSettings


@dataclass(frozen=True)
class Key:
    """What a kept model was made of; another file, another state of it or another setting is another model.

    Attributes:
        base: folder of the base model.
        component: the pipeline component.
        override: the file, None for the base model's own.
        stamp: the file's state when it was loaded.
        settings: how it was loaded.
    """

    base: Path
    component: str
    override: Override | None
    stamp: FileStamp | None
    settings: LoadSettings


class KeptModels:
    """The models that were in use last, the newest last. Weights that are mapped take no memory of their own."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[dict[str, Any], Loaded]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: Key, models: Mapping[str, Any], loaded: Loaded, limit: int) -> None:
        """Keep the models of a slot on the CPU, and let go of the oldest beyond `limit`."""
        self._kept.pop(key, None)
        if limit > 0:
            self._kept[key] = {name: model.to("cpu") for name, model in models.items()}, loaded
        while len(self._kept) > limit:
            self._kept.popitem(last=False)

    def take(self, key: Key) -> tuple[dict[str, Any], Loaded] | None:
        """The models of a key, on its device again, or None; they are not kept any more."""
        found = self._kept.pop(key, None)
        if found is None:
            return None
        models, loaded = found
        return {name: model.to(key.settings.rests_on) for name, model in models.items()}, loaded

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
