"""The settings page: every option that is not in the quicksettings, with one Apply for all."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone import controls, page, quicksettings
from transplant.hosts.standalone.jobs import Notice, sentence
from transplant.hosts.standalone.live import Follower, follow, owner_of
from transplant.hosts.standalone.models import FP8
from transplant.hosts.standalone.worker import Worker
from transplant.options import OPTIONS, option


def draw(worker: Worker) -> None:
    """Draw the sections, and the Apply button with what came of it."""
    above = quicksettings.listed(worker)
    shown = [known for known in OPTIONS if known not in above]
    components: list[Any] = []
    for section in dict.fromkeys(known.section for known in shown):
        gr.Markdown(f"### {section}")
        with gr.Row(elem_classes="tp-section"):
            members = [known for known in shown if known.section == section]
            components += [controls.build(worker, known, with_help=True) for known in members]
    followers: list[Follower] = []
    for known, one in zip(shown, components, strict=True):
        if known.choices in ("bases", "overrides"):
            followers += [controls.follower(worker, known, one), *controls.shown_while_of_use(worker, known, one)]
        elif known.key == FP8:
            followers.append(controls.note_follower(worker, known, one, with_help=True))
    follow(followers)

    def apply(request: gr.Request, *values: object) -> str:
        changed = {
            known.key: value for known, value in zip(shown, values, strict=True) if value != worker.shown(known.key)
        }
        try:
            keys = worker.set_options(owner_of(request), changed)
        except TransplantError as error:
            return page.message(Notice("error", f"Nothing was saved. {sentence(str(error))}"))
        return page.message(page.applied([option(key) for key in keys]))

    message = gr.HTML(page.message(None), elem_id="settings_message")
    submit = gr.Button("Apply", variant="primary", elem_id="settings_submit")
    submit.click(apply, components, message, api_visibility="private", show_progress="hidden")
