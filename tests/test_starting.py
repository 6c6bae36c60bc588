"""What a picture begins with, and which numbers it takes: on the page, over HTTP and on the command line alike."""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path

import diffusers
import pytest

from test_plan import base_folder
from tiny_models import make_demo
from transplant import cli, pipeline
from transplant.architectures import SPECS
from transplant.digest import Digests
from transplant.errors import OptionError
from transplant.hosts.standalone.folders import BUILT_IN, Catalog
from transplant.hosts.standalone.generate_tab import slider
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.models import BASE
from transplant.hosts.standalone.settings import Settings
from transplant.hosts.standalone.starting import PROMPT, Start, architecture_of, start_for
from transplant.hosts.standalone.worker import Worker
from transplant.request import LIMITS, make_request

PICTURES = {spec.name: spec.picture for spec in SPECS}
DEMO = BUILT_IN / "Diffusers" / "transplant-demo-z-image"


@pytest.mark.parametrize(
    ("architecture", "pipeline"),
    [
        ("AuraFlow", "AuraFlowPipeline"), ("Cosmos Predict 2", "Cosmos2TextToImagePipeline"),
        ("ERNIE-Image", "ErnieImagePipeline"), ("HunyuanVideo", "HunyuanVideoPipeline"),
        ("Ideogram 4", "Ideogram4Pipeline"), ("Krea 2", "Krea2Pipeline"), ("LTX-2", "LTX2Pipeline"),
        ("LTX-Video", "LTXPipeline"), ("Sana", "SanaPipeline"), ("Wan", "WanPipeline"),
        ("Wan Animate", "WanAnimatePipeline"), ("Wan VACE", "WanVACEPipeline"),
    ],
)  # fmt: skip
def test_a_picture_is_as_large_as_its_pipeline_makes_it(architecture: str, pipeline: str) -> None:
    told = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    assert PICTURES[architecture] == (told["width"].default, told["height"].default)


@pytest.mark.parametrize(
    ("architecture", "pipeline"),
    [
        ("FLUX.1", "FluxPipeline"), ("FLUX.2", "Flux2Pipeline"), ("Chroma", "ChromaPipeline"),
        ("HiDream", "HiDreamImagePipeline"), ("Qwen-Image", "QwenImagePipeline"),
    ],
)  # fmt: skip
def test_a_picture_is_as_large_as_its_pipeline_says_in_latents(architecture: str, pipeline: str) -> None:
    """Of eight pixels each."""
    assert "self.default_sample_size = 128\n" in inspect.getsource(getattr(diffusers, pipeline).__init__)
    assert PICTURES[architecture] == (128 * 8, 128 * 8)


def test_sizes_are_multiples_that_can_be_asked_for() -> None:
    assert PICTURES["Stable Diffusion"] == (512, 512)
    assert PICTURES["SDXL"] == PICTURES["Stable Diffusion 3"] == PICTURES["Z-Image"] == (1024, 1024)
    for width, height in PICTURES.values():
        make_request("", "", 1, 1, width, height, 0, 1)


@pytest.mark.parametrize(
    ("cls", "pipeline", "architecture", "size"),
    [
        ("ZImageTransformer2DModel", "ZImagePipeline", "Z-Image", (1024, 1024)),
        ("WanTransformer3DModel", "WanPipeline", "Wan", (832, 480)),
        ("SomethingNew2DModel", "SomethingNewPipeline", "SomethingNew2DModel", (1024, 1024)),
    ],
)
def test_what_a_picture_begins_with(
    cls: str, pipeline: str, architecture: str, size: tuple[int, int], tmp_path: Path
) -> None:
    base = base_folder(tmp_path, {}, cls, pipeline)
    assert architecture_of(base) == architecture
    assert start_for(base, on_cpu=False) == Start("", *size)
    assert start_for(base, on_cpu=True) == Start("", 256, 256)


def test_without_a_base_model_or_with_the_built_in_one() -> None:
    for on_cpu in (True, False):
        assert start_for(None, on_cpu) == Start("", 256, 256)
        assert start_for(DEMO, on_cpu) == Start(PROMPT, 128, 128)


def test_a_base_model_that_cannot_be_read_has_no_architecture(tmp_path: Path) -> None:
    assert architecture_of(tmp_path) == ""
    assert start_for(tmp_path, on_cpu=False) == Start("", 1024, 1024)


