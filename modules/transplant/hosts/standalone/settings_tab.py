"""The settings page: every option that is not in the quicksettings, with one Apply for all."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone import controls, page, quicksettings
from transplant.hosts.standalone.jobs import Notice, sentence
from transplant.hosts.standalone.live import Follower, follow, owner_of
from transplant.hosts.standalone.models import NOTED
from transplant.hosts.standalone.worker import Worker
from transplant.options import OPTIONS, Option, option


def draw(worker: Worker) -> None:
    """Draw the search, the sections, and the buttons with what came of them."""
    above = quicksettings.listed(worker)
    shown = [known for known in OPTIONS if known not in above]
    gr.Textbox(label="Search the settings", elem_id="settings_search", max_lines=1)  # javascript/transplant.js does it
    components: list[Any] = []
    for section in dict.fromkeys(known.section for known in shown):
        gr.Markdown(f"## {section}", elem_classes="tp-section-title")
        with gr.Row(elem_classes="tp-section"):
            members = [known for known in shown if known.section == section]
            components += [controls.build(worker, known, with_help=True) for known in members]
    message = gr.HTML(page.message(None), elem_id="settings_message")
    with gr.Row():
        submit = gr.Button("Apply", variant="primary", elem_id="settings_submit")
        restore = gr.Button("Restore defaults", elem_id="settings_restore")
    _follow(worker, shown, components)
    quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}

    def apply(request: gr.Request, *values: object) -> str:
        changed = {
            known.key: value for known, value in zip(shown, values, strict=True) if value != worker.shown(known.key)
        }
        try:
            keys = worker.set_options(owner_of(request), changed)
        except TransplantError as error:
            return page.message(Notice("error", f"Nothing was saved. {sentence(str(error))}"))
        return page.message(page.applied([option(key) for key in keys]))

    def defaults() -> list[Any]:
        """The form as it was at first; nothing is set before Apply. Models stay."""
        values = [gr.skip() if known.effect in _MODELS else gr.update(value=known.default) for known in shown]
        return [page.message(Notice("info", "These are the defaults. Apply sets them.")), *values]

    submit.click(apply, components, message, **quiet)
    restore.click(defaults, outputs=[message, *components], **quiet)


_MODELS = ("base", "transformer")
"""Effects of the options that choose a model."""


def _follow(worker: Worker, shown: list[Option], components: list[Any]) -> None:
    followers: list[Follower] = []
    for known, one in zip(shown, components, strict=True):
        followers.append(controls.changed_follower(worker, known, one))
        if known.choices in ("bases", "overrides"):
            followers += [controls.follower(worker, known, one), *controls.shown_while_of_use(worker, known, one)]
        elif known.key in NOTED:
            followers.append(controls.note_follower(worker, known, one, with_help=True))
    follow(followers)
