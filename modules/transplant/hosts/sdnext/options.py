"""Our options among the host's: each in a section, beside those that the host has itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transplant.hosts.sdnext import app, patches
from transplant.hosts.sdnext.swapping import load_unet_secondary
from transplant.options import HOST_OPTIONS, IN_HOST, Option, option
from transplant.slots import PRIMARY, SECONDARY

log = logging.getLogger("transplant")

SECTION = ("transplant", "Transplant")


def register() -> None:
    """Register what this host lacks; may be called again."""
    if app.has_option(PRIMARY.option) and not app.has_option(SECONDARY.option):
        _add_secondary()
    for known in (*HOST_OPTIONS, *(option(key) for key in IN_HOST)):
        if not app.has_option(known.key):
            _add(known, SECTION, patches.apply if known in HOST_OPTIONS else None)


def _add(known: Option, section: tuple[str, ...], onchange: Callable[[], None] | None) -> None:
    gradio: Any = app.module("gradio")
    component = gradio.Checkbox if known.control == "checkbox" else gradio.Dropdown
    arguments = None if known.control == "checkbox" else {"choices": list(known.choices or ())}
    info = (
        app.shared()
        .OptionInfo(known.default, known.label, component, arguments, onchange=onchange, section=section)
        .info(known.help.rstrip("."))
    )
    app.shared().opts.add_option(known.key, info)


def _add_secondary() -> None:
    """The second slot in a host that lacks it: beside the first, with its choices, and where that one is shown."""
    opts, first = app.shared().opts, app.shared().opts.data_labels[PRIMARY.option]
    queued = app.module("modules.call_queue").wrap_queued_call
    info = app.shared().OptionInfo(
        PRIMARY_DEFAULT, option(SECONDARY.option).label, first.component, first.component_args,
        onchange=queued(lambda: load_unet_secondary(_nothing, app.shared().sd_model)), section=first.section,
        refresh=first.refresh,
    )  # fmt: skip
    opts.add_option(SECONDARY.option, info)
    labels = dict(opts.data_labels)
    opts.data_labels.clear()
    for key, value in labels.items():
        if key != SECONDARY.option:
            opts.data_labels[key] = value
        if key == PRIMARY.option:
            opts.data_labels[SECONDARY.option] = info
    shown = opts.quicksettings_list
    if PRIMARY.option in shown and SECONDARY.option not in shown:
        place = shown.index(PRIMARY.option) + 1
        app.set_option("quicksettings_list", [*shown[:place], SECONDARY.option, *shown[place:]])


def _nothing(*_: Any) -> None:
    """What a host without a second slot does for it."""


PRIMARY_DEFAULT = option(PRIMARY.option).default
