"""The tabs that live in SD.Next too, under its gradio 3.43.2: in an environment of its own and in a browser.

The environment lies in cache/, is made in a minute where it is not there, and has no torch: that is this one's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from test_sdnext import ROOT, make_host
from test_webui import ARTEFACTS, CHROMIUM, free_port, needs_browser
from tiny_models import random_z_image, save, tiny_z_image_config, to_comfyui

PINS = (
    "numpy==2.1.2", "pandas==2.3.1", "fastapi==0.124.4", "pydantic==2.13.4", "Pillow==12.2.0", "httpx==0.28.1",
    "huggingface_hub", "websockets<12", "requests", "aiofiles", "ffmpy", "pydub", "uvicorn", "semantic-version",
    "altair", "python-multipart", "matplotlib", "importlib-resources", "jinja2", "markupsafe", "orjson", "pyyaml",
    "typing-extensions",
)  # fmt: skip
GRADIO = ("gradio==3.43.2", "gradio-client==0.5.0")
"""Without what they say they need: they ask for an older numpy, and SD.Next installs them so too."""

pytestmark = [needs_browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python that has gradio 3.43.2; skipped where it cannot be installed."""
    name = f"gradio-3.43.2-python-{sys.version_info.major}.{sys.version_info.minor}"
    folder = ROOT / "cache" / name
    found = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder)
        for packages in (("--no-deps", *GRADIO), PINS):
            pip = [sys.executable, "-m", "pip", "--python", str(found), "install", "--quiet", "--no-compile",
                   "--disable-pip-version-check", *packages]  # fmt: skip
            done = subprocess.run(pip, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                assert "CI" not in os.environ, done.stderr
                pytest.skip(f"gradio 3.43.2 cannot be installed here: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return found


@pytest.fixture(scope="module")
def page(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Our tab, open in a browser; nothing may go wrong on the page."""
    host = make_host(tmp_path_factory.mktemp("gradio3") / "host")
    shutil.rmtree(host / "gradio")
    network = random_z_image(tiny_z_image_config(dim=48), seed=3)
    save(host / "models" / "UNET" / "a-file.safetensors", to_comfyui(network.state_dict()))
    (host / "models" / "UNET" / "broken.safetensors").write_text("<!DOCTYPE html>")
    port = free_port()
    command = [str(python), str(ROOT / "tests" / "gradio3_page.py"), sysconfig.get_path("purelib"), str(port)]
    paths = os.pathsep.join(str(ROOT / name) for name in ("tests", "demo"))
    environment = {**os.environ, "TEST_PATHS": paths, "GRADIO_ANALYTICS_ENABLED": "False"}
    environment.pop("PYTHONPATH", None)
    with (host / "output.txt").open("w") as output:
        server = subprocess.Popen(command, cwd=host, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, server, host / "output.txt")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page()
            wrong: list[str] = []
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.add_init_script("window.onUiLoaded = () => {};")  # so a script knows the host
            page.goto(url)
            page.add_script_tag(path=ROOT / "javascript" / "transplant_host.js")
            page.locator(".tab-nav button", has_text="Transplant").click()
            yield page
            assert wrong == []
            browser.close()
    finally:
        server.kill()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], output: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(output.read_text())


def choose(page: Page, name: str, element: str = "inspect_file") -> None:
    page.locator(f"#{element} input").click()
    page.locator(f'#{element} li[data-value="{name}"]').click()


def test_the_tab_tells_what_a_file_is(page: Page) -> None:
    expect(page.locator("#inspect_report").first).to_contain_text("Choose a file")
    choose(page, "a-file")
    expect(page.locator("#inspect_report").first).to_contain_text("Z-Image")
    expect(page.locator("#inspect_report .tp-map")).not_to_have_count(0)
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "gradio-3-inspect.png")


def test_the_tab_tells_why_a_file_is_refused(page: Page) -> None:
    choose(page, "broken")
    expect(page.locator("#inspect_report .tp-error")).to_contain_text("web page")


def test_the_list_is_read_again(page: Page) -> None:
    page.locator("#transplant_refresh").click()
    page.locator("#inspect_file input").click()
    expect(page.locator("#inspect_file")).to_contain_text("a-file")


def test_a_refusal_stays_over_the_page_when_the_dropdown_goes_back(page: Page) -> None:
    page.locator(".tab-nav button", has_text="Text").click()
    choose(page, "other", "setting_sd_unet")
    expect(page.locator("#setting_sd_unet input")).to_have_value("Default")
    page.wait_for_timeout(1000)
    expect(page.locator("#transplant_over[role=alert]")).to_contain_text("other: is refused.")
    expect(page.locator(".toast-body:visible")).to_have_count(0)
    page.locator("#transplant_over button").click()
    expect(page.locator("#transplant_over")).to_have_count(0)
