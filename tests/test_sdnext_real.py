"""In a real SD.Next, over its API and in a browser. Opt-in: see sdnext_real.py. Its Python must be of our version.

What is compared with the standalone product's pictures is drawn with the host's options that stand in OPTIONS;
docs/sdnext.md tells why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from sdnext_models import BASES, lay_out
from sdnext_real import RealHost, needs_host, running
from test_webui import ARTEFACTS, CHROMIUM, needs_browser

pytestmark = [needs_host, pytest.mark.timeout(1800)]

OPTIONS = {
    "samples_format": "png",  # else the API answers with JPEG
    "prompt_attention": "fixed",  # else prompts of FLUX.1 and Stable Diffusion go through the host's own parser
    "te_shared_te": False,  # else text encoders come from other repositories than the base model
    "diffusers_vae_tiling": False,  # on where there is little GPU memory
    "model_wan_stage": "combined",  # else one of Wan 2.2's transformers is loaded
    "sdnq_dequantize_compile": False,  # takes a minute for each kind of layer
    "quicksettings_list": ["sd_model_checkpoint", "sd_unet"],
}
REQUEST = {"width": 64, "height": 64, "steps": 2, "seed": 3, "sampler_name": "Default"}
GUIDANCE = {"z-image": 1.0, "klein": 1.0, "wan": 3.0, "flux": 3.5, "flux-wide": 3.5, "sdxl": 5.0}
COMPARED = ("z-image", "klein", "wan", "sdxl")
"""What is compared with the standalone product; for FLUX.1 the host makes a T5 of random numbers."""
DUAL = ("Default+float", "fp8-scaled+fp8-scaled", "nvfp4+int8-convrot", "gguf+float")
FP8 = "z-image float in fp8"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sdnext") / "data" / "models"
    lay_out(folder)
    yield folder
    shutil.rmtree(folder)  # 8 GB


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[RealHost]:
    """A host with the extension; its log must hold no fault of ours in the end."""
    with running(models.parent, settings=OPTIONS) as host:
        yield host
    assert "the host goes on by itself" not in host.output() and "Transplant is off" not in host.output()


def title(stem: str) -> str:
    return f"Diffusers/{BASES[stem].name}"


def entry(stem: str, form: str) -> str:
    """What the host's list calls a file."""
    return form if form == "Default" else f"{stem}-{form}" + (".gguf" if form == "gguf" else "")


def forms(stem: str) -> tuple[str, ...]:
    """What each slot of a base model is tried with: `primary` or `primary+secondary`."""
    return ("Default", "float", *BASES[stem].forms, *(DUAL if stem == "wan" else ()))


def base(host: RealHost, stem: str) -> None:
    """Have a base model loaded with its own transformers."""
    host.set(sd_model_checkpoint=title(stem))
    host.set(sd_unet="Default", sd_unet_secondary="Default")


def take(host: RealHost, stem: str, form: str) -> None:
    """Choose files by `primary` or `primary+secondary`."""
    first, _, second = form.partition("+")
    host.set(sd_unet=entry(stem, first))
    host.set(sd_unet_secondary=entry(f"{stem}-2", second or "Default"))
    slots = host.slots()
    loaded = slots["sd_unet"]["loaded"] or "Default"  # nothing is known of a UNet that the host loads by itself
    assert loaded == entry(stem, first), slots
    assert not second or slots["sd_unet_secondary"]["loaded"] == entry(f"{stem}-2", second), slots


def drawn(host: RealHost, stem: str) -> np.ndarray:
    return host.draw("a red circle", cfg_scale=GUIDANCE[stem], **REQUEST)


# Pictures


