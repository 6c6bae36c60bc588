"""The page's main tab: a prompt, its parameters, and the pictures."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone.jobs import Saved
from transplant.hosts.standalone.live import Follower, owner_of
from transplant.hosts.standalone.worker import Worker, make_request


def draw(worker: Worker) -> list[Follower]:
    """Draw the tab; element ids are SD.Next's."""
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            fields, button = _form()
        with gr.Column(scale=6, min_width=320):
            gallery = gr.Gallery(
                label="Pictures", elem_id="txt2img_gallery", columns=2, height=520, object_fit="contain", preview=True,
                buttons=["download", "download_all", "fullscreen"], interactive=False, type="filepath",
            )  # fmt: skip
            text = gr.Textbox(
                label="Parameters", elem_id="txt2img_info", lines=3, max_lines=8, interactive=False, buttons=["copy"]
            )

    def generate(request: gr.Request, *values: Any) -> None:
        owner = owner_of(request)
        try:
            worker.generate(owner, make_request(*values))
        except TransplantError as error:
            worker.refuse(owner, error)

    def select(event: gr.SelectData, request: gr.Request) -> str:
        pictures = _pictures(worker, owner_of(request))
        return pictures[event.index].infotext if event.index < len(pictures) else ""

    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    button.click(generate, fields, trigger_mode="multiple", **quiet)
    gallery.select(select, outputs=text, **quiet)
    return [
        Follower(gallery, lambda owner: _pictures(worker, owner), _gallery_update),
        Follower(text, lambda owner: _pictures(worker, owner), lambda saved: saved[-1].infotext if saved else ""),
    ]


def _form() -> tuple[list[Any], gr.Button]:
    """The parameters in the order of `make_request`, and the button."""
    prompt = gr.Textbox(label="Prompt", elem_id="txt2img_prompt", lines=3, placeholder="What should be in the picture")
    negative = gr.Textbox(label="Negative prompt", elem_id="txt2img_neg_prompt", lines=1)
    button = gr.Button("Generate", variant="primary", elem_id="txt2img_generate")
    with gr.Row():
        steps = gr.Slider(1, 100, 8, step=1, label="Steps", elem_id="txt2img_steps")
        guidance = gr.Slider(0, 20, 1, step=0.1, label="Guidance", elem_id="txt2img_cfg_scale")
    with gr.Row():
        width = gr.Slider(64, 2048, 256, step=16, label="Width", elem_id="txt2img_width")
        height = gr.Slider(64, 2048, 256, step=16, label="Height", elem_id="txt2img_height")
    with gr.Row():
        seed = gr.Number(-1, label="Seed", info="-1 draws one", elem_id="txt2img_seed")
        batch = gr.Slider(1, 16, 1, step=1, label="Pictures", elem_id="txt2img_batch_count")
    return [prompt, negative, steps, guidance, width, height, seed, batch], button


def _gallery_update(saved: tuple[Saved, ...]) -> Any:
    """The pictures, with the newest one open."""
    return gr.update(value=[str(one.path) for one in saved], selected_index=len(saved) - 1 if saved else None)


def _pictures(worker: Worker, owner: str) -> tuple[Saved, ...]:
    job = worker.queue.latest(owner, with_pictures=True)
    return job.pictures if job else ()
