"""A real SD.Next in a process of its own: SDNEXT_FOLDER is its checkout, SDNEXT_PYTHON the Python it runs in.

Everything it writes goes into the data folder that it is given; the checkout stays as it is.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from test_webui import free_port

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"offline_mode": True, "sd_checkpoint_autoload": False, "theme_type": "Standard"}

needs_host = pytest.mark.skipif("SDNEXT_FOLDER" not in os.environ, reason="SDNEXT_FOLDER names no checkout of SD.Next")


class RealHost:
    """SD.Next over HTTP.

    Attributes:
        data: its data folder; models are in `models`.
        url: where it answers.
    """

    def __init__(self, data: Path, with_us: bool = True, settings: Mapping[str, Any] = {}) -> None:
        self.data, self.port = data, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (data / "extensions").mkdir(parents=True, exist_ok=True)
        link = data / "extensions" / "transplant"
        if with_us and not link.exists():
            link.symlink_to(ROOT)
        elif not with_us and link.exists():
            link.unlink()
        (data / "config.json").write_text(json.dumps({**SETTINGS, **settings}))
        self.console = (data / "console.txt").open("w")
        self.process = subprocess.Popen(
            [
                os.environ.get("SDNEXT_PYTHON", sys.executable), "launch.py", "--skip-all", "--skip-git", "--skip-env",
                "--use-cpu", "all", "--insecure", "--server-name", "127.0.0.1", "--port", str(self.port),
                "--data-dir", str(data), "--models-dir", str(data / "models"),
                "--extensions-dir", str(data / "extensions"), "--log", str(data / "log.txt"), "--debug",
            ],
            cwd=os.environ["SDNEXT_FOLDER"], env=self._environment(), stdout=self.console, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        """One thread: on a busy machine two wait for each other many times as long as they compute."""
        more = {
            "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(self.data / "models" / "huggingface"),
            "SDNQ_USE_TORCH_COMPILE": "0", "TRANSPLANT_FP8_ON_CPU": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return {key: value for key, value in {**os.environ, **more}.items() if key != "PYTHONPATH"}

    def wait(self, path: str = "/sdapi/v1/options", seconds: float = 500) -> Any:
        """What it answers once it runs."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                return self.get(path)
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"the host does not answer:\n{self.output()[-3000:]}")

    def get(self, path: str) -> Any:
        """GET, as JSON."""
        with urllib.request.urlopen(self.url + path, timeout=300) as answer:
            return json.load(answer)

    def post(self, path: str, **values: Any) -> Any:
        """POST, as JSON."""
        body = json.dumps(values).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=500) as answer:
            return json.load(answer)

    def set(self, **values: Any) -> None:
        """Set options; what they load is loaded when this returns."""
        self.post("/sdapi/v1/options", **values)

    def option(self, key: str) -> Any:
        """The value of an option; None where none was ever set."""
        return self.get("/sdapi/v1/options").get(key)

    def slots(self) -> dict[str, dict[str, Any]]:
        """What our route says of the slots, by option."""
        return {slot["option"]: slot for slot in self.get("/transplant/v1/slots")}

    def draw(self, prompt: str, **more: Any) -> np.ndarray:
        """The picture of a request, as (height, width, 3) bytes."""
        answer = self.post("/sdapi/v1/txt2img", prompt=prompt, save_images=False, **more)
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))).convert("RGB"))

    def output(self) -> str:
        """Its log so far, with what else it printed."""
        log = self.data / "log.txt"
        told = log.read_text("utf-8", errors="replace") if log.is_file() else ""
        return told + (self.data / "console.txt").read_text("utf-8", errors="replace")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.console.close()


@contextmanager
def running(data: Path, **more: Any) -> Iterator[RealHost]:
    """A host that answers."""
    host = RealHost(data, **more)
    try:
        host.wait()
        yield host
    finally:
        host.stop()


def put_in_cache(folder: Path, repo_id: str, models: Path) -> None:
    """Lay a diffusers folder into the caches where the host looks for a hub repository; it is moved, not copied."""
    name = f"models--{repo_id.replace('/', '--')}"
    snapshot = models / "huggingface" / name / "snapshots" / f"{abs(hash(name)) % 16**12:012x}".rjust(40, "a")
    snapshot.parent.mkdir(parents=True)
    shutil.move(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    (snapshot.parents[1] / "blobs").mkdir()
    (models / "Diffusers").mkdir(exist_ok=True)
    (models / "Diffusers" / name).symlink_to(snapshot.parents[1])
