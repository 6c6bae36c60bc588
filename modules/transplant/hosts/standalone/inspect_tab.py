"""The tab that says what a file is, and what loading it over the loaded base model would do."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone import page
from transplant.hosts.standalone.folders import find
from transplant.hosts.standalone.generate_tab import QUIET
from transplant.hosts.standalone.jobs import Notice, sentence
from transplant.hosts.standalone.live import Follower, owner_of
from transplant.hosts.standalone.models import BASE
from transplant.hosts.standalone.report import report
from transplant.hosts.standalone.worker import Worker
from transplant.inspection import Inspection, inspect_file
from transplant.options import option
from transplant.slots import PRIMARY, SECONDARY, SLOTS

HINT = "Choose a file: what it is stands in its header, and nothing is loaded."


def draw(worker: Worker) -> list[Follower]:
    """Draw the tab."""
    with gr.Row():
        names = page.choices(list(worker.catalog.overrides), "")
        file = gr.Dropdown(names, value=None, label="File", elem_id="inspect_file")
        slot = gr.Radio(
            [(option(kind.option).label, kind.option) for kind in SLOTS], value=PRIMARY.option, label="Slot",
            elem_id="inspect_slot", visible=False,
        )  # fmt: skip
        use = gr.Button("Load it", elem_id="inspect_use", scale=0, min_width=120)
    shown = gr.HTML(f"<p>{HINT}</p>", elem_id="inspect_report")

    def inspect(name: str | None, where: str, request: gr.Request) -> str:
        """What the header says at once; what it means for the base model follows from the queue."""
        path = find(worker.catalog.overrides, name or "")
        if path is None:
            return f"<p>{HINT}</p>"
        try:
            told = inspect_file(path).as_json()
        except TransplantError as error:
            return page.message(Notice("error", sentence(str(error))))
        base = find(worker.catalog.bases, worker.settings.get(BASE))
        if base is not None and worker.holding is not None:
            worker.inspect(owner_of(request), path, base, where)
        return report(told)

    def load(name: str | None, where: str, request: gr.Request) -> None:
        owner = owner_of(request)
        try:
            worker.set_options(owner, {where: name} if name else {})
        except TransplantError as error:
            worker.refuse(owner, error)

    for event in (file.input, slot.input):
        event(inspect, [file, slot], shown, **QUIET)
    use.click(load, [file, slot], **QUIET)
    return [
        Follower(file, lambda _: worker.revision, lambda _: gr.update(choices=list(worker.catalog.overrides))),
        Follower(slot, lambda _: worker.is_shown(SECONDARY.option), lambda two: gr.update(visible=two)),
        Follower(shown, worker.answer, _update),
    ]


def _update(found: Inspection | None) -> Any:
    return gr.skip() if found is None else report(found.as_json())
