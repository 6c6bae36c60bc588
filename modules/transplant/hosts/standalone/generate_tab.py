"""The page's main tab: a prompt, its parameters, and the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone.jobs import Saved
from transplant.hosts.standalone.live import Follower, owner_of
from transplant.hosts.standalone.worker import Worker
from transplant.request import LIMITS, Request, make_request, parse_infotext
from transplant.samplers import DEFAULT_SAMPLER

FIELDS = ("prompt", "negative", "steps", "guidance", "width", "height", "seed", "batch", "sampler", "frames")
"""In the order of `make_request`."""

QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def draw(worker: Worker) -> list[Follower]:
    """Draw the tab; element ids are SD.Next's."""
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            fields, button, reuse, file = _form(worker)
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

    button.click(generate, list(fields.values()), trigger_mode="multiple", **QUIET)
    gallery.select(select, outputs=text, **QUIET)
    reuse.click(_seed_of, text, fields["seed"], **QUIET)
    _bind_recall(worker, file, fields)
    return [
        Follower(gallery, lambda owner: _pictures(worker, owner), _gallery_update),
        Follower(text, lambda owner: _pictures(worker, owner), lambda saved: saved[-1].infotext if saved else ""),
        Follower(fields["sampler"], lambda _: worker.samplers(), lambda names: gr.update(choices=list(names))),
        Follower(fields["frames"], lambda _: _makes_video(worker), lambda video: gr.update(visible=video)),
        *size_followers(worker, fields),
    ]


def slider(name: str, value: Any, elem_id: str, **more: Any) -> gr.Slider:
    """The slider of a field of a request, with the limits that it has everywhere."""
    limit = LIMITS[name]
    return gr.Slider(
        limit.least, limit.most, value, step=limit.multiple or 0.1, label=name.title(), elem_id=elem_id, **more
    )


def size_followers(worker: Worker, fields: Mapping[str, Any]) -> list[Follower]:
    """Set width and height to what the base model is made for, once that and the device are known.

    On a CPU they stay as they are: there they depend on neither.
    """

    def follower(name: str) -> Follower:
        def known(_: str) -> int | None:
            return getattr(worker.starting(), name) if worker.models.on_cpu is False else None

        def update(value: int | None) -> Any:
            return gr.skip() if value is None else gr.update(value=value)

        return Follower(fields[name], known, update)

    return [follower("width"), follower("height")]


def _form(worker: Worker) -> tuple[dict[str, Any], gr.Button, gr.Button, gr.File]:
    """The parameters by name, the button, the one for the last seed, and the place for a picture to read from."""
    fields: dict[str, Any] = {}
    fields["prompt"] = gr.Textbox(
        lambda: worker.starting().prompt, label="Prompt", elem_id="txt2img_prompt", lines=3,
        placeholder="What should be in the picture",
    )  # fmt: skip
    fields["negative"] = gr.Textbox(label="Negative prompt", elem_id="txt2img_neg_prompt", lines=1)
    button = gr.Button("Generate", variant="primary", elem_id="txt2img_generate")
    with gr.Row():
        fields["steps"] = slider("steps", Request.steps, "txt2img_steps")
        fields["guidance"] = slider("guidance", Request.guidance, "txt2img_cfg_scale")
    with gr.Row():
        fields["width"] = slider("width", lambda: worker.starting().width, "txt2img_width")
        fields["height"] = slider("height", lambda: worker.starting().height, "txt2img_height")
    with gr.Row():
        with gr.Row(elem_classes="tp-choice"):
            fields["seed"] = gr.Number(-1, label="Seed (-1 draws one)", elem_id="txt2img_seed", min_width=120)
            reuse = gr.Button(
                "Use the shown picture's seed", elem_id="txt2img_reuse_seed", elem_classes="tp-reuse", min_width=36
            )
        fields["batch"] = slider("pictures", 1, "txt2img_batch_count")
    with gr.Row():
        fields["sampler"] = gr.Dropdown([DEFAULT_SAMPLER], label="Sampler", elem_id="txt2img_sampling", min_width=160)
        fields["frames"] = slider("frames", 1, "txt2img_frames", visible=False)
    with gr.Accordion("Read parameters from a picture", open=False, elem_id="txt2img_recall_fold"):
        file = gr.File(
            label="A picture that was made here or in SD.Next", elem_id="txt2img_recall", file_types=["image"],
            height=110,
        )  # fmt: skip
    return {name: fields[name] for name in FIELDS}, button, reuse, file


def _bind_recall(worker: Worker, file: gr.File, fields: dict[str, Any]) -> None:
    def read(path: str | None, request: gr.Request) -> list[Any]:
        if path is None:
            return [gr.skip()] * len(fields)
        owner = owner_of(request)
        try:
            recalled = worker.recall(owner, Path(path))
        except TransplantError as error:
            worker.refuse(owner, error)
            return [gr.skip()] * len(fields)
        return [recalled.fields.get(name, gr.skip()) for name in fields]

    file.upload(read, file, list(fields.values()), **QUIET)


def _seed_of(infotext: str) -> int:
    return int(parse_infotext(infotext).get("Seed", -1))


def _makes_video(worker: Worker) -> bool:
    return worker.holding is not None and worker.holding.makes_video


def _gallery_update(saved: tuple[Saved, ...]) -> Any:
    """The pictures, with the newest one open."""
    return gr.update(value=[str(one.path) for one in saved], selected_index=len(saved) - 1 if saved else None)


def _pictures(worker: Worker, owner: str) -> tuple[Saved, ...]:
    return worker.queue.pictures(owner, "pictures")
