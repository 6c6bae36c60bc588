"""Several files, the same prompts and seeds: one labelled grid. Runs on the worker's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from transplant.errors import OptionError, TransplantError, counted
from transplant.grid import Cell, Column, compose
from transplant.hosts.standalone.jobs import Job, Notice, Saved, sentence
from transplant.hosts.standalone.models import SLOT_OF, Models
from transplant.hosts.standalone.settings import Settings
from transplant.request import Request, infotext

if TYPE_CHECKING:
    from transplant.hosts.standalone.images import PictureStore

log = logging.getLogger("transplant")

MAX_PICTURES = 400


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Attributes:
        slot: the option of the slot that the files go into.
        files: entries of its dropdown, the columns; the first is what the others are compared with.
        requests: what to draw with each, the rows.
    """

    slot: str
    files: tuple[str, ...]
    requests: tuple[Request, ...]


def make_comparison(slot: str, files: Sequence[str], prompts: str, seeds: str, common: Request) -> Comparison:
    """A comparison from the fields of a form.

    Args:
        slot: the option of a slot.
        files: entries of its dropdown.
        prompts: one in a line.
        seeds: numbers with commas or spaces between them.
        common: everything else of what to draw.

    Raises:
        OptionError: nothing to compare, a seed that is none, or more pictures than anyone would wait for.
    """
    if not files:
        raise OptionError("files", "", "choose at least one file")
    lines = [line.strip() for line in prompts.splitlines() if line.strip()] or [""]
    try:
        numbers = [int(text) for text in seeds.replace(",", " ").split()] or [common.seed]
    except ValueError as error:
        raise OptionError("seeds", seeds, "must be whole numbers with commas between them") from error
    if not all(0 <= number < 2**63 for number in numbers):
        raise OptionError("seeds", seeds, "must be from 0 to 2**63 - 1")
    requests = tuple(replace(common, prompt=line, seed=number, batch=1) for line in lines for number in numbers)
    if len(files) * len(requests) > MAX_PICTURES:
        raise OptionError("files", "", f"these are {len(files) * len(requests)} pictures; {MAX_PICTURES} are the most")
    return Comparison(slot, tuple(dict.fromkeys(files)), requests)


def compare(
    job: Job,
    comparison: Comparison,
    models: Models,
    settings: Settings,
    store: PictureStore,
    cancelled: Callable[[], bool],
) -> Notice | None:
    """Draw everything and save the grid; what was selected before is loaded again afterwards.

    A file that is refused has its reason in its column. When the job is cancelled, or fails, the grid holds what was
    done until then.
    """
    columns: list[Column] = []
    models.keep_settings = True
    try:
        for file in comparison.files:
            columns.append(Column(file, "", ()))
            with settings.overlaid({comparison.slot: file}):
                _draw_column(job, comparison, columns, models, cancelled)
    finally:
        if any(column.cells for column in columns):
            job.pictures = (_saved(comparison, columns, models, store),)
        models.settle_at_last()
    refused = [column.title for column in columns if not column.cells]
    return Notice("warning", f"Refused: {', '.join(refused)}; the grid has the reasons.") if refused else None


def _draw_column(
    job: Job, comparison: Comparison, columns: list[Column], models: Models, cancelled: Callable[[], bool]
) -> None:
    """The pictures of the last column, put into it one by one."""
    from transplant.generate import generate

    file, total = columns[-1].title, len(comparison.files) * len(comparison.requests)
    begun = time.perf_counter()
    notice = models.settle()
    if notice is not None and notice.level == "error":
        failed = models.session().slots[SLOT_OF[comparison.slot].name].failed
        columns[-1] = Column(file, sentence(str(failed.error)) if failed else notice.text, ())
        return
    columns[-1] = Column(
        file, f"loaded in {time.perf_counter() - begun:.1f} s, {_weights(models, comparison.slot)}", ()
    )
    pipeline = models.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    for request in comparison.requests:
        done = (len(columns) - 1) * len(comparison.requests) + len(columns[-1].cells)

        def on_step(_: int, step: int, steps: int, done: int = done) -> None:
            text = f"Picture {done + 1} of {total}: {file}, step {step} of {steps}"
            job.report(text, (done + step / steps) / total, total * steps, "steps")

        begun = time.perf_counter()
        picture = next(generate(pipeline, request, on_step=on_step, cancelled=cancelled))
        cell = Cell(picture.image, f"{time.perf_counter() - begun:.2f} s")
        columns[-1] = replace(columns[-1], cells=(*columns[-1].cells, cell))


def _weights(models: Models, slot: str) -> str:
    """Size of what the slot holds."""
    from transplant.view import size

    session = models.session()
    component = SLOT_OF[slot].component_in(session.base) if session.base else None
    network: Any = getattr(session.pipeline, component or "", None)
    if network is None:
        raise TransplantError(f"the loaded base model has nothing for {slot}")
    return size(sum(tensor.nbytes for tensor in network.state_dict().values()))


def _saved(comparison: Comparison, columns: Sequence[Column], models: Models, store: PictureStore) -> Saved:
    from transplant.generate import Picture

    rows = [f"{request.prompt} (seed {request.seed})" for request in comparison.requests]
    first = comparison.requests[0]
    base = models.holding.base if models.holding else ""
    names = {"Model": base, "Compared": ", ".join(column.title for column in columns)}
    text = infotext(first, first.seed, names)
    path = store.save(Picture(compose(columns, rows), first.seed), text, True)
    log.info("%s: %s compared", path.name, counted(len(columns), "file"))
    return Saved(path, text)
