"""What is loaded stays chosen and loaded when another file or base model of its name comes or goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_standalone import DEMO_BASE, ME, UNET, Studio
from tiny_models import make_demo
from transplant.errors import OptionError
from transplant.hosts.standalone.models import BASE

FILE = "demo-comfyui-bf16"


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
