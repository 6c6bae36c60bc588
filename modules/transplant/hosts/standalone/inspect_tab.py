"""The tab that says what a file is, and what loading it over the loaded base model would do."""

from __future__ import annotations

from typing import Any

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts import inspector
from transplant.hosts.inspector import HINT, QUIET
from transplant.hosts.standalone import page
from transplant.hosts.standalone.folders import find
from transplant.hosts.standalone.jobs import Notice, sentence
from transplant.hosts.standalone.live import Follower, owner_of
from transplant.hosts.standalone.models import BASE
from transplant.hosts.standalone.report import report
from transplant.hosts.standalone.worker import Worker
from transplant.inspection import Inspection, inspect_file
from transplant.slots import SECONDARY


def draw(worker: Worker) -> list[Follower]:
    """Draw the tab."""

    def inspect(name: str | None, where: str, request: gr.Request) -> str:
        """What the header says at once; what it means for the base model follows from the queue."""
        path = find(worker.catalog.overrides, name or "")
        if path is None:
            return HINT
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
            if not name:
                raise TransplantError("no file is chosen: choose one under File first")
            worker.set_options(owner, {where: name})
        except TransplantError as error:
            worker.refuse(owner, error)

    drawn = inspector.draw(worker.listed_files(), inspect, "Load it", "inspect_use", slot=False)
    file, slot = drawn.file, drawn.slot
    drawn.button.click(load, [file, slot], **QUIET)
    return [
        Follower(file, lambda _: worker.revision, lambda _: gr.update(choices=worker.listed_files())),
        Follower(slot, lambda _: worker.is_shown(SECONDARY.option), lambda two: gr.update(visible=two)),
        Follower(drawn.shown, worker.answer, _update),
    ]


def _update(found: Inspection | None) -> Any:
    return gr.skip() if found is None else report(found.as_json())
