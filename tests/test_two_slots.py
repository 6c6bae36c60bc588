"""Both slots in the standalone host, on a tiny Wan 2.2; lazy choices, and settings for one job alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

from test_standalone import ME, Studio
from tiny_models import make_demo, save, tiny_base
from tiny_pipelines import filled, network, wan
from transplant.digest import Digests
from transplant.errors import OptionError
from transplant.hosts.standalone import controls, quicksettings
from transplant.hosts.standalone.folders import Catalog
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.jobs import Job
from transplant.hosts.standalone.log_panel import LogLines
from transplant.hosts.standalone.server import LOCAL, Arguments, application
from transplant.hosts.standalone.settings import Settings
from transplant.hosts.standalone.worker import Worker
from transplant.options import option
from transplant.request import make_request

BASE, UNET, SECOND = "sd_model_checkpoint", "sd_unet", "sd_unet_secondary"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan with two transformers, a Z-Image with one, and files for each."""
    folder = tmp_path_factory.mktemp("models")
    wan().save_pretrained(str(folder / "Diffusers" / "two"))
    wan().save_pretrained(str(folder / "Diffusers" / "two too"))
    tiny_base(folder / "Diffusers" / "one")
    for name, seed in (("a", 11), ("b", 12)):
        save(folder / "UNET" / f"{name}.safetensors", filled(network("WanTransformer3DModel"), seed).state_dict())
    make_demo.make_demo(folder / "demo")
    (folder / "demo" / make_demo.COMFYUI).rename(folder / "UNET" / "z.safetensors")
    return folder


@pytest.fixture
def studio(models: Path, tmp_path: Path) -> Iterator[Studio]:
    studio = Studio(models, tmp_path, **{BASE: "two"})
    studio.settle()
    yield studio
    studio.close()


def draw(studio: Studio, settings: dict[str, Any] | None = None, **changes: Any) -> Job:
    form: dict[str, Any] = {
        "prompt": "a red circle", "negative": "", "steps": 3, "guidance": 1, "width": 64, "height": 64, "seed": 1,
        "batch": 1, **changes,
    }  # fmt: skip
    job = studio.worker.generate(ME, make_request(**form), settings)
    assert job.wait(60)
    return job


def pixels(job: Job) -> bytes:
    assert job.status == "finished", job.notice
    return Image.open(job.pictures[0].path).tobytes()


def held(studio: Studio) -> tuple[str, ...]:
    holding = studio.worker.holding
    assert holding is not None
    return (holding.base, *holding.overrides.values())


def test_more_frames_than_the_model_can_make_are_one_sentence(studio: Studio) -> None:
    """torch fails within the network, with a text that says nothing to a user; it is in the details."""
    job = draw(studio, frames=1000)
    assert job.status == "failed" and job.notice is not None
    told = "WanPipeline: 1,000 frames of 64x64 cannot be drawn: try fewer frames or another size, or another sampler."
    assert job.notice.text == told
    assert "RuntimeError: shape" in job.notice.details


def test_each_slot_is_chosen_drawn_with_and_named_on_its_own(studio: Studio) -> None:
    assert held(studio) == ("two", "Default", "Default")
    assert studio.worker.is_shown(SECOND)
    pictures = {"own": pixels(draw(studio))}
    studio.set(sd_unet_secondary="b")
    assert held(studio) == ("two", "Default", "b")
    job = draw(studio)
    pictures["second"] = pixels(job)
    assert "UNET secondary: b, UNET secondary hash: " in job.pictures[0].infotext
    assert "UNET: " not in job.pictures[0].infotext
    studio.set(sd_unet="a")
    pictures["both"] = pixels(draw(studio))
    studio.set(sd_unet="b", sd_unet_secondary="a")
    assert held(studio) == ("two", "b", "a")
    pictures["swapped"] = pixels(draw(studio))
    studio.set(sd_unet_secondary="b")
    job = draw(studio)
    pictures["the same twice"] = pixels(job)
    assert all(text in job.pictures[0].infotext for text in ("UNET: b, UNET hash: ", "UNET secondary: b, "))
    studio.set(sd_unet_secondary="None")  # SD.Next's other word for Default
    pictures["first"] = pixels(draw(studio))
    assert held(studio) == ("two", "b", "Default")
    assert len(set(pictures.values())) == 6
    studio.set(sd_unet="Default")
    assert pixels(draw(studio)) == pictures["own"]


