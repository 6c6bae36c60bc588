"""Makes the README's pictures from the running program: `python docs/make_screenshots.py`. Needs Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Error, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PORT = 7899
FILES = ("demo-outlines-bf16", "demo-pastel-int8-convrot", "demo-pencil-fp8-bundle")
PROMPT = "a big yellow square left of a blue star on pink"


@contextmanager
def served() -> Iterator[str]:
    """The program on its built-in base model, in a folder of its own."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, str(ROOT / "extension.py"), "serve", "--no-browser", "--port", str(PORT)]
        server = subprocess.Popen([*command, "--data-dir", data], env={**os.environ, "HF_HUB_CACHE": f"{data}/hub"})
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            server.terminate()
            server.wait(20)


def main() -> None:
    """Take all of them."""
    IMAGES.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        _open(page, url)
        generate(page)
        compare(page)
        inspect(page)
        browser.close()


def generate(page: Page) -> None:
    """A picture drawn with a file."""
    _choose(page, "#setting_sd_unet", FILES[0])
    _idle(page, FILES[0])
    page.locator("#txt2img_prompt textarea").fill(PROMPT)
    page.locator("#txt2img_generate").click()
    expect(page.locator("#txt2img_gallery img").first).to_be_visible(timeout=60_000)
    _idle(page, FILES[0])
    _shoot(page, "generate")


def compare(page: Page) -> None:
    """Three files beside the base model's own transformer."""
    page.get_by_role("tab", name="Compare", exact=True).click()
    page.locator("#compare_files input").click()
    for name in FILES:
        page.get_by_role("option", name=name, exact=True).click()
    page.keyboard.press("Escape")
    page.locator("#compare_prompts textarea").fill(PROMPT)
    page.locator("#compare_start").click()
    expect(page.locator("#compare_result img")).to_be_visible(timeout=120_000)
    _idle(page, FILES[0])
    _shoot(page, "compare")


def inspect(page: Page) -> None:
    """What a file is."""
    page.get_by_role("tab", name="Inspect", exact=True).click()
    _choose(page, "#inspect_file", FILES[0])
    expect(page.locator("#inspect_report")).to_contain_text("free now", timeout=60_000)
    _shoot(page, "inspect")


def _open(page: Page, url: str) -> None:
    for _ in range(120):
        try:
            page.goto(url)
            break
        except Error:  # not up yet
            time.sleep(0.5)
    _idle(page, "its own transformer")


def _choose(page: Page, control: str, name: str) -> None:
    page.locator(f"{control} input").click()
    page.get_by_role("option", name=name, exact=True).click()


def _idle(page: Page, text: str) -> None:
    expect(page.locator("#transplant_progress [role=status]")).to_contain_text(text, timeout=120_000)


def _shoot(page: Page, name: str) -> None:
    page.mouse.move(0, 0)
    page.wait_for_timeout(700)
    page.screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
