"""The tab that draws the same with several files and shows how far apart the pictures are."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone import page
from transplant.hosts.standalone.compare import make_comparison
from transplant.hosts.standalone.generate_tab import size_followers, slider
from transplant.hosts.standalone.jobs import Saved
from transplant.hosts.standalone.live import Follower, owner_of
from transplant.hosts.standalone.worker import Worker
from transplant.options import option
from transplant.request import Request, make_request
from transplant.samplers import DEFAULT_SAMPLER
from transplant.slots import DEFAULT, NONE, PRIMARY, SECONDARY, SLOTS


def draw(worker: Worker) -> list[Follower]:
    """Draw the tab."""
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            fields, button = _form(worker)
        with gr.Column(scale=6, min_width=320):
            result = gr.Image(
                label="Comparison", elem_id="compare_result", type="filepath", format="png", interactive=False,
                buttons=["download", "fullscreen"],
            )  # fmt: skip
            text = gr.Textbox(label="Parameters", elem_id="compare_info", lines=2, interactive=False, buttons=["copy"])

    def compare(request: gr.Request, *values: Any) -> None:
        slot, files, prompts, seeds, steps, guidance, width, height, sampler = values
        owner = owner_of(request)
        try:
            common = make_request("", "", steps, guidance, width, height, 0, 1, sampler)
            worker.compare(owner, make_comparison(slot, files or [], prompts, seeds, common))
        except TransplantError as error:
            worker.refuse(owner, error)

    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    button.click(compare, list(fields.values()), trigger_mode="multiple", **quiet)

    def grid(owner: str) -> tuple[Saved, ...]:
        return worker.queue.pictures(owner, "comparison")

    return [
        Follower(result, grid, lambda saved: gr.update(value=str(saved[0].path) if saved else None)),
        Follower(text, grid, lambda saved: saved[0].infotext if saved else ""),
        Follower(fields["slot"], lambda _: worker.is_shown(SECONDARY.option), lambda two: gr.update(visible=two)),
        Follower(fields["files"], lambda _: worker.revision, lambda _: gr.update(choices=_files(worker))),
        Follower(fields["sampler"], lambda _: worker.samplers(), lambda names: gr.update(choices=list(names))),
        *size_followers(worker, fields),
    ]


def _form(worker: Worker) -> tuple[dict[str, Any], gr.Button]:
    """The parameters by name, and the button."""
    fields: dict[str, Any] = {}
    slots = [(option(kind.option).label, kind.option) for kind in SLOTS]
    fields["slot"] = gr.Radio(slots, value=PRIMARY.option, label="Slot", elem_id="compare_slot", visible=False)
    fields["files"] = gr.Dropdown(
        _files(worker), value=[DEFAULT], multiselect=True, elem_id="compare_files",
        label="Files, the first is what the others are compared with",
    )  # fmt: skip
    fields["prompts"] = gr.Textbox(
        lambda: worker.starting().prompt, label="Prompts, one in a line", lines=3, elem_id="compare_prompts"
    )
    fields["seeds"] = gr.Textbox("1, 2", label="Seeds", max_lines=1, elem_id="compare_seeds")
    button = gr.Button("Compare", variant="primary", elem_id="compare_start")
    with gr.Row():
        fields["steps"] = slider("steps", Request.steps, "compare_steps")
        fields["guidance"] = slider("guidance", Request.guidance, "compare_cfg_scale")
    with gr.Row():
        fields["width"] = slider("width", lambda: worker.starting().width, "compare_width")
        fields["height"] = slider("height", lambda: worker.starting().height, "compare_height")
    fields["sampler"] = gr.Dropdown([DEFAULT_SAMPLER], label="Sampler", elem_id="compare_sampling")
    return fields, button


def _files(worker: Worker) -> list[page.Choice]:
    return [(label, name) for label, name in worker.file_choices(None) if name != NONE]
