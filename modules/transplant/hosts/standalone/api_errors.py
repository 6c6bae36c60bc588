"""What a request that the API cannot read is told: one sentence, in the form that its other errors have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

_WANTED = {
    "int": "a whole number", "float": "a number", "string": "a text", "bool": "true or false", "dict": "an object",
    "model": "an object", "list": "a list",
}  # fmt: skip
"""By the beginning of pydantic's name of an error."""


def tell_in_words(app: FastAPI) -> None:
    """Answer requests of the wrong form with 422 and a sentence as `detail`."""

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        errors: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else ()
        return JSONResponse({"detail": explained(errors[0]) if errors else str(error)}, 422)

    app.add_exception_handler(RequestValidationError, refuse)


def explained(error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence."""
    place, kind = error["loc"], str(error["type"])
    name = ".".join(str(part) for part in place[1:])
    if kind == "json_invalid":
        return f"The body is not valid JSON: {error['ctx']['error']} at character {place[-1]}."
    if kind == "missing":
        return f"{name}: is missing in the {place[0]}." if name else "The body is missing: send a JSON object."
    wanted = next((text for start, text in _WANTED.items() if kind.startswith(start)), None)
    given = repr(error.get("input"))
    given = given if len(given) <= 80 else f"{given[:80]}..."
    reason = f"must be {wanted}, not {given}" if wanted else str(error["msg"])
    return f"{name}: {reason}." if name else f"The body {reason}."
