"""The Inspect tab as every host shows it: a file, a slot, and what is known of the file. For gradio 3.43 and newer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from transplant.options import option
from transplant.slots import PRIMARY, SLOTS

HINT = "<p>Choose a file: what it is stands in its header, and nothing is loaded.</p>"

_HAS_API_VISIBILITY = int(gr.__version__.partition(".")[0]) >= 6
QUIET: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    **({"api_visibility": "private"} if _HAS_API_VISIBILITY else {"api_name": False}),
}
"""How events are bound: no progress over the page, no route of their own."""


@dataclass(frozen=True)
class Inspector:
    """The tab's components.

    Attributes:
        file: the file.
        slot: the slot that it would go into.
        button: what the host offers to do beside looking.
        shown: what is known of the file, as HTML.
    """

    file: gr.Dropdown
    slot: gr.Radio
    button: gr.Button
    shown: gr.HTML


def draw(
    names: Sequence[str | tuple[str, str]], inspect: Callable[..., str], button: str, elem_id: str, slot: bool
) -> Inspector:
    """Draw the tab.

    Args:
        names: the files; with what is shown for each where that is more than its name.
        inspect: from a file's name and a slot's option to HTML; bound to both controls.
        button: what the button says; the host binds it.
        elem_id: id of the button.
        slot: whether the slot is shown.
    """
    with gr.Row():
        file = gr.Dropdown(list(names), value=None, label="File", elem_id="inspect_file")
        where = gr.Radio(
            [(option(kind.option).label, kind.option) for kind in SLOTS], value=PRIMARY.option, label="Slot",
            elem_id="inspect_slot", visible=slot,
        )  # fmt: skip
        use = gr.Button(button, elem_id=elem_id, scale=0, min_width=120)
    shown = gr.HTML(HINT, elem_id="inspect_report")
    for control in (file, where):
        control.input(inspect, [file, where], shown, **QUIET)
    return Inspector(file, where, use, shown)
