"""What the user is to know: in the host's log, in a message over its page, and in our tab and API."""

from __future__ import annotations

import logging
import os
from typing import Any

from transplant.hosts.sdnext import app

log = logging.getLogger("transplant")

_MARK = "\u2063"
"""Ends a message over the page, unseen: by it javascript/transplant_host.js knows ours."""

_last: dict[str, str] = {}
"""By slot, why its last choice was not taken."""


def follow_host_log() -> None:
    """Let our log lines appear where the host's do: console, file, and the log of its page."""
    log.parent = app.module("modules.logger").log
    log.setLevel(logging.NOTSET)


def refuse(slot: str, text: str) -> None:
    """Tell the user that a choice was not taken, and why; remembered until the slot's next load."""
    _last[slot] = text
    log.error("%s", text)
    _show(text)


def settled(slot: str) -> None:
    """A slot's choice was taken: what was said of it before is over."""
    _last.pop(slot, None)


def last(slot: str) -> str | None:
    """Why a slot's last choice was not taken; None where it was."""
    return _last.get(slot)


def fault(what: str, error: BaseException) -> None:
    """One line for a fault of ours, after which the host does what it does without us."""
    reason = " ".join(str(error).split())
    log.error("Transplant: %s (%s: %s); the host goes on by itself", what, type(error).__name__, reason)
    if "SD_LOAD_DEBUG" in os.environ:  # the host's own way to ask for more
        log.debug("Transplant: the fault in full", exc_info=error)


def _show(text: str) -> None:
    """A message over the page, where this thread runs for one."""
    try:
        gradio: Any = app.module("gradio")
        running: Any = app.module("gradio.context").thread_data
        if getattr(running, "blocks", None) is not None and running.blocks.enable_queue and running.event_id:
            gradio.Warning(text + _MARK)
    except Exception as error:  # another gradio, or no page: the log has it
        log.debug("no message over the page (%s: %s)", type(error).__name__, error)