def test_a_refusal_in_the_second_slot_leaves_both(studio: Studio) -> None:
    studio.set(sd_unet="a", sd_unet_secondary="b")
    before = pixels(draw(studio))
    notice = studio.set(sd_unet_secondary="z").notice
    assert notice is not None and "Z-Image" in notice.text and "b stays loaded" in notice.text
    assert held(studio) == ("two", "a", "b")
    assert studio.worker.settings.get(SECOND) == "b"
    assert pixels(draw(studio)) == before


def test_a_refusal_beside_a_choice_that_is_applied_says_both(studio: Studio) -> None:
    arguments = Arguments(LOCAL, 7860, None, studio.worker.settings.path.parent, Path(), "cpu", None, False)
    client = TestClient(application(arguments, studio.worker, LogLines()), base_url="http://127.0.0.1:7860")
    for first, second, refused, applied in (("a", "z", SECOND, UNET), ("z", "b", UNET, SECOND)):
        answer = client.post("/sdapi/v1/options", json={UNET: first, SECOND: second})
        assert answer.status_code == 422
        told = answer.json()["detail"]
        assert told.startswith(f"{refused}: ") and "Z-Image" in told and told.endswith(f"loaded. Applied: {applied}.")
    assert held(studio) == ("two", "a", "b")


@pytest.mark.parametrize("second", ["a", "b"])
def test_each_slot_that_another_type_with_two_sets_back_is_named(second: str, studio: Studio) -> None:
    """Also where both hold the same file."""
    studio.set(sd_unet="a", sd_unet_secondary=second)
    held_now = studio.worker.models.holding
    assert held_now is not None
    studio.worker.models.holding = replace(held_now, pipeline="AnotherPipeline")
    notice = studio.set(sd_model_checkpoint="two too").notice
    why = "is not used: two too is another type of model."
    assert notice is not None and notice.text == f"UNET a {why} UNET secondary {second} {why}"
    assert held(studio) == ("two too", "Default", "Default")


def test_another_type_of_model_sets_both_slots_back_and_says_so(studio: Studio) -> None:
    studio.set(sd_unet="a", sd_unet_secondary="b")
    notice = studio.set(sd_model_checkpoint="one").notice
    assert notice is not None and notice.level == "info"
    assert notice.text == (
        "UNET a is not used: one is another type of model. UNET secondary b is not used: one has no second transformer."
    )
    assert held(studio) == ("one", "Default")
    assert not studio.worker.is_shown(SECOND)
    stored = json.loads(studio.worker.settings.path.read_text())
    assert (stored[UNET], stored[SECOND]) == ("Default", "Default")
    studio.set(sd_model_checkpoint="two", sd_unet_secondary="a")  # what is chosen with it is kept
    assert held(studio) == ("two", "Default", "a")


def test_a_restart_brings_both_back(studio: Studio, models: Path, tmp_path: Path) -> None:
    studio.set(sd_unet="a", sd_unet_secondary="b")
    picture = pixels(draw(studio))
    second = Studio(models, tmp_path)
    second.settle()
    assert held(second) == ("two", "a", "b")
    assert pixels(draw(second)) == picture
    second.close()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([BASE, UNET], [BASE, UNET, SECOND]),
        ([UNET, BASE], [UNET, SECOND, BASE]),
        ([SECOND, UNET], [SECOND, UNET]),
        ([SECOND, BASE, UNET], [SECOND, BASE, UNET]),
        ([SECOND], [SECOND]),
        (["cuda_dtype"], ["cuda_dtype"]),
        ([], []),
    ],
)
def test_the_row_has_the_order_of_its_list_after_a_restart_too(
    keys: list[str], expected: list[str], models: Path, tmp_path: Path
) -> None:
    """Not started: the row needs the settings alone."""

    def worker() -> Worker:
        catalog = Catalog(models, tmp_path / "demo")
        return Worker(Settings(tmp_path / "config.json"), catalog, PictureStore(tmp_path / "outputs"), Digests(), "cpu")

    worker().set_options(ME, {"quicksettings_list": keys})
    assert [known.key for known in quicksettings.listed(worker())] == expected
    assert not worker().is_shown(SECOND)  # no base model with two transformers is loaded