@pytest.fixture(scope="module")
def standalone(models: Path) -> dict[str, np.ndarray]:
    """The standalone product's pictures by `STEM FORM`."""
    requests: dict[str, Any] = {}
    for stem in COMPARED:
        folder = models / "Diffusers" / BASES[stem].name.replace("/", "--")
        if BASES[stem].is_hub:
            (folder,) = models.glob(f"huggingface/models--{folder.name}/snapshots/*")
        for form in forms(stem):
            first, _, second = form.partition("+")
            chosen = [file_of(models, stem, first), *([file_of(models, f"{stem}-2", second)] if stem == "wan" else [])]
            requests[f"{stem} {form}"] = (str(folder), chosen, GUIDANCE[stem], False)
    requests[FP8] = (*requests["z-image float"][:3], True)
    out = models.parent / "standalone.npz"
    command = [os.environ.get("SDNEXT_PYTHON", sys.executable), str(Path(__file__).with_name("sdnext_reference.py"))]
    subprocess.run(
        [*command, sysconfig.get_path("purelib"), str(out)], input=json.dumps(requests), text=True, check=True,
        timeout=900, env={**os.environ, "TRANSPLANT_FP8_ON_CPU": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return dict(np.load(out))


def file_of(models: Path, stem: str, form: str) -> str | None:
    suffix = ".gguf" if form == "gguf" else ".safetensors"
    return None if form in ("", "Default") else str(models / "UNET" / f"{stem}-{form}{suffix}")


@pytest.mark.parametrize("stem", COMPARED)
def test_pictures_are_the_standalone_products_to_the_bit(
    stem: str, host: RealHost, standalone: dict[str, np.ndarray]
) -> None:
    base(host, stem)
    seen: dict[str, np.ndarray] = {}
    for form in forms(stem):
        take(host, stem, form)
        seen[form] = drawn(host, stem)
        assert np.array_equal(seen[form], standalone[f"{stem} {form}"]), form
    assert len({picture.tobytes() for picture in seen.values()}) == len(seen)


@pytest.mark.parametrize("stem", BASES)
def test_quantized_files_draw_what_their_layers_are_worth_in_floats(stem: str, host: RealHost) -> None:
    base(host, stem)
    own = drawn(host, stem)
    for form in BASES[stem].forms:
        take(host, stem, form)
        picture = drawn(host, stem)
        take(host, stem, f"{form}-worth")
        assert np.array_equal(picture, drawn(host, stem)), form
        assert not np.array_equal(picture, own), form


def test_a_float_file_rests_in_float8_where_that_is_asked_for(
    host: RealHost, standalone: dict[str, np.ndarray]
) -> None:
    base(host, "z-image")
    host.set(fp8_storage=True)
    try:
        take(host, "z-image", "float")
        assert np.array_equal(drawn(host, "z-image"), standalone[FP8])
        assert not np.array_equal(standalone["z-image float"], standalone[FP8])
    finally:
        host.set(fp8_storage=False)


# What goes wrong in the host by itself


def test_a_gguf_file_is_what_draws(host: RealHost) -> None:
    base(host, "z-image")
    own = drawn(host, "z-image")
    take(host, "z-image", "gguf")
    assert not np.array_equal(drawn(host, "z-image"), own)


def test_a_file_of_bare_keys_loads_as_often_as_it_is_chosen(host: RealHost) -> None:
    base(host, "klein")
    pictures = []
    for _ in range(3):
        take(host, "klein", "float")
        pictures.append(drawn(host, "klein"))
        take(host, "klein", "Default")
    assert len({picture.tobytes() for picture in pictures}) == 1


def test_a_file_in_diffusers_names_is_the_same_as_in_the_published_ones(host: RealHost) -> None:
    base(host, "klein")
    take(host, "klein", "float")
    published = drawn(host, "klein")
    take(host, "klein", "diffusers")
    assert np.array_equal(drawn(host, "klein"), published)


def test_a_refused_file_costs_nothing_and_is_taken_once_repaired(host: RealHost) -> None:
    base(host, "z-image")
    take(host, "z-image", "float")
    before = drawn(host, "z-image")
    for name, why in (("klein-float", "FLUX.2"), ("broken", "web page"), ("wan-gguf.gguf", "Wan")):
        host.set(sd_unet=name)
        slot = host.slots()["sd_unet"]
        assert (slot["selected"], slot["loaded"]) == ("z-image-float", "z-image-float")
        assert why in slot["refused"] and "stays loaded" in slot["refused"]
        assert host.option("sd_unet") == "z-image-float"
    assert np.array_equal(drawn(host, "z-image"), before)
    broken = host.data / "models" / "UNET" / "broken.safetensors"
    page = broken.read_bytes()
    broken.write_bytes((broken.parent / "z-image-float.safetensors").read_bytes())
    try:
        host.set(sd_unet="Default")
        host.set(sd_unet="broken")
        assert np.array_equal(drawn(host, "z-image"), before)
    finally:
        host.set(sd_unet="Default")
        broken.write_bytes(page)


def test_a_requests_own_file_draws_for_it_alone(host: RealHost) -> None:
    base(host, "z-image")
    own = drawn(host, "z-image")
    override = {"sd_unet": "z-image-float"}
    once = host.draw("a red circle", cfg_scale=GUIDANCE["z-image"], override_settings=override, **REQUEST)
    assert np.array_equal(drawn(host, "z-image"), own)
    take(host, "z-image", "float")
    assert np.array_equal(drawn(host, "z-image"), once) and not np.array_equal(once, own)


def test_another_file_loads_nothing_but_itself(host: RealHost) -> None:
    base(host, "z-image")
    before = len(host.output())
    take(host, "z-image", "float")
    told = host.output()[before:]
    assert "is in place of the transformer" in told and "Load model: text_encoder" not in told


# In a browser


@needs_browser
def test_a_file_is_chosen_in_the_dropdown_and_a_refusal_stands_over_the_page(host: RealHost) -> None:
    base(host, "z-image")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(400_000)
        page.goto(host.url)
        field = page.locator("#setting_sd_unet input")
        field.wait_for()
        until(page, lambda: "UI: ready" in host.output(), 400)  # a page still at work loses its first events
        own = drawn(host, "z-image")
        field.click()
        page.locator('#setting_sd_unet li[data-value="z-image-float"]').click()
        expect(page.locator("#setting_sd_unet .wrap.hide").first).to_be_attached(timeout=60_000)
        until(page, lambda: host.slots()["sd_unet"]["loaded"] == "z-image-float")
        chosen = drawn(host, "z-image")
        assert not np.array_equal(chosen, own)
        field.click()
        page.locator('#setting_sd_unet li[data-value="klein-float"]').click()
        expect(page.locator("#transplant_over")).to_contain_text("FLUX.2", timeout=60_000)
        expect(field).to_have_value("z-image-float", timeout=60_000)
        ARTEFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTEFACTS / "sdnext-refusal.png")
        assert np.array_equal(drawn(host, "z-image"), chosen)
        browser.close()


def until(page: Page, holds: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for something outside the page."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        page.wait_for_timeout(500)
