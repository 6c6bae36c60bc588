"""How the host asks for a transformer, which file its user chose, and what each slot of its pipeline holds."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transplant.errors import OverrideArchMismatch
from transplant.hosts.sdnext import app
from transplant.slots import PRIMARY, SECONDARY, Loaded, Override, SlotKind

LOADED = {PRIMARY.name: "loaded_unet", SECONDARY.name: "loaded_unet_secondary"}
"""Where `modules.sd_unet` keeps the name of what it loaded, by slot."""


@dataclass(frozen=True)
class Call:
    """A call of the host's `load_transformer`.

    Attributes:
        kind: the slot.
        repo_id: the base model: a folder or the id of a hub repository.
        cls: the class that the host wants.
        component: the base model's folder of it, and the pipeline's component.
        arguments: all arguments by name.
        siblings: the host's classes for models that a file may bring along, by component.
    """

    kind: SlotKind
    repo_id: str
    cls: type
    component: str
    arguments: Mapping[str, Any]
    siblings: Mapping[str, type] = field(default_factory=dict)


def call_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The arguments of a call to the host's `load_transformer`, by the function's own signature."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name)
    component = arguments.get("subfolder") or "transformer"
    return Call(slot_of(arguments, component), arguments["repo_id"], arguments["cls_name"], component, arguments)


def slot_of(arguments: Mapping[str, Any], component: str) -> SlotKind:
    """The slot that a call is for; a host without a second slot does not say."""
    told = arguments.get("override_slot")
    is_second = component in SECONDARY.components if told is None else told == SECONDARY.name
    return SECONDARY if is_second and app.has_option(SECONDARY.option) else PRIMARY


def chosen(kind: SlotKind) -> Override | None:
    """The file that the user chose for a slot; None for the base model's own transformer.

    Raises:
        OverrideArchMismatch: there is no such file in the host's list, or not any more.
    """
    name = app.option(kind.option)
    if app.is_default(name):
        return None
    known: Mapping[str, str] = app.module("modules.sd_unet").unet_dict
    path = Path(known[name]).absolute() if name in known else None
    if path is None or not path.exists():
        raise OverrideArchMismatch(
            path or name,
            "is not in the folder of UNET files" if path is None else "is not there any more",
            "Put it back and refresh the list, or choose another",
        )
    return Override(name, path)


@dataclass(frozen=True)
class Held:
    """What a slot of the host's pipeline holds, as far as we know.

    Attributes:
        kind: the slot.
        component: the pipeline's component.
        loaded: the file, or the base model's own transformer.
        model: the model that was handed over.
        call: how the host asked for it; None where it cannot be asked again.
    """

    kind: SlotKind
    component: str
    loaded: Loaded
    model: weakref.ref[Any]
    call: Call | None


_held: dict[str, Held] = {}


def remember(kind: SlotKind, component: str, loaded: Loaded, model: Any, call: Call | None) -> None:
    """Note what was handed to the host for a slot, and say so where the host keeps it."""
    _held[kind.name] = Held(kind, component, loaded, weakref.ref(model), call)
    sd_unet = app.module("modules.sd_unet")
    setattr(sd_unet, LOADED[kind.name], loaded.override.name if loaded.override else None)


def forget(kind: SlotKind) -> None:
    """A slot is being filled by somebody else."""
    _held.pop(kind.name, None)


def held_in(pipeline: Any, kind: SlotKind) -> Held | None:
    """What a slot of a pipeline holds; None where it is not what we handed over, or nothing."""
    held = _held.get(kind.name)
    if held is None or pipeline is None:
        return None
    model = getattr(pipeline, held.component, None)
    return held if model is not None and held.model() is model else None
