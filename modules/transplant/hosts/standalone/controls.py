"""The control of an option: one for each kind, with SD.Next's element ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import gradio as gr
from gradio.blocks import Block

from transplant.hosts.standalone import page
from transplant.hosts.standalone.live import Follower
from transplant.hosts.standalone.worker import Worker
from transplant.options import OPTIONS, Option
from transplant.slots import SECONDARY

INPUT_EVENTS = {"dropdown": "input", "multiselect": "input", "checkbox": "input", "text": "submit", "number": "submit"}
"""The event that means: the user, not the server, has set this value."""


def build(worker: Worker, option: Option, *, with_help: bool) -> Any:
    """The control of an option with its value of now."""
    value = worker.shown(option.key)
    common: dict[str, Any] = {
        "label": option.label,
        "info": _info(worker, option, with_help) or None,
        "elem_id": f"setting_{option.key}",
        "interactive": _is_enabled(worker, option),
        "min_width": 230,
    }
    match option.control:
        case "checkbox":
            return gr.Checkbox(bool(value), **common)
        case "number":
            return gr.Number(cast("float", value), minimum=option.minimum, maximum=option.maximum, **common)
        case "text":
            return gr.Textbox(str(value), max_lines=1, **common)
        case "dropdown" | "multiselect":
            several = option.control == "multiselect"
            choices = entries(worker, option, value)
            return gr.Dropdown(
                choices, value=cast("Any", value if several else value or None), multiselect=several, **common
            )


def follower(worker: Worker, option: Option, component: Block) -> Follower:
    """Keeps a control at what the server has."""

    def read(_: str) -> tuple[int, Any, Any]:
        value = worker.shown(option.key)
        return worker.revision, value, entries(worker, option, value) if option.choices else None

    def update(now: tuple[int, Any, Any]) -> Any:
        _, value, choices = now
        return gr.update(value=value) if choices is None else gr.update(value=value or None, choices=choices)

    return Follower(component, read, update)


def changed_follower(worker: Worker, option: Option, component: Block) -> Follower:
    """Marks the label of an option that has another value than its default."""
    return Follower(
        component, lambda _: worker.settings.get(option.key) != option.default,
        lambda changed: gr.update(label=f"{option.label} {page.CHANGED}" if changed else option.label),
    )  # fmt: skip


def note_follower(worker: Worker, option: Option, component: Block, *, with_help: bool) -> Follower:
    """Keeps what is said below a control true, and the control usable where it can do something."""

    def read(_: str) -> tuple[str, bool]:
        return _info(worker, option, with_help), _is_enabled(worker, option)

    return Follower(component, read, lambda now: gr.update(info=now[0] or None, interactive=now[1]))


def _info(worker: Worker, option: Option, with_help: bool) -> str:
    note = worker.notes.get(option.key)
    parts = [note.text if note else "", page.explanation(option) if with_help else ""]
    return " ".join(part for part in parts if part)


def _is_enabled(worker: Worker, option: Option) -> bool:
    """Off only where it would do nothing; what is on can always be switched off."""
    note = worker.notes.get(option.key)
    return note is None or note.enabled or worker.shown(option.key) != option.default


def shown_while_of_use(worker: Worker, option: Option, component: Block) -> list[Follower]:
    """Hides a component while its option is of no use; nothing for one that always is."""
    if option.key != SECONDARY.option:
        return []
    return [Follower(component, lambda _: worker.is_shown(option.key), lambda shown: gr.update(visible=shown))]


def entries(worker: Worker, option: Option, value: object) -> list[page.Choice]:
    """The dropdown entries of an option."""
    if option.choices == "options":
        return [(known.label, known.key) for known in OPTIONS]
    if option.choices == "overrides":
        return worker.file_choices(value)
    names: Sequence[str] = worker.dynamic()[option.choices] if isinstance(option.choices, str) else option.choices or ()
    return page.choices(names, value)
