"""Faults that users of such software have met, where they concern choosing, loading and reporting: one test a kind.

Each fault is a whole kind; where the tests beside the code go through it already, they are named here.

    A04  a transformer among whole models   test_a04_*, test_inventory.test_every_kind_is_told
    A05  chosen, not loaded, not said       test_two_slots.test_a_later_choice_waits_for_the_next_picture_and_is_said,
                                            test_standalone.test_what_is_loaded_is_what_the_options_*
    A06  a file of another family persisted test_a06_*, test_standalone.test_a_new_base_keeps_*,
                                            test_two_slots.test_another_type_of_model_sets_both_slots_back_*
    A18  toggling FP8 storage               test_fp8_outlook.test_on_off_and_on_again,
                                            test_two_slots.test_fp8_storage_is_for_both_slots
    A24  files of two slots swapped         test_two_slots.test_each_slot_is_chosen_*, test_detect.test_a24_*
    B01  all fails after one failure        test_b01_*, test_session.test_repaired_file_is_tried_again
    B02  two files of one name              test_b02_*, test_folders.test_overrides_are_named_by_stem_*
    B04  a stale list                       test_b04_*, test_webui.test_refresh_finds_a_new_file_*
    B05  the chosen file is gone            test_b05_*, test_standalone.test_a_missing_override_*,
                                            test_standalone.test_a_missing_base_*
    B07  an unknown family                  test_faults_layouts.test_b07_*
    B08  detection and loading disagree     test_b08_*, test_faults_layouts.test_b08_*, test_detect.test_b08_*
    B34  mapping a file ends the process    test_b34_*, test_reader.test_tensors_of_their_own
    B35  network drives                     test_reader.test_every_byte_is_read_once_and_in_order,
                                            test_reader.test_every_dtype_and_shape
    B37  offline                            test_b37_*, test_faults_layouts.test_b07_*
    B38  a model for one job alone          test_two_slots.test_settings_for_one_job_alone,
                                            test_api.test_override_settings_hold_for_their_request_alone,
                                            test_compare.test_the_grid_holds_what_each_file_draws_alone
"""

from __future__ import annotations

import ast
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from test_standalone import BASE, DEMO_BASE, ME, UNET, Studio, pixels
from tiny_models import make_demo, save, with_prefix
from transplant import pipeline
from transplant.base_model import read_base
from transplant.errors import BaseModelError
from transplant.inventory import identified

TESTS = Path(__file__).resolve().parent
COMFYUI, DIFFUSERS = (Path(name).name for name in (make_demo.COMFYUI, make_demo.DIFFUSERS))


def test_the_table_above_names_tests_that_exist() -> None:
    for file, name in re.findall(r"(?:(test_\w+)\.)?(test_\w+\*?)", __doc__ or ""):
        text = (TESTS / f"{file or Path(__file__).stem}.py").read_text("utf-8")
        names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert any(found == name or (name[-1] == "*" and found.startswith(name[:-1])) for found in names), name


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_demo.make_demo(folder)
    return folder


@pytest.fixture
def models(demo: Path, tmp_path: Path) -> Path:
    """A models folder that a test may change."""
    return Path(shutil.copytree(demo, tmp_path / "models"))


@pytest.fixture
def studio(models: Path, tmp_path: Path) -> Iterator[Studio]:
    studio = Studio(models, tmp_path / "data", **{BASE: DEMO_BASE})
    studio.settle()
    yield studio
    studio.close()


def listed(studio: Studio) -> list[str]:
    return [name for name in studio.worker.catalog.overrides if "demo" not in name]


def test_a04_a_transformer_among_whole_models_is_told_where_it_belongs(models: Path, tmp_path: Path) -> None:
    """Which part it is, which folder and option it belongs to, and over which base model it goes."""
    unet = models / "UNET"
    for folder in ("Stable-diffusion", "Diffusers"):
        (models / folder).mkdir(exist_ok=True)
        shutil.copy(unet / COMFYUI, models / folder / f"of {folder}.safetensors")
    shutil.rmtree(unet)
    studio = Studio(models, tmp_path / "data", **{BASE: DEMO_BASE})
    notice = studio.settle().notice
    assert notice is not None and notice.level == "warning"
    for folder in ("Stable-diffusion", "Diffusers"):
        assert (
            f"of {folder}.safetensors in {models / folder} is a Z-Image transformer and no base model: "
            f"move it to {unet} and choose it as UNET model, over a Z-Image base model." in notice.text
        )
    unet.mkdir()
    shutil.move(models / "Diffusers" / "of Diffusers.safetensors", unet)
    studio.worker.refresh(ME)
    told = studio.settle().notice
    assert told is not None and "of Stable-diffusion" in told.text and "of Diffusers" not in told.text
    assert listed(studio) == ["of Diffusers"]
    studio.close()


