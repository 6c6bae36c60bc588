"""The page in a real browser, served by the real program. Screenshots go to tests/artefacts."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from tiny_models import make_demo
from transplant.digest import Digests
from transplant.hosts.standalone.folders import BUILT_IN

ROOT = Path(__file__).resolve().parents[1]
ARTEFACTS = Path(__file__).resolve().parent / "artefacts"
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
DEMO_BASE = "transplant-demo-z-image"

PATIENCE = 180_000
"""Milliseconds to wait for what must come; on a busy machine the page, and the server behind it, take their time."""

expect.set_options(timeout=PATIENCE)

needs_browser = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="there is no chromium here; install it to run the browser tests"
)


# The program and the browser


class Server:
    """`extension.py serve` in a process of its own."""

    def __init__(self, data: Path, models: Path, *arguments: str) -> None:
        self.data, self.models, self.port = data, models, free_port()
        data.mkdir(parents=True, exist_ok=True)
        models.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "extension.py"), "serve", "--no-browser", "--port", str(self.port)]
        command += ["--data-dir", str(data), "--models-dir", str(models), "--device", "cpu", *arguments]
        self.log = (data / "server.log").open("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment(data), cwd=data)
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while "Transplant runs at" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def options(self) -> dict[str, object]:
        return json.loads((self.data / "config.json").read_text())

    def pictures(self) -> list[Path]:
        return sorted((self.data / "outputs").glob("*/*.png"))

    def stop(self) -> float:
        """End it as Ctrl-C does; the seconds that took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(20)
        self.log.close()
        assert status == 0
        return time.monotonic() - start


