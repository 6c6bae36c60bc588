"""Our tab on the host's page: what a file is, what loading it would do, and what the slots hold."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts import inspector
from transplant.hosts.inspector import QUIET
from transplant.hosts.sdnext import app, inspecting
from transplant.hosts.standalone.report import report
from transplant.options import option
from transplant.slots import PRIMARY, SLOTS

TITLE, ELEM_ID = "Transplant", "transplant"


def tabs() -> list[tuple[Any, str, str]]:
    """The tab, as the host asks for it: its Blocks, its title and its id."""
    with gr.Blocks(analytics_enabled=False) as blocks:
        drawn = inspector.draw(
            inspecting.names(), show, "Refresh", "transplant_refresh", slot=len(inspecting.slots()) > 1
        )
        drawn.button.click(refreshed, [drawn.file, drawn.slot], [drawn.file, drawn.shown], **QUIET)
    return [(blocks, TITLE, ELEM_ID)]


def show(name: str | None, slot: str | None) -> str:
    """What is known of a file, and the slots below it, as HTML."""
    return (_report(name, slot) if name else inspector.HINT) + _slots()


def refreshed(name: str | None, slot: str | None) -> tuple[Any, str]:
    """The list of files and what is known of the chosen one, both looked up again."""
    app.module("modules.sd_unet").refresh_unet_list()
    names = inspecting.names()
    name = name if name in names else None
    return gr.update(choices=names, value=name), show(name, slot)


def _report(name: str, slot: str | None) -> str:
    kind = next((kind for kind in SLOTS if kind.option == slot), PRIMARY)
    try:
        is_loaded = app.loaded_pipeline() is not None
        found = inspecting.inspected_over_base(name, kind) if is_loaded else inspecting.inspected(name)
    except TransplantError as error:
        return f'<p class="tp-message tp-error">{escape(str(error))}</p>'
    return report(found.as_json())


def _slots() -> str:
    """What every slot holds, and why its last choice was not taken."""
    rows = [
        (option(state.option).label, state.loaded or "not known here", state.refused or "")
        for state in inspecting.slots()
    ]
    cells = "".join(
        f"<tr><th scope=row>{escape(label)}</th><td>{escape(loaded)}</td><td>{escape(refused)}</td></tr>"
        for label, loaded, refused in rows
    )
    return f"<h4>Loaded</h4><table class=tp-facts>{cells}</table>"
