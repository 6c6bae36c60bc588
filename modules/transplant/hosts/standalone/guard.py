"""Keeps other web sites out of a server that is for this machine alone."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class LocalOnly:
    """Refuses requests whose Host or Origin is not this machine.

    A page of another site can send requests to 127.0.0.1, and by DNS rebinding read the answers; what it
    cannot do is choose these two headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if not is_local(f"//{headers.get('host', '')}") or (origin is not None and not is_local(origin)):
                await PlainTextResponse("Only for pages of this machine.", status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_local(url: str) -> bool:
    """Whether a URL's host is this machine by one of its own names."""
    try:
        return urlsplit(url).hostname in LOCAL_NAMES
    except ValueError:
        return False
