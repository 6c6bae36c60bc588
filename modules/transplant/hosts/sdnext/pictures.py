"""The host's pictures: their metadata name the files, and what a request chooses for itself holds for it alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transplant.digest import Digests
from transplant.hosts.sdnext import app, notices
from transplant.hosts.sdnext.calls import held_in
from transplant.hosts.sdnext.swapping import settle
from transplant.slots import PRIMARY, SECONDARY, SLOTS, SlotKind, name_of

log = logging.getLogger("transplant")

TITLES = {PRIMARY.name: "UNet", SECONDARY.name: "UNet secondary"}
"""What the host's metadata call a slot's file; the first is the host's own word."""

_digests: Digests | None = None
_before: dict[str, Any] = {}
"""What each slot held before a request's own choice, by option."""


def before_process(request: Any) -> None:
    """The host is about to draw: load what the request, or the options, choose, and name it in the metadata."""
    try:
        for kind in SLOTS:
            if app.has_option(kind.option):
                _bring(kind, request)
        request.extra_generation_params.update(_named())
    except Exception as error:  # the host boundary
        notices.fault("the files could not be named in the picture's metadata", error)


def after_process(request: Any) -> None:
    """The host has drawn: what a request chose for itself makes way for what was there before."""
    try:
        if not getattr(request, "override_settings_restore_afterwards", True):
            _before.clear()
        for kind in SLOTS:
            if kind.option in _before:
                app.set_option(kind.option, _before.pop(kind.option))
                settle(kind, is_asked=True)
    except Exception as error:  # the host boundary
        _before.clear()
        notices.fault("what was loaded before the request could not be loaded again", error)


def _bring(kind: SlotKind, request: Any) -> None:
    """Let a slot hold what the request or the options choose; without what a request asks for nothing is drawn."""
    own: dict[str, Any] = getattr(request, "override_settings", None) or {}
    held = held_in(app.loaded_pipeline(), kind)
    if kind.option in own:
        _before[kind.option] = name_of(held.loaded if held else None)
    if settle(kind, is_asked=kind.option in own) or kind.option not in own:
        return
    _before.pop(kind.option)
    log.error("%s was asked for and is not loaded: nothing is drawn", own[kind.option])
    request.n_iter = 0  # the host's only way to draw nothing: an interrupt is forgotten when it begins


def _named() -> dict[str, str]:
    """The loaded files and their hashes, for the metadata."""
    names: dict[str, str] = {}
    for kind in SLOTS:
        held = held_in(app.loaded_pipeline(), kind)
        if held is None or held.loaded.override is None:
            continue
        if kind is not PRIMARY:  # the host names the first itself
            names[TITLES[kind.name]] = held.loaded.override.name
        try:
            digest = digests().of_loaded(held.loaded.override.path, held.loaded.stamp)
        except OSError as error:
            log.warning("%s: no hash for the metadata (%s)", held.loaded.override.name, error)
            continue
        names |= {f"{TITLES[kind.name]} hash": digest} if digest else {}
    return names


def digests() -> Digests:
    """The hashes, remembered in the host's data folder."""
    global _digests  # made once, at first need
    if _digests is None:
        _digests = Digests(Path(app.module("modules.paths").data_path) / "data" / "transplant-hashes.json")
    return _digests