def test_a06_a_persisted_file_of_another_family_costs_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found from its header before any weights are read; the base model loads with its own transformer and says so."""
    monkeypatch.setattr(pipeline, "build", lambda *_, **__: pytest.fail("weights were read"))
    studio = Studio(models, tmp_path / "data", **{BASE: DEMO_BASE, UNET: "demo-flux"})
    notice = studio.settle().notice
    assert notice is not None and "FLUX.1" in notice.text and "own transformer is loaded" in notice.text
    assert studio.held == studio.saved == (DEMO_BASE, "Default")
    assert studio.draw().status == "finished"
    studio.close()


def test_b01_a_failed_load_is_over_with_the_next_choice(studio: Studio, models: Path) -> None:
    """A broken file, a good one, then the first one repaired: each is what it is, at once."""
    whole = (models / "UNET" / COMFYUI).read_bytes()
    file = models / "UNET" / "x.safetensors"
    file.write_bytes(whole[:-10])
    studio.worker.refresh(ME)
    for _ in range(2):
        notice = studio.set(sd_unet="x").notice
        assert notice is not None and notice.level == "error" and "download it again" in notice.text.lower()
        assert studio.held == studio.saved == (DEMO_BASE, "Default")
    assert studio.set(sd_unet="demo-comfyui-bf16").notice is None
    expected = pixels(studio.draw())
    studio.set(sd_unet="Default")
    file.write_bytes(whole)
    assert studio.set(sd_unet="x").notice is None
    assert studio.held == studio.saved == (DEMO_BASE, "x")
    assert pixels(studio.draw()) == expected


def test_b02_a_file_keeps_its_name_when_another_of_the_same_comes_or_goes(models: Path, tmp_path: Path) -> None:
    """A name that means one file is followed to it; one that could mean two is said to, and nothing is guessed."""
    unet, other = models / "UNET", models / "UNET" / "other"
    other.mkdir()
    shutil.copy(unet / COMFYUI, unet / "x.safetensors")
    shutil.copy(unet / COMFYUI, unet / "x-v2.safetensors")
    studio = Studio(models, tmp_path / "data", **{BASE: DEMO_BASE, UNET: "x"})
    studio.settle()
    assert studio.held == (DEMO_BASE, "x")
    studio.close()

    shutil.copy(models / make_demo.DIFFUSERS, other / "x.safetensors")
    studio = Studio(models, tmp_path / "data")
    notice = studio.settle().notice
    assert listed(studio) == ["other/x.safetensors", "x-v2", "x.safetensors"]
    assert notice is not None
    assert notice.text.startswith("x may be other/x.safetensors or x.safetensors: choose one.")
    assert studio.held == (DEMO_BASE, "Default") and studio.saved == (DEMO_BASE, "x")
    studio.set(sd_unet="other/x.safetensors")
    (unet / "x.safetensors").unlink()
    studio.close()

    studio = Studio(models, tmp_path / "data")
    studio.settle()
    assert studio.held == studio.saved == (DEMO_BASE, "x")
    assert studio.worker.catalog.overrides["x"] == other / "x.safetensors"
    studio.worker.set_options(ME, {UNET: "Default"})
    studio.worker.set_options(ME, {UNET: "other/x.safetensors"})  # as a program that remembers it
    studio.settle()
    assert studio.saved == (DEMO_BASE, "x")
    studio.close()


def test_b04_files_that_come_go_and_change_their_name_are_seen_at_a_refresh(studio: Studio, models: Path) -> None:
    unet = models / "UNET"
    for change, expected in (
        (lambda: shutil.copy(unet / COMFYUI, unet / "new.safetensors"), ["new"]),
        (lambda: (unet / "new.safetensors").rename(unet / "renamed.safetensors"), ["renamed"]),
        (lambda: (unet / "renamed.safetensors").unlink(), []),
    ):
        before = listed(studio)
        change()
        assert listed(studio) == before
        studio.worker.refresh(ME)
        assert listed(studio) == expected


def test_b05_a_chosen_file_that_goes_away_is_shown_as_missing(studio: Studio, models: Path) -> None:
    """What is loaded stays and draws; the list says missing; no other file takes its place, nor does the first one."""
    (models / "UNET" / COMFYUI).rename(models / "UNET" / "demo-comfyui.safetensors")
    studio.worker.refresh(ME)
    studio.set(sd_unet="demo-comfyui")
    expected = pixels(studio.draw())
    (models / "UNET" / "demo-comfyui.safetensors").unlink()
    studio.worker.refresh(ME)
    shown = studio.worker.shown(UNET)
    assert ("demo-comfyui (missing)", "demo-comfyui") in studio.worker.file_choices(shown)
    assert pixels(studio.draw()) == expected
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui")


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_b08_the_list_and_the_load_agree(prefix: str, studio: Studio, models: Path) -> None:
    file = save(models / "UNET" / "x.safetensors", with_prefix(load_file(models / make_demo.COMFYUI), prefix))
    studio.worker.refresh(ME)
    assert identified(file).architecture == studio.worker.holding.architecture == "Z-Image"  # type: ignore[union-attr]
    assert studio.set(sd_unet="x").notice is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_b34_with_plain_reads_no_file_is_mapped_and_the_picture_is_the_same(studio: Studio) -> None:
    studio.set(sd_unet="demo-diffusers-fp32")
    before = pixels(studio.draw())

    def mapped() -> bool:
        return DIFFUSERS in Path("/proc/self/maps").read_text()

    assert mapped()
    studio.set(transplant_mmap="off")
    assert not mapped()
    assert studio.held == (DEMO_BASE, "demo-diffusers-fp32")
    assert pixels(studio.draw()) == before


def test_b37_a_base_model_that_is_not_here_is_a_short_message_and_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(BaseModelError, match=r"no such repository in the local Hugging Face cache.*download"):
        read_base("org/gated-model")
