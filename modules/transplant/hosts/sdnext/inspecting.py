"""What a file of the host's list is, and what loading it over the loaded base model would do; for our tab and API."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transplant.base_model import BaseModel
from transplant.errors import TransplantError
from transplant.hosts.base import LoadSettings
from transplant.hosts.sdnext import app, notices
from transplant.hosts.sdnext.base import of_pipeline, of_repository
from transplant.hosts.sdnext.calls import held_in
from transplant.hosts.sdnext.settings import load_settings, quantize_on_load
from transplant.hosts.sdnext.swapping import UNET
from transplant.inspection import Inspection, inspect_file, inspect_over_base
from transplant.slots import SLOTS, SlotKind, name_of


class NoSuchFile(TransplantError):
    """A name that is not in the host's list."""


@dataclass(frozen=True)
class SlotState:
    """What a slot of the host is to hold, and holds.

    Attributes:
        slot: "primary" or "secondary".
        option: the key of its option.
        selected: the option's value.
        loaded: the file that the loaded pipeline has there, or Default; None where that is not known here.
        refused: why its last choice was not taken.
    """

    slot: str
    option: str
    selected: str
    loaded: str | None
    refused: str | None


def names() -> list[str]:
    """The files of the host's list."""
    return list(app.module("modules.sd_unet").unet_dict)


def slots() -> list[SlotState]:
    """Every slot that this host has."""
    return [_state(kind) for kind in SLOTS if app.has_option(kind.option)]


def slots_as_json() -> list[dict[str, Any]]:
    """The same for programs."""
    return [asdict(state) for state in slots()]


def inspected(name: str) -> Inspection:
    """What a file is, from its header.

    Raises:
        NoSuchFile: it is not in the list.
        OverrideArchMismatch: it is no checkpoint, or a broken one.
    """
    return inspect_file(_path_of(name))


def inspected_over_base(name: str, kind: SlotKind) -> Inspection:
    """The same, with what loading it into a slot of the loaded pipeline would do.

    The host's queue is waited for: planning makes networks without weights, which no load may meet.

    Raises:
        NoSuchFile, OverrideArchMismatch: see `inspected`.
        TransplantError: no base model is loaded, or it has no such slot.
    """
    path = _path_of(name)
    with app.module("modules.call_queue").queue_lock:
        base, component, settings = _target(kind)
        return inspect_over_base(path, base, component, settings)


def _target(kind: SlotKind) -> tuple[BaseModel, str, LoadSettings]:
    pipeline = app.loaded_pipeline()
    if pipeline is None:
        raise TransplantError("no base model is loaded: choose one first")
    held = held_in(pipeline, kind)
    if held is not None and held.call is not None:
        call = held.call
        base: BaseModel = of_repository(call.repo_id, {call.component: call.cls})
        return base, call.component, load_settings(call.arguments.get("dtype"), quantize_on_load(call.arguments))
    base = of_pipeline(pipeline, type(pipeline).__name__)
    component = held.component if held else kind.component_in(base)
    if component is None or (held is None and component != UNET):
        raise TransplantError(f"{type(pipeline).__name__}: nothing is known here of its {kind.title} slot")
    return base, component, load_settings(quantize=quantize_on_load({}))


def _state(kind: SlotKind) -> SlotState:
    held = held_in(app.loaded_pipeline(), kind)
    loaded = name_of(held.loaded) if held else None
    return SlotState(kind.name, kind.option, str(app.option(kind.option)), loaded, notices.last(kind.name))


def _path_of(name: str) -> Path:
    path = app.module("modules.sd_unet").unet_dict.get(name)
    if path is None:
        raise NoSuchFile(f"There is no {name!r} in the list.")
    return Path(path).absolute()
