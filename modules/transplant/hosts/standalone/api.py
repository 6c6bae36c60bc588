"""The HTTP API: SD.Next's routes for options, models and pictures, and our own for what a file is.

Requests are queued as those of the page are. A request that loads or draws is answered when that is done.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from transplant.architectures.detect import SHARD
from transplant.errors import OptionError, TransplantError
from transplant.hosts.standalone.api_fields import ignored, no_bool, renamed
from transplant.hosts.standalone.api_page import api_page
from transplant.hosts.standalone.folders import find
from transplant.hosts.standalone.jobs import Job
from transplant.hosts.standalone.models import BASE, SLOT_OF
from transplant.hosts.standalone.worker import Worker
from transplant.inventory import UNREADABLE, Entry
from transplant.options import OPTIONS, option
from transplant.request import LIMITS, make_request
from transplant.request import Request as Drawn
from transplant.slots import PRIMARY

POLL_SECONDS = 0.05


Whole = Annotated[int, BeforeValidator(no_bool)]
Number = Annotated[float, BeforeValidator(no_bool)]


class TextToImage(BaseModel):
    """Body of /sdapi/v1/txt2img: SD.Next's names, of its fields those that apply.

    Its other fields, and A1111's, are ignored, and listed so in the answer's `info`; null is as if nothing was said.
    """

    model_config = ConfigDict(extra="allow")

    prompt: str | None = Field(None, description="by default what a new page has, as width and height")
    negative_prompt: str = ""
    steps: Whole = Drawn.steps
    cfg_scale: Number = Drawn.guidance
    width: Whole | None = None
    height: Whole | None = None
    seed: Whole = Field(-1, description="-1 draws one")
    n_iter: Whole = Field(1, description="number of pictures, times batch_size")
    batch_size: Whole = 1
    sampler_name: str | None = None
    frames: Whole = Field(1, description="frames of a video, where the base model makes one")
    send_images: bool = True
    override_settings: dict[str, Any] = Field(
        default_factory=dict, description="option values for this request alone; what was set before is set again"
    )

    @model_validator(mode="before")
    @classmethod
    def _said(cls, values: Any) -> Any:
        fields = cast("dict[str, Any]", values) if isinstance(values, dict) else None
        return values if fields is None else {name: value for name, value in fields.items() if value is not None}

    def request(self) -> Drawn:
        """What to draw. Raises OptionError where that cannot be; named by our own names of the fields."""
        for name in ("n_iter", "batch_size"):
            LIMITS["pictures"].checked(name, getattr(self, name))
        return make_request(
            self.prompt or "", self.negative_prompt, self.steps, self.cfg_scale, self.width, self.height, self.seed,
            self.n_iter * self.batch_size, self.sampler_name, self.frames,
        )  # fmt: skip

    def sent(self) -> dict[str, Any]:
        """The fields that are ours."""
        return self.model_dump(include=set(type(self).model_fields))


def router(worker: Worker, allow: Callable[[Request], Awaitable[None]]) -> APIRouter:
    """The routes.

    Args:
        worker: what does the work.
        allow: raises HTTPException for requests that are not let in.
    """
    routes = APIRouter(dependencies=[Depends(allow)])
    owners = (f"api-{number}" for number in itertools.count(1))
    _add_options(routes, worker, owners)
    _add_models(routes, worker, owners)
    _add_pictures(routes, worker, owners)
    _add_files(routes, worker, owners)
    _add_refusals(routes)
    return routes


def description(app: FastAPI, allow: Callable[[Request], Awaitable[None]]) -> APIRouter:
    """What the API offers: /openapi.json for programs, /docs for people, made of it without anyone else's scripts."""
    routes = APIRouter(dependencies=[Depends(allow)], include_in_schema=False)

    @routes.get("/openapi.json")
    async def openapi() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return app.openapi()

    @routes.get("/docs", response_class=HTMLResponse)
    async def docs() -> str:  # pyright: ignore[reportUnusedFunction]
        return api_page(app.openapi())

    return routes