def environment(data: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_CACHE": str(data / "hub"), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(data: Path, models: Path, *arguments: str) -> Iterator[Server]:
    server = Server(data, models, *arguments)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a base model of its own: with the demo."""
    folder = tmp_path_factory.mktemp("webui")
    with serving(folder / "data", folder / "models") as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    yield from opened(browser, server)


def opened(browser: Browser, server: Server, **context: object) -> Iterator[Page]:
    """A new page; it must neither log an error nor ask another machine for anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 960}, **context)  # pyright: ignore
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []

    def note(text: str) -> None:
        if not (page in RELOADING and any(aborted in text for aborted in ABORTED)):
            wrong.append(text)

    page.on("pageerror", lambda error: note(str(error)))
    page.on("console", lambda message: note(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if is_foreign(request.url, server.url) else None)
    page.goto(server.url)
    expect(page.locator("#setting_sd_unet input")).to_be_visible(timeout=PATIENCE)  # the server may be importing torch
    yield page
    page.close()
    assert wrong == []


RELOADING: set[Page] = set()
ABORTED = ("AbortError", "Connection errored out")
"""What Gradio's page says of requests that a reload ends."""


def reload(page: Page) -> None:
    RELOADING.add(page)
    page.reload()
    RELOADING.discard(page)


def is_foreign(url: str, home: str) -> bool:
    return not url.startswith((home, "data:", "blob:"))


# What a user does


def choose(page: Page, key: str, name: str) -> None:
    pick(page, f"#setting_{key}", name)


def pick(page: Page, element: str, name: str) -> None:
    """Open a list and click an entry of it.

    The page draws a list anew when the server sends it again, in the midst of this too, which takes the entry away:
    then it is opened once more, as a user would.
    """
    field, entry = page.locator(f"{element} input"), page.get_by_role("option", name=name, exact=True)
    end = time.monotonic() + PATIENCE / 1000
    while True:
        field.click()
        try:
            entry.click(timeout=5_000)
            return
        except PlaywrightError:
            if time.monotonic() > end:
                raise
            field.blur()  # a list opens when its field gets the focus


def chosen(page: Page, key: str, name: str) -> None:
    expect(page.locator(f"#setting_{key} input")).to_have_value(name)


def idle(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until nothing is being done and the status names this."""
    expect(page.locator("#transplant_progress [role=status]")).to_contain_text(text)


def fill(page: Page, element: str, value: int) -> None:
    field = page.locator(f"#{element} input[type=number]")
    field.fill(str(value))
    field.press("Tab")


def draw(page: Page, server: Server, seed: int = 5) -> Image.Image:
    """Generate one picture and return the file that came of it."""
    before = server.pictures()
    end = time.monotonic() + PATIENCE / 1000
    fill(page, "txt2img_seed", seed)
    page.locator("#txt2img_prompt textarea").fill("a lighthouse at dusk")
    page.locator("#txt2img_generate").click()
    while not (new := set(server.pictures()) - set(before)):
        assert time.monotonic() < end, server.output()
        page.wait_for_timeout(50)
    idle(page, DEMO_BASE)
    expect(page.locator("#txt2img_info textarea")).to_have_value(re.compile(f"Seed: {seed}, "))
    return Image.open(new.pop())


def message(page: Page, text: str) -> None:
    expect(page.locator("#transplant_message [role=alert]")).to_contain_text(text)


def screenshot(page: Page, name: str) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"webui-{name}.png")


def settings_tab(page: Page) -> None:
    page.get_by_role("tab", name="Settings").click()
    expect(page.locator("#settings_submit")).to_be_visible()


# Tests


@needs_browser
def test_an_override_changes_the_picture_and_a_wrong_file_changes_nothing(page: Page, server: Server) -> None:
    idle(page, f"{DEMO_BASE} with its own transformer, float32 on cpu")
    own = draw(page, server)
    screenshot(page, "default")

    choose(page, "sd_unet", "demo-outlines-bf16")
    idle(page, "the transformer demo-outlines-bf16")
    chosen(page, "sd_unet", "demo-outlines-bf16")
    other = draw(page, server, seed=5)
    assert own.size == other.size == (128, 128)
    assert own.tobytes() != other.tobytes()
    screenshot(page, "override")

    digest = Digests().short(BUILT_IN / "UNET" / "demo-outlines-bf16.safetensors")
    parameters = other.info["parameters"]
    assert parameters.startswith("a lighthouse at dusk\nSteps: 8, Size: 128x128, Seed: 5, CFG scale: 1, ")
    assert parameters.endswith(f"Model: {DEMO_BASE}, UNET: demo-outlines-bf16, UNET hash: {digest}")
    assert own.info["parameters"].endswith(f"Model: {DEMO_BASE}")

    choose(page, "sd_unet", "demo-flux (FLUX.1)")
    message(page, "holds a transformer of the FLUX.1 family")
    message(page, "demo-outlines-bf16 stays loaded")
    chosen(page, "sd_unet", "demo-outlines-bf16")
    assert server.options()["sd_unet"] == "demo-outlines-bf16"
    screenshot(page, "refused")

    assert draw(page, server, seed=5).tobytes() == other.tobytes()
    expect(page.locator("#transplant_message [role=alert]")).to_be_empty()

    choose(page, "sd_unet", "Default")
    idle(page, "its own transformer")
    assert draw(page, server, seed=5).tobytes() == own.tobytes()


@needs_browser
def test_the_gallery_gives_the_saved_file(page: Page, server: Server) -> None:
    draw(page, server, seed=11)
    image = page.locator("#txt2img_gallery img").first
    expect(image).to_be_visible()
    with urllib.request.urlopen(image.get_attribute("src") or "") as answer:
        assert answer.read() == server.pictures()[-1].read_bytes()
    download = page.locator("#txt2img_gallery").get_by_role("button", name=re.compile("download", re.I))
    expect(download.first).to_be_visible()


@needs_browser
def test_a_generation_shows_its_progress_and_can_be_cancelled(page: Page, server: Server) -> None:
    fill(page, "txt2img_batch_count", 8)
    fill(page, "txt2img_steps", 100)
    page.locator("#txt2img_generate").click()
    progress = page.locator("#transplant_progress")
    expect(progress).to_contain_text(re.compile(r"Picture 1 of 8, step \d+ of 100"))
    expect(progress.get_by_role("progressbar")).to_have_attribute("aria-valuenow", re.compile(r"\d"))
    choose(page, "sd_unet", "demo-pastel-int8-convrot")
    expect(progress).to_contain_text("1 waiting")
    chosen(page, "sd_unet", "demo-pastel-int8-convrot")
    assert server.options()["sd_unet"] == "Default"
    screenshot(page, "progress")
    page.locator("#transplant_cancel_waiting").click()
    chosen(page, "sd_unet", "Default")
    page.locator("#transplant_cancel").click()
    message(page, "cancelled")
    idle(page, "its own transformer")
    expect(page.locator("#transplant_cancel")).to_be_hidden()


@needs_browser
def test_refresh_finds_a_new_file_and_a_second_tab_agrees(page: Page, browser: Browser, server: Server) -> None:
    new = server.models / "UNET" / "sub" / "brand new.safetensors"
    new.parent.mkdir(parents=True)
    shutil.copy(BUILT_IN / "UNET" / "demo-pastel-int8-convrot.safetensors", new)
    page.locator("#setting_sd_unet input").click()
    expect(page.get_by_role("option", name="demo-flux (FLUX.1)")).to_be_visible()
    assert page.get_by_role("option", name="brand new").count() == 0
    page.keyboard.press("Escape")
    page.locator("#refresh_sd_unet").click()
    page.wait_for_timeout(1200)
    choose(page, "sd_unet", "brand new")
    idle(page, "the transformer brand new")
    for second in opened(browser, server):
        chosen(second, "sd_unet", "brand new")
        choose(second, "sd_unet", "Default")
        idle(second, "its own transformer")
    chosen(page, "sd_unet", "Default")


@needs_browser
def test_wrong_parameters_are_refused_where_the_user_looks(page: Page) -> None:
    fill(page, "txt2img_width", 250)
    page.locator("#txt2img_generate").click()
    message(page, "multiple of 16")


@needs_browser
def test_the_log_shows_what_was_done(page: Page, server: Server) -> None:
    draw(page, server, seed=77)
    page.get_by_role("tab", name="Log").click()
    expect(page.locator("#transplant_log textarea")).to_have_value(re.compile("Seed: 77"))
    screenshot(page, "log")


@needs_browser
def test_settings_are_applied_saved_and_there_after_a_restart(browser: Browser, tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_demo.make_demo(models)
    with serving(tmp_path / "data", models) as server:
        for page in opened(browser, server):
            idle(page, DEMO_BASE)
            settings_tab(page)
            assert page.locator("#setting_sd_unet").count() == 1
            choose(page, "cuda_dtype", "bf16")
            quicksettings = page.locator("#setting_quicksettings_list")
            quicksettings.get_by_role("button", name="Remove Base model").or_(
                quicksettings.locator(".token-remove").first
            ).first.click()
            quicksettings.locator("input").click()
            for label in ("Compute dtype", "Base model"):
                page.get_by_role("option", name=label, exact=True).click()
            page.keyboard.press("Escape")
            screenshot(page, "settings")
            page.locator("#settings_submit").click()
            expect(page.locator("#settings_message")).to_contain_text("Saved: Compute dtype, Quicksettings.")
            idle(page, "bfloat16 on cpu")
            screenshot(page, "settings-applied")
            reload(page)
            order(page)
        assert server.options()["quicksettings_list"] == ["sd_unet", "cuda_dtype", "sd_model_checkpoint"]
        assert server.stop() < 8
    with serving(tmp_path / "data", models) as server:
        for page in opened(browser, server, color_scheme="dark"):
            order(page)
            idle(page, "bfloat16 on cpu")
            choose(page, "cuda_dtype", "fp32")
            idle(page, "float32 on cpu")
            draw(page, server)
            screenshot(page, "dark")
            page.set_viewport_size({"width": 390, "height": 844})
            screenshot(page, "narrow")
        assert server.options()["cuda_dtype"] == "fp32"


def order(page: Page) -> None:
    """The row has the three options in this order, and the settings page has them no more."""
    expect(page.locator("#quicksettings [id^=setting_]")).to_have_count(3)
    ids = page.locator("#quicksettings [id^=setting_]").evaluate_all("elements => elements.map(e => e.id)")
    assert ids == ["setting_sd_unet", "setting_cuda_dtype", "setting_sd_model_checkpoint"]
    assert page.locator("#setting_cuda_dtype").count() == 1


# What the server lets in


def refused(data: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "extension.py"), "--no-browser", *arguments]
    result = subprocess.run(command, env=environment(data), cwd=data, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result
    assert "Traceback" not in result.stderr
    return result.stderr


def test_listening_to_others_needs_a_login(tmp_path: Path) -> None:
    assert "--auth user:pass" in refused(tmp_path, "--listen")


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another port" in refused(tmp_path, "--port", str(taken.getsockname()[1]))


def test_a_wrong_call_shows_the_usage(tmp_path: Path) -> None:
    assert "usage:" in refused(tmp_path, "--nonsense")
    assert "no folder" in refused(tmp_path, "--models-dir", str(tmp_path / "nowhere"))


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_other_sites_and_rebound_names_are_kept_out(server: Server) -> None:
    config = f"{server.url}/config"
    assert status(config) == 200
    assert status(config, Host=f"localhost:{server.port}") == 200
    assert status(config, Origin=server.url) == 200
    assert status(config, Host=f"evil.example:{server.port}") == 403
    assert status(config, Origin="http://evil.example") == 403


def test_files_outside_the_outputs_are_not_served(server: Server) -> None:
    ours = (server.data / "config.json", server.data / "cache" / "digests.json", server.models)
    for path in (*ours, ROOT / "extension.py", Path("/etc/passwd")):
        assert status(f"{server.url}/gradio_api/file={path}") in (403, 404)
    for path in ("redoc", "gradio_api/docs"):
        assert status(f"{server.url}/{path}") == 404


@needs_browser
def test_with_listen_a_login_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "data", tmp_path / "models", "--listen", "--auth", "me:secret") as server:
        assert status(f"{server.url}/config") == 401
        assert status(f"{server.url}/gradio_api/info") == 401
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_label("username").fill("me")
        page.get_by_label("password").fill("wrong")
        page.get_by_role("button", name="Login").click()
        expect(page.get_by_text("Incorrect")).to_be_visible()
        screenshot(page, "login")
        page.get_by_label("username").fill("me")  # a failed login empties it
        page.get_by_label("password").fill("secret")
        page.get_by_role("button", name="Login").click()
        expect(page.locator("#setting_sd_unet input")).to_be_visible(timeout=PATIENCE)
        page.close()


@needs_browser
def test_fp8_storage_says_what_it_will_do(
    browser: Browser, page: Page, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that cannot, its box is out of use and says why; where it can, the sizes stand beside it."""
    settings_tab(page)
    box = page.locator("#setting_fp8_storage")
    expect(box).to_contain_text("needs CUDA or XPU, the models run on cpu")
    expect(box.locator("input")).to_be_disabled()

    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")
    shown = ["sd_model_checkpoint", "sd_unet", "fp8_storage"]
    (tmp_path / "config.json").write_text(json.dumps({"quicksettings_list": shown, "cuda_dtype": "bf16"}))
    with serving(tmp_path, tmp_path / "models") as able:
        opener = opened(browser, able)
        top = next(opener)
        idle(top, f"{DEMO_BASE} with its own transformer, bfloat16 on cpu")
        box = top.locator("#setting_fp8_storage")
        expect(box).to_contain_text(re.compile(r"7\.\d\d MB → 4\.\d\d MB"))
        box.locator("input").click()
        expect(box).to_contain_text(re.compile(r"4\.\d\d MB instead of 7\.\d\d MB"))
        assert able.options()["fp8_storage"] is True
        assert "FP8 storage for transformer of" in able.output()
        screenshot(top, "fp8-storage")
        next(opener, None)