def test_a_later_choice_waits_for_the_next_picture_and_is_said(studio: Studio) -> None:
    own = pixels(draw(studio))
    studio.worker.set_options(ME, {"transplant_load_at_once": False})
    studio.worker.set_options(ME, {SECOND: "b"})
    assert studio.worker.queue.current() == (None, 0)
    assert held(studio) == ("two", "Default", "Default")
    assert studio.worker.not_loaded() == ["b"]
    assert pixels(draw(studio)) != own
    assert held(studio) == ("two", "Default", "b")
    assert studio.worker.not_loaded() == []
    studio.worker.set_options(ME, {BASE: "one", UNET: "z"})
    assert studio.worker.not_loaded() == ["one", "z"]
    job = draw(studio)
    assert held(studio) == ("one", "z")
    assert job.notice is not None and "b is not used" in job.notice.text
    studio.worker.set_options(ME, {"cuda_dtype": "bf16"})
    draw(studio)
    assert studio.worker.holding is not None and studio.worker.holding.how == "bfloat16 on cpu"
    assert held(studio) == ("one", "z")


def test_settings_for_one_job_alone(studio: Studio) -> None:
    own = pixels(draw(studio))
    studio.set(sd_unet="a")
    chosen = pixels(draw(studio))
    file = studio.worker.settings.path.read_text()
    other = draw(studio, {UNET: "Default", "samples_save": False})
    assert pixels(other) == own
    assert not other.pictures[0].path.is_relative_to(studio.pictures.outputs)
    assert held(studio) == ("two", "a", "Default")
    assert pixels(draw(studio)) == chosen

    assert "UNET secondary: b" in draw(studio, {SECOND: "b"}).pictures[0].infotext
    refused = draw(studio, {UNET: "z"})
    assert refused.status == "failed" and refused.notice is not None and "Z-Image" in refused.notice.text
    assert refused.pictures == ()
    with pytest.raises(OptionError, match="there is no 'gone'"):
        draw(studio, {UNET: "gone"})
    wrong = draw(studio, {BASE: "one"}, sampler="no such sampler")
    assert wrong.status == "failed"
    assert held(studio) == ("two", "a", "Default")
    assert studio.worker.settings.path.read_text() == file
    assert pixels(draw(studio)) == chosen


def test_a_file_that_changed_on_disk_is_loaded_anew(studio: Studio, models: Path) -> None:
    file = models / "UNET" / "c.safetensors"
    save(file, filled(network("WanTransformer3DModel"), 13).state_dict())
    studio.worker.refresh(ME)
    studio.set(sd_unet="c")
    before = pixels(draw(studio))
    new = save(file.with_name("new"), filled(network("WanTransformer3DModel"), 14).state_dict())
    new.replace(file)
    assert pixels(draw(studio)) != before
    file.unlink()
    assert draw(studio).status == "finished"
    assert held(studio) == ("two", "c", "Default")


def test_a_video_is_an_animated_picture_with_its_frames(studio: Studio) -> None:
    job = draw(studio, frames=5)
    assert job.pictures[0].infotext.splitlines()[-1].startswith("Steps: 3, Frames: 5, ")
    video: Any = Image.open(job.pictures[0].path)
    assert (video.format, video.n_frames, video.info["duration"]) == ("PNG", 5, 62.5)
    frames = []
    for index in range(5):
        video.seek(index)
        frames.append(video.tobytes())
    assert len(set(frames)) > 1
    assert "parameters" in video.info


def test_fp8_storage_is_for_both_slots(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """On and off by the option: the base model's own transformer and a file, each in its slot."""
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")

    def narrow() -> list[int]:
        pipeline = studio.worker.models.pipeline()
        models = (pipeline.transformer, pipeline.transformer_2)
        return [sum(p.dtype is torch.float8_e4m3fn for p in model.parameters()) for model in models]

    studio.set(sd_unet_secondary="b", cuda_dtype="bf16")
    before = pixels(draw(studio))
    assert narrow() == [0, 0]
    studio.set(fp8_storage=True)
    own, file = narrow()
    assert own == file > 0
    assert held(studio) == ("two", "Default", "b")
    assert pixels(draw(studio)) != before
    studio.set(sd_unet="a")
    assert narrow() == [own, file]
    studio.set(sd_unet="Default", fp8_storage=False)
    assert narrow() == [0, 0]
    assert pixels(draw(studio)) == before


def test_an_empty_row_is_a_list(studio: Studio) -> None:
    """What the page sends back of it unchanged is no change, and no text that is refused."""
    studio.set(quicksettings_list=[])
    control = controls.build(studio.worker, option("quicksettings_list"), with_help=False)
    assert control.get_config()["value"] == control.preprocess([]) == []