def _add_options(routes: APIRouter, worker: Worker, owners: Any) -> None:
    @routes.get("/sdapi/v1/options", summary="The value of every option")
    async def get_options() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {known.key: worker.settings.get(known.key) for known in OPTIONS}

    @routes.post("/sdapi/v1/options", summary="Set options; answers when what they load is loaded")
    async def set_options(values: dict[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        owner = next(owners)
        try:
            changed = worker.set_options(owner, values)
        except OptionError as error:
            raise HTTPException(422, str(error)) from error
        except TransplantError as error:
            raise HTTPException(500, str(error)) from error
        return {"updated": changed, "messages": await _all_finished(worker, owner, values, changed)}


def _add_models(routes: APIRouter, worker: Worker, owners: Any) -> None:
    @routes.get("/sdapi/v1/sd-models", summary="The base models")
    async def models() -> list[dict[str, Any]]:  # pyright: ignore[reportUnusedFunction]
        return [
            {"title": name, "model_name": name, "filename": str(path), "type": "diffusers", "hash": None}
            for name, path in worker.catalog.bases.items()
        ]

    @routes.get("/sdapi/v1/unets", summary="The files for the slots, with what each of them is")
    def unets() -> list[dict[str, Any]]:  # pyright: ignore[reportUnusedFunction]
        described = worker.catalog.described()
        return [
            {"name": name, "filename": str(path), **_identified(described[name])}
            for name, path in worker.catalog.overrides.items()
            if name in described
        ]

    @routes.get("/sdapi/v1/samplers", summary="The samplers of the loaded base model")
    async def samplers() -> list[dict[str, Any]]:  # pyright: ignore[reportUnusedFunction]
        return [{"name": name, "aliases": [], "options": {}} for name in (worker.holding or _NOTHING).samplers]

    async def refresh() -> dict[str, Any]:
        owner = next(owners)
        await run_in_threadpool(worker.refresh, owner)
        return {"messages": [message for job in worker.queue.jobs_of(owner) if (message := await _finished(job))]}

    for name in ("unets", "checkpoints"):
        routes.add_api_route(
            f"/sdapi/v1/refresh-{name}", refresh, methods=["POST"], summary="Look at the folders again"
        )


def _add_pictures(routes: APIRouter, worker: Worker, owners: Any) -> None:
    @routes.post("/sdapi/v1/txt2img", summary="Make pictures")
    async def txt2img(body: TextToImage) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        unused = _ignored(body)
        try:
            body = await run_in_threadpool(_completed, worker, body)
            wanted = body.request()
            job = worker.generate(next(owners), wanted, body.override_settings)
        except OptionError as error:
            raise HTTPException(422, str(renamed(error))) from error
        except TransplantError as error:
            raise HTTPException(422, str(error)) from error
        message = await _finished(job)
        files = [await run_in_threadpool(saved.path.read_bytes) for saved in job.pictures if body.send_images]
        told = {"infotexts": [saved.infotext for saved in job.pictures], "seed": wanted.seed}
        told |= ({"messages": [message]} if message else {}) | ({"ignored": unused} if unused else {})
        return {
            "images": [base64.b64encode(data).decode() for data in files],
            "parameters": body.sent(),
            "info": json.dumps(told),
        }

    @routes.get("/sdapi/v1/progress", summary="What is being done and how far it is")
    async def progress() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        job, waiting = worker.queue.current()
        fraction = (job.fraction or 0) if job else 0
        state = {"job": job.title if job else "", "job_count": waiting + bool(job)}
        state["interrupted"] = job is not None and job.cancelled
        return {
            "progress": fraction,
            "eta_relative": (job.remaining() or 0) if job else 0,
            "state": state,
            "current_image": None,
            "textinfo": job.text if job else "",
        }

    @routes.post("/sdapi/v1/interrupt", summary="End the job at hand")
    async def interrupt() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        job, _ = worker.queue.current()
        if job is not None:
            worker.queue.cancel(job.number)
        return {}


def _add_files(routes: APIRouter, worker: Worker, owners: Any) -> None:
    @routes.get("/transplant/v1/inspect", summary="What a file is, from its header")
    def inspect(file: str) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return _inspected(_path_of(worker.catalog.overrides, file))

    @routes.get("/transplant/v1/plan", summary="What loading a file over a base model would do and cost")
    async def plan(  # pyright: ignore[reportUnusedFunction]
        file: str, base: str = "", slot: str = PRIMARY.option
    ) -> dict[str, Any]:
        path = _path_of(worker.catalog.overrides, file)
        base_path = _path_of(worker.catalog.bases, base or worker.settings.get(BASE))
        if slot not in SLOT_OF:
            raise HTTPException(422, f"slot must be one of {', '.join(SLOT_OF)}, not {slot!r}")
        job = worker.inspect(next(owners), path, base_path, slot)
        await _finished(job)
        return job.result.as_json()


def _add_refusals(routes: APIRouter) -> None:
    """Answer what the other routes do not: else the page, which takes every path, would."""
    known = [route for route in routes.routes if isinstance(route, APIRoute)]

    async def refuse(request: Request) -> None:
        matching = [route for route in known if route.path_regex.match(request.url.path)]
        allowed = {method for route in matching for method in route.methods or ()}
        if not allowed:
            raise HTTPException(404, f"There is no {request.url.path}: /docs lists what there is.")
        named = ", ".join(sorted(allowed))
        raise HTTPException(405, f"{request.url.path} takes {named}, not {request.method}.", {"Allow": named})

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    for start in ("sdapi", "transplant"):
        routes.add_api_route(f"/{start}/{{rest:path}}", refuse, methods=methods, include_in_schema=False)


def _ignored(body: TextToImage) -> list[str]:
    """The fields that have no effect. Raises HTTPException where no program has one of them."""
    try:
        return ignored(body.model_extra or {}, TextToImage.model_fields)
    except OptionError as error:
        raise HTTPException(422, str(error)) from error


def _completed(worker: Worker, body: TextToImage) -> TextToImage:
    """The body with what it does not say. Raises TransplantError where the device that decides is not there."""
    if None not in (body.prompt, body.width, body.height):
        return body
    start = worker.starting(ask_device=True)
    said = {key for key, value in body.sent().items() if value is not None}
    return body.model_copy(update={key: value for key, value in vars(start).items() if key not in said})


class _NOTHING:
    samplers: tuple[str, ...] = ()


async def _finished(job: Job) -> str | None:
    """Wait for a job without holding a thread; what it has to say.

    Raises:
        HTTPException: it failed or was cancelled, with its sentence.
    """
    while not job.is_over:
        await asyncio.sleep(POLL_SECONDS)
    text = job.notice.text if job.notice else None
    if job.status == "finished" and not (job.notice and job.notice.level == "error"):
        return text
    raise HTTPException(409 if job.status == "cancelled" else 422, text or f"{job.title} {job.status}.")


async def _all_finished(worker: Worker, owner: str, values: Mapping[str, Any], changed: list[str]) -> list[str]:
    """Wait for what setting several options has queued; what that has to say.

    Raises:
        HTTPException: a job failed; each sentence names its option where several were sent, the last what is set.
    """
    messages: list[str] = []
    refused: list[HTTPException] = []
    lacking: set[str] = set()
    for job in worker.queue.jobs_of(owner):
        try:
            message = await _finished(job)
            messages += [message] if message else []
        except HTTPException as error:
            missed = [key for key, name in job.wants.items() if worker.settings.get(key) != name]
            named = f"{', '.join(missed)}: " if missed and len(values) > 1 else ""
            refused.append(HTTPException(error.status_code, f"{named}{error.detail}"))
            lacking.update(missed or [key for key in changed if option(key).effect == "reload"])
    if not refused:
        return messages
    applied = [key for key in changed if key not in lacking]
    told = [error.detail for error in refused] + ([f"Applied: {', '.join(applied)}."] if applied else [])
    raise HTTPException(refused[0].status_code, " ".join(told))


def _path_of(names: Mapping[str, Path], name: str) -> Path:
    path = find(names, name)
    if path is None:
        raise HTTPException(404, f"There is no {name!r} in the list.")
    return path


def _inspected(path: Path) -> dict[str, Any]:
    from transplant.inspection import inspect_file

    try:
        return inspect_file(path).as_json()
    except TransplantError as error:
        raise HTTPException(422, str(error)) from error


def _identified(entry: Entry) -> dict[str, Any]:
    """Kind and architecture; why not, where the file cannot be read."""
    if entry.kind == UNREADABLE:
        return {"kind": None, "architecture": None, "problem": entry.why}
    problem = entry.why if entry.kind == SHARD else None
    return {"kind": entry.kind, "architecture": entry.architecture or None, "problem": problem}
