"""`serve`: the WebUI on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transplant.hosts.standalone.worker import Worker

log = logging.getLogger("transplant")

ROOT = Path(__file__).resolve().parents[4]
LOCAL, EVERYWHERE = "127.0.0.1", "0.0.0.0"


class ServeError(Exception):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Arguments:
    """How to serve.

    Attributes:
        address: the address to listen on.
        port: the port; 0 takes a free one.
        login: user and password, or None.
        data_dir: folder of config.json, outputs and cache.
        models_dir: folder of base models and overrides.
        device: torch device, or "auto".
        dtype: compute dtype for this run; None leaves it to the option.
        browser: whether to open one.
    """

    address: str
    port: int
    login: tuple[str, str] | None
    data_dir: Path
    models_dir: Path
    device: str
    dtype: str | None
    browser: bool


def serve(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C.

    Args:
        argv: arguments after the command's name.

    Returns:
        0 after a clean end; 1 for a wrong call or where the server cannot start, with the reason on stderr.
    """
    try:
        arguments = parse(argv)
        listener = listen(arguments)
    except ServeError as error:
        print(f"transplant: {error}", file=sys.stderr)
        return 1
    except SystemExit as leave:  # argparse: 0 after --help, else a wrong call
        return 1 if leave.code else 0
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # uvicorn raises the signal that ended it again when it is through; so both come out as KeyboardInterrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listener:
        try:
            _run(arguments, listener)
        except KeyboardInterrupt:
            print("Stopped.", flush=True)
    return 0


def parse(argv: Sequence[str]) -> Arguments:
    """Arguments from the command line.

    Raises:
        ServeError: they contradict each other.
        SystemExit: argparse refused them, or only help was asked for.
    """
    parser = argparse.ArgumentParser(prog="extension.py serve", description="The Transplant WebUI.", allow_abbrev=False)
    parser.add_argument("--port", type=int, default=7860, help="port (7860)")
    parser.add_argument("--listen", action="store_true", help="answer other machines too; needs --auth")
    parser.add_argument("--auth", metavar="USER:PASS", help="ask for this login")
    parser.add_argument("--models-dir", type=Path, metavar="DIR", help="folder with Diffusers and UNET (models)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", default=ROOT, help="folder of config.json and outputs")
    parser.add_argument("--device", default="auto", help="torch device: auto, cpu, cuda, cuda:1, mps, xpu")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), help="compute dtype for this run")
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    given = parser.parse_args(argv)
    user, colon, password = (given.auth or "").partition(":")
    if given.auth is not None and not (user and colon and password):
        raise ServeError("--auth needs a user and a password: --auth user:pass")
    if given.listen and given.auth is None:
        raise ServeError("--listen lets other machines use this one: protect it with --auth user:pass")
    if not 0 <= given.port <= 65535:
        raise ServeError(f"there is no port {given.port}")
    data_dir = given.data_dir.expanduser().resolve()
    models_dir = (given.models_dir or data_dir / "models").expanduser().resolve()
    if given.models_dir is not None and not models_dir.is_dir():
        raise ServeError(f"--models-dir: there is no folder {models_dir}")
    return Arguments(
        EVERYWHERE if given.listen else LOCAL, given.port, (user, password) if given.auth else None,
        data_dir, models_dir, given.device, given.dtype, not given.no_browser,
    )  # fmt: skip


def listen(arguments: Arguments) -> socket.socket:
    """A socket on the port, bound before anything heavy is imported.

    Raises:
        ServeError: the port cannot be had.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere this option would let two programs share the port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((arguments.address, arguments.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ServeError(
            f"port {arguments.port} cannot be used ({error.strerror}). Something else may be running there, "
            "perhaps another Transplant: stop it, or choose another port with --port"
        ) from error
    return listener


def can_open_browser() -> bool:
    """Whether a browser would have a screen to appear on."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


def _run(arguments: Arguments, listener: socket.socket) -> None:
    from transplant.digest import Digests
    from transplant.hosts.standalone.folders import BASES, OVERRIDES, Catalog
    from transplant.hosts.standalone.images import PictureStore
    from transplant.hosts.standalone.log_panel import FORMAT, LogLines
    from transplant.hosts.standalone.settings import Settings
    from transplant.hosts.standalone.worker import Worker
    from transplant.inventory import Inventory

    lines, console = LogLines(), logging.StreamHandler()
    console.setFormatter(FORMAT)
    log.setLevel(logging.INFO)
    log.handlers[:] = [lines, console]
    log.propagate = False
    settings = Settings(arguments.data_dir / "config.json")
    for folder in (BASES, OVERRIDES):  # so that a new user finds where things go
        with contextlib.suppress(OSError):
            (arguments.models_dir / folder).mkdir(parents=True, exist_ok=True)
    pictures = PictureStore(Path(settings.get("outdir_samples") or arguments.data_dir / "outputs"))
    os.environ["GRADIO_TEMP_DIR"] = str(pictures.temporary / "gradio")
    cache = arguments.data_dir / "cache"
    worker = Worker(
        settings,
        Catalog(arguments.models_dir, inventory=Inventory(cache / "inventory.json")),
        pictures, Digests(cache / "digests.json"), arguments.device, arguments.dtype,
    )  # fmt: skip
    try:
        _serve(arguments, listener, application(arguments, worker, lines), worker)
    finally:
        ended = worker.stop()
        pictures.close()
        if not ended:
            _leave()


def _leave() -> None:
    """End the process at once: the worker is inside a library call, and Python's own shutdown would abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(0)


def application(arguments: Arguments, worker: Worker, lines: Any) -> Any:
    """The ASGI application: the API and the page, behind the checks."""
    import gradio as gr
    from fastapi import FastAPI

    from transplant.hosts.standalone import api, ui
    from transplant.hosts.standalone.api_errors import tell_in_words
    from transplant.hosts.standalone.guard import LocalOnly, Login

    hidden: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="Transplant", **hidden)
    if arguments.address == LOCAL:
        app.add_middleware(LocalOnly)
    login = Login(arguments.login)
    tell_in_words(app)
    app.include_router(api.router(worker, login.check))
    app.include_router(api.description(app, login.check))
    style, script = ROOT / "style.css", ROOT / "javascript" / "transplant.js"
    mounted = gr.mount_gradio_app(
        app, ui.build(worker, lines), path="/", auth=arguments.login,
        allowed_paths=[str(worker.pictures.outputs)], footer_links=[],
        app_kwargs=hidden,
        ssr_mode=False, show_error=True, enable_monitoring=False, pwa=False, mcp_server=False,
        theme=ui.theme(), css_paths=[style] if style.is_file() else None,
        head=f"<script>{script.read_text('utf-8')}</script>" if script.is_file() else None,
    )  # fmt: skip
    login.accept_page(mounted)
    return mounted


def _serve(arguments: Arguments, listener: socket.socket, app: Any, worker: Worker) -> None:
    import uvicorn

    address, port = listener.getsockname()[:2]
    url = f"http://{address if address != EVERYWHERE else socket.gethostname()}:{port}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            catalog = worker.catalog
            print(f"Base models are those in {catalog.bases_dir}, files those in {catalog.overrides_dir}", flush=True)
            print(f"Transplant runs at {url}   (Ctrl-C stops it)", flush=True)
            worker.start()
            if arguments.browser and can_open_browser():
                await asyncio.to_thread(webbrowser.open, url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # The pages that are open hold connections; cutting them off would leave a traceback for each.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    Server(config).run([listener])
