"""Keeps other web sites out of a server that is for this machine alone."""

from __future__ import annotations

import base64
import secrets
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
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


class Login:
    """Asks API requests for the page's login: as HTTP Basic, or the cookie of a browser that is logged in."""

    def __init__(self, login: tuple[str, str] | None) -> None:
        """`login` is user and password; None lets everyone in."""
        self._login = login
        self._page: Any = None

    def accept_page(self, mounted: Any) -> None:
        """Accept the cookies that the Gradio page mounted in this application gives out."""
        self._page = next(
            (route.app for route in mounted.routes if hasattr(getattr(route, "app", None), "tokens")), None
        )

    async def check(self, request: Request) -> None:
        """Let a request in. Raises HTTPException 401."""
        if self._login is None or self._has_cookie(request) or self._has_password(request):
            return
        raise HTTPException(401, "Log in first.", {"WWW-Authenticate": 'Basic realm="Transplant"'})

    def _has_password(self, request: Request) -> bool:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        try:
            given = base64.b64decode(value, validate=True) if scheme.lower() == "basic" else b""
        except ValueError:
            return False
        return self._login is not None and secrets.compare_digest(given, ":".join(self._login).encode())

    def _has_cookie(self, request: Request) -> bool:
        if self._page is None:
            return False
        names = (f"access-token-{self._page.cookie_id}", f"access-token-unsecure-{self._page.cookie_id}")
        return any(request.cookies.get(name) in self._page.tokens for name in names)


def is_local(url: str) -> bool:
    """Whether a URL's host is this machine by one of its own names."""
    try:
        return urlsplit(url).hostname in LOCAL_NAMES
    except ValueError:
        return False
