"""Our API routes, behind the host's login and below its path."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

from transplant.errors import TransplantError
from transplant.hosts.sdnext import app, inspecting
from transplant.slots import PRIMARY, SLOTS


def add_routes() -> None:
    """Add them to the host's API."""
    for path, function in (("slots", slots), ("inspect", inspect), ("plan", plan)):
        app.shared().api.add_api_route(f"/transplant/v1/{path}", function, methods=["GET"])


def slots() -> list[dict[str, Any]]:
    """What each slot is to hold and holds, and why its last choice was not taken."""
    return inspecting.slots_as_json()


def inspect(file: str) -> dict[str, Any]:
    """What a file of the UNET list is, from its header."""
    try:
        return inspecting.inspected(file).as_json()
    except TransplantError as error:
        raise _answer(error) from error


def plan(file: str, slot: str = PRIMARY.option) -> dict[str, Any]:
    """What loading a file of the UNET list over the loaded base model would do and cost."""
    kind = next((kind for kind in SLOTS if slot in (kind.option, kind.name)), None)
    if kind is None:
        raise HTTPException(422, f"slot must be one of {', '.join(kind.option for kind in SLOTS)}, not {slot!r}")
    try:
        return inspecting.inspected_over_base(file, kind).as_json()
    except TransplantError as error:
        raise _answer(error) from error


def _answer(error: TransplantError) -> HTTPException:
    return HTTPException(404 if isinstance(error, inspecting.NoSuchFile) else 422, str(error))