def test_the_built_in_base_model_keeps_its_start_when_others_come(demo: Path, tmp_path: Path) -> None:
    """It is still loaded, and no list has it any more; a base model that is chosen since begins as its own kind."""
    (tmp_path / "config.json").write_text(json.dumps({"transplant_hub_cache": False}))
    pictures = PictureStore(tmp_path / "outputs")
    catalog = Catalog(tmp_path / "models", demo)
    worker = Worker(Settings(tmp_path / "config.json"), catalog, pictures, Digests(), "cpu")
    worker.start()
    while worker.holding is None:
        time.sleep(0.05)
    assert worker.starting() == Start(PROMPT, 128, 128)
    for name in ("own", "other"):
        base_folder(tmp_path / "models" / "Diffusers" / name, {})
    worker.refresh("me")
    assert sorted(catalog.bases) == ["other", "own"]
    assert worker.starting() == Start(PROMPT, 128, 128)
    worker.set_options("me", {"transplant_load_at_once": False, BASE: "own"})
    assert worker.starting() == Start("", 256, 256)
    assert worker.stop()
    pictures.close()


@pytest.mark.parametrize("name", ["steps", "guidance", "width", "height", "frames"])
def test_the_limits_are_the_same_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    limit = LIMITS[name]
    control = slider(name, limit.least, "x")
    assert (control.minimum, control.maximum) == (limit.least, limit.most)
    fine = {"steps": 1, "guidance": 1, "width": 64, "height": 64, "frames": 1}
    for value, is_good in (
        (limit.least, True), (limit.most, True), (limit.least - 1, False), (limit.most + 1, False),
        (limit.least + 1, limit.multiple < 2),
    ):  # fmt: skip
        asked = {**fine, name: value}
        try:
            make_request(
                "", "", asked["steps"], asked["guidance"], asked["width"], asked["height"], 0, 1, None, asked["frames"]
            )
            told = ""
        except OptionError as error:
            told = str(error)
        assert (told == "") == is_good, value
        status = cli.main(["generate", "--base", "no-such-base", f"--{name}={value}"])
        refused = capsys.readouterr().err
        assert status == 1
        assert (f"--{name}: {value} is not {limit}" in refused) != is_good, value


def test_the_command_line_draws_what_a_new_page_would(tmp_path: Path) -> None:
    from PIL import Image

    out = tmp_path / "x.png"
    assert cli.main(["generate", "--base", str(DEMO), "--steps", "1", "--device", "cpu", "-o", str(out)]) == 0
    infotext = Image.open(out).info["parameters"]
    assert infotext.startswith(PROMPT) and "Size: 128x128" in infotext


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_demo.make_demo(folder)
    return folder


@pytest.mark.parametrize("others", ["mark", "hide", "show"])
def test_files_for_other_base_models_are_marked_before_the_base_model_is_loaded(
    others: str, demo: Path, tmp_path: Path
) -> None:
    """In the slots as the option says, in the Inspect tab's list never left out."""
    (tmp_path / "config.json").write_text(
        json.dumps({BASE: Path(make_demo.BASE).name, "transplant_other_files": others, "transplant_hub_cache": False})
    )
    pictures = PictureStore(tmp_path / "outputs")
    worker = Worker(Settings(tmp_path / "config.json"), Catalog(demo, tmp_path), pictures, Digests(), "cpu")
    worker.catalog.described()
    assert worker.holding is None and worker.architecture() == "Z-Image"
    own, flux = ("demo-comfyui-bf16", "demo-comfyui-bf16"), ("demo-flux (FLUX.1)", "demo-flux")
    wanted = {"mark": flux, "hide": None, "show": ("demo-flux", "demo-flux")}[others]
    choices = worker.file_choices("Default")
    assert own in choices and ("None (same as Default)", "None") in choices
    assert [entry for entry in choices if entry[1] == "demo-flux"] == ([wanted] if wanted else [])
    listed = worker.listed_files()
    assert own in listed and (wanted or flux) in listed
    assert len(listed) == len(worker.catalog.overrides)
    pictures.close()


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (
            ["--prompt", "x", "--width", "130"],
            1,
            "--width: 130 is not a whole number from 64 to 4096, a multiple of 16",
        ),
        ([], 1, "--prompt: say what to draw"),
        (["--prompt", "x", "--unet", make_demo.FLUX], 2, "FLUX.1"),
        (["--prompt", "x", "--unet", "broken.safetensors"], 2, "web page"),
        (["--prompt", "x", "--unet", "gone.safetensors"], 1, "there is no file"),
    ],
    ids=["width", "no prompt", "another architecture", "broken", "missing"],
)
def test_what_cannot_be_drawn_is_said_before_the_base_model_is_loaded(
    arguments: list[str], status: int, told: str, demo: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def load_base(*_: object) -> None:
        pytest.fail("the base model is loaded")

    monkeypatch.setattr(pipeline.Session, "load_base", load_base)
    monkeypatch.chdir(demo)
    (demo / "broken.safetensors").write_bytes(b"<!DOCTYPE html>")
    call = ["generate", "--base", str(demo / make_demo.BASE), "-o", str(tmp_path / "x.png"), "--device", "cpu"]
    assert cli.main([*call, *arguments]) == status
    assert told in capsys.readouterr().err
