"""SD.Next: the only package that imports the host.

`register()` is called by scripts/transplant.py, before the host loads a model. What is replaced in the host is listed
in patches.py, what is told of it in docs/sdnext.md.
"""

from __future__ import annotations

from typing import Any

from transplant import sdnq_package
from transplant.hosts.sdnext import app, notices, options, patches, pictures, swapping


def register() -> None:
    """Register with the host that runs this process: options, loads, pictures; may be called again."""
    sdnq_package.use(app.module("modules.sdnq"))  # so that the host's LoRA, offload and save code know our layers
    notices.follow_host_log()
    options.register()
    patches.apply()
    callbacks = app.module("modules.script_callbacks")
    for add, function in (
        (callbacks.on_before_process, pictures.before_process),
        (callbacks.on_after_process, pictures.after_process),
        (callbacks.on_app_started, on_app_started),
        (callbacks.on_model_loaded, on_model_loaded),
        (callbacks.on_ui_tabs, on_ui_tabs),
    ):
        callbacks.remove_callbacks_for_function(function)
        add(function)


def on_app_started(*_: Any) -> None:
    """The host's server runs: add our routes to its API."""
    try:
        from transplant.hosts.sdnext.routes import add_routes

        add_routes()
    except Exception as error:  # the host boundary
        notices.fault("its API routes could not be added", error)


def on_model_loaded(pipeline: Any) -> None:
    """The host has loaded a base model: no slot names a file that it has no place for."""
    try:
        swapping.check_second(pipeline)
    except Exception as error:  # the host boundary
        notices.fault("the second slot could not be looked at", error)


def on_ui_tabs() -> list[tuple[Any, str, str]]:
    """The host makes its page: our tab on it."""
    try:
        from transplant.hosts.sdnext.tab import tabs

        return tabs()
    except Exception as error:  # the host boundary
        notices.fault("its tab could not be made", error)
        return []
