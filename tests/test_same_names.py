"""What is loaded stays chosen and loaded when another file or base model of its name comes or goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_standalone import DEMO_BASE, ME, UNET, Studio, pixels
from tiny_models import make_demo
from transplant.digest import Digests
from transplant.errors import OptionError
from transplant.hosts.standalone import page
from transplant.hosts.standalone.models import BASE
from transplant.request import make_request

FILE = "demo-comfyui-bf16"
REQUEST = make_request("a cat", "", 2, 1, 64, 64, 1, 1)


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Studio]:
    make_demo.make_demo(tmp_path / "models")
    studio = Studio(tmp_path / "models", tmp_path / "data", **{BASE: DEMO_BASE, UNET: FILE})
    studio.settle()
    yield studio
    studio.close()


def test_a_file_of_the_same_name_comes_and_goes(studio: Studio, tmp_path: Path) -> None:
    loaded = studio.worker.models.pipeline().transformer
    folder = tmp_path / "models" / "UNET"
    (folder / "more").mkdir()
    shutil.copy(folder / f"{FILE}.safetensors", folder / "more")
    studio.worker.refresh(ME)
    assert studio.held == studio.saved == (DEMO_BASE, f"{FILE}.safetensors")
    assert studio.worker.not_loaded() == []
    with pytest.raises(OptionError, match=f"there is no '{FILE}'; .*{FILE}.safetensors, .*more/{FILE}"):
        studio.worker.set_options(ME, {UNET: FILE})
    assert f"UNET: {FILE}.safetensors" in studio.draw().pictures[0].infotext

    shutil.rmtree(folder / "more")
    studio.worker.refresh(ME)
    assert studio.held == studio.saved == (DEMO_BASE, FILE)
    assert f"UNET: {FILE}," in studio.draw().pictures[0].infotext
    assert studio.worker.models.pipeline().transformer is loaded  # it never was loaded again


def test_a_base_model_of_the_same_name_comes_and_goes(studio: Studio, tmp_path: Path) -> None:
    loaded = studio.worker.models.pipeline()
    folder = tmp_path / "models" / "Diffusers"
    shutil.copytree(folder / DEMO_BASE, folder / "more" / DEMO_BASE)
    studio.worker.refresh(ME)
    (name,) = [name for name, path in studio.worker.catalog.bases.items() if path == folder / DEMO_BASE]
    assert len(studio.worker.catalog.bases) == 2
    assert studio.held == studio.saved == (name, FILE)
    assert f"Model: {name}" in studio.draw().pictures[0].infotext

    shutil.rmtree(folder / "more")
    studio.worker.refresh(ME)
    assert studio.held == studio.saved == (DEMO_BASE, FILE)
    assert studio.draw().status == "finished"
    assert studio.worker.models.pipeline() is loaded


@pytest.mark.parametrize("refreshed", [False, True])
def test_what_was_loaded_from_a_file_that_is_gone_stays_usable(studio: Studio, tmp_path: Path, refreshed: bool) -> None:
    """Before a refresh and after it alike: drawn, with the hash of what was loaded, and told as missing."""
    worker, file = studio.worker, tmp_path / "models" / "UNET" / f"{FILE}.safetensors"
    before = studio.draw()
    assert f"UNET: {FILE}, UNET hash: {Digests().short(file)}" in before.pictures[0].infotext
    away = file.rename(tmp_path / "away")
    if refreshed:
        worker.refresh(ME)
    assert studio.set(sd_unet=FILE).notice is None  # as a client that sends every option back
    after = studio.draw()
    assert (after.status, after.notice) == ("finished", None)
    assert pixels(after) == pixels(before) and after.pictures[0].infotext == before.pictures[0].infotext
    assert studio.held == studio.saved == (DEMO_BASE, FILE)
    assert f"the transformer {FILE} (missing on disk)" in page.status(None, 0, worker.holding)
    assert (f"{FILE} (missing)", FILE) in worker.file_choices(FILE)

    for values in ({UNET: "demo-diffusers-fp32"}, {"cuda_dtype": "bf16"}):
        job = worker.generate(ME, REQUEST, values)
        assert job.wait(60) and job.status == "failed" and job.notice is not None
        assert job.notice.text.startswith(f"What is loaded, {FILE}, is missing on disk and could not be loaded again")
    job = worker.generate(ME, REQUEST, {UNET: FILE, "samples_save": False})
    assert job.wait(60) and job.status == "finished" and pixels(job) == pixels(before)

    if refreshed:  # another file of that name comes, and nobody refreshes
        other = file.with_name("other")
        other.write_bytes(b"\0" * 16)
        other.rename(file)
        assert pixels(studio.draw()) == pixels(before)
        assert studio.held == (DEMO_BASE, FILE)
        file.unlink()
    if not refreshed:
        away.rename(file)
        assert pixels(studio.draw()) == pixels(before)
        assert "missing" not in page.status(None, 0, worker.holding)
        return
    notice = studio.set(cuda_dtype="bf16").notice
    assert notice is not None and f"The override {FILE} is missing" in notice.text
    assert studio.held == (DEMO_BASE, "Default") and studio.saved == (DEMO_BASE, FILE)


def test_a_loaded_file_that_becomes_another_one_stays_where_that_is_refused(studio: Studio, tmp_path: Path) -> None:
    unet = tmp_path / "models" / "UNET"
    before = studio.draw()
    shutil.copy(unet / "not-for-this-base" / "demo-flux.safetensors", tmp_path / "new")
    (tmp_path / "new").replace(unet / f"{FILE}.safetensors")
    for _ in range(2):
        after = studio.draw()
        assert after.status == "finished" and after.notice is not None and after.notice.level == "warning"
        assert "FLUX.1" in after.notice.text
        assert after.notice.text.endswith("what was loaded from it stays loaded.")
        assert pixels(after) == pixels(before) and after.pictures[0].infotext == before.pictures[0].infotext
    assert f"{FILE} (changed on disk)" in page.status(None, 0, studio.worker.holding)
    (unet / f"{FILE}.safetensors").unlink()
    (unet / "more").mkdir()
    shutil.copy(unet / "variants" / "demo-diffusers-fp32.safetensors", unet / "more" / f"{FILE}.safetensors")
    studio.worker.refresh(ME)
    assert pixels(studio.draw()) == pixels(before)  # a file elsewhere that has the name now does not take its place
    studio.set(sd_unet=FILE)
    assert pixels(studio.draw()) != pixels(before)  # unless it is chosen


def test_a_chosen_file_that_is_missing_is_never_replaced_by_the_one_before(studio: Studio, tmp_path: Path) -> None:
    studio.worker.set_options(ME, {"transplant_load_at_once": False})
    studio.worker.set_options(ME, {UNET: "demo-diffusers-fp32"})
    (tmp_path / "models" / "UNET" / "variants" / "demo-diffusers-fp32.safetensors").unlink()
    job = studio.draw()
    assert job.notice is not None and "The override demo-diffusers-fp32 is missing" in job.notice.text
    assert "UNET" not in job.pictures[0].infotext
    assert studio.held == (DEMO_BASE, "Default") and studio.saved == (DEMO_BASE, "demo-diffusers-fp32")
