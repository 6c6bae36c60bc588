"""Which file fills which transformer of a pipeline: the state behind `sd_unet` and `sd_unet_secondary`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transplant.base_model import BaseModel
from transplant.checkpoint.header import FileStamp
from transplant.errors import OverrideArchMismatch

DEFAULT = "Default"
"""The dropdown entry for the base model's own transformer."""

NONE = "None"
"""SD.Next's other entry for the same."""


@dataclass(frozen=True)
class SlotKind:
    """A slot as data.

    Attributes:
        name: "primary" or "secondary".
        option: key of the option that selects its file.
        title: what a picture's metadata call its file.
        components: the pipeline components it may fill; the first that a pipeline has is it.
    """

    name: str
    option: str
    title: str
    components: tuple[str, ...]

    def component_in(self, base: BaseModel) -> str | None:
        """The component that this slot fills in a pipeline, or None where it has none."""
        return next((name for name in self.components if name in base.components), None)


PRIMARY = SlotKind("primary", "sd_unet", "UNET", ("transformer", "unet"))
SECONDARY = SlotKind("secondary", "sd_unet_secondary", "UNET secondary", ("transformer_2", "unconditional_transformer"))
SLOTS = (PRIMARY, SECONDARY)
"""Wan 2.2 has `transformer_2` for its low-noise steps, Ideogram 4 an `unconditional_transformer`."""


@dataclass(frozen=True)
class Override:
    """A file that was chosen to replace a transformer.

    Attributes:
        name: its entry in the dropdown.
        path: the file.
    """

    name: str
    path: Path


@dataclass(frozen=True)
class Loaded:
    """What a slot's component holds.

    Attributes:
        override: the file, or None for the base model's own transformer.
        stamp: state of the file when it was loaded.
        siblings: other components that the file brought along.
    """

    override: Override | None
    stamp: FileStamp | None = None
    siblings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A refusal, remembered until the file changes.

    Attributes:
        override: the refused file.
        stamp: state of the file when it was refused; None where it could not be read at all.
        error: why.
    """

    override: Override
    stamp: FileStamp | None
    error: OverrideArchMismatch

    def still_holds(self) -> bool:
        """Whether the file is as it was when it was refused."""
        return self.stamp is not None and stamp_of(self.override.path) == self.stamp


@dataclass(frozen=True)
class Slot:
    """State of one slot. Steps return a new one.

    Attributes:
        kind: which slot.
        selected: the dropdown entry that the option should show.
        loaded: what the pipeline holds; None while no pipeline is loaded.
        failed: the last refusal.
    """

    kind: SlotKind
    selected: str = DEFAULT
    loaded: Loaded | None = None
    failed: Failure | None = None

    def with_loaded(self, loaded: Loaded) -> Slot:
        """After a load: selected and loaded are the same."""
        return replace(self, selected=name_of(loaded), loaded=loaded, failed=None)

    def with_refused(self, failure: Failure) -> Slot:
        """After a refusal: selected goes back to what is loaded."""
        return replace(self, selected=name_of(self.loaded), failed=failure)

    def emptied(self) -> Slot:
        """After the pipeline was unloaded."""
        return replace(self, loaded=None)

    def holds(self, override: Override | None) -> bool:
        """Whether this very file, unchanged since, is loaded, whatever its entry is called."""
        if self.loaded is None or path_of(self.loaded.override) != path_of(override):
            return False
        return override is None or stamp_of(override.path) == self.loaded.stamp


def path_of(override: Override | None) -> Path | None:
    """The file; None for the base model's own transformer."""
    return override.path if override else None


def name_of(loaded: Loaded | None) -> str:
    """The dropdown entry for what is loaded."""
    return loaded.override.name if loaded and loaded.override else DEFAULT


def stamp_of(path: Path) -> FileStamp | None:
    """The file's stamp, or None where it cannot be read."""
    try:
        return FileStamp.of(path)
    except OSError:
        return None
