"""Comparisons: the grid is what the same requests draw one by one, and nothing of what was chosen is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from test_standalone import DEMO_BASE, ME, Studio
from tiny_models import make_demo
from transplant.errors import OptionError
from transplant.grid import LABEL_WIDTH, MARGIN, Cell, Column, closeness, compose, psnr
from transplant.hosts.standalone.compare import Comparison, make_comparison
from transplant.hosts.standalone.jobs import Job
from transplant.request import make_request

UNET = "sd_unet"
COMMON = make_request("", "", 2, 1, 192, 96, 0, 1)
FILES = ("Default", "demo-comfyui-bf16", "demo-bundle-fp16")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    make_demo.make_demo(out)
    return out


@pytest.fixture
def studio(demo: Path, tmp_path: Path) -> Iterator[Studio]:
    studio = Studio(demo, tmp_path, sd_model_checkpoint=DEMO_BASE, sd_unet="demo-diffusers-fp32")
    studio.settle()
    yield studio
    studio.close()


def compared(studio: Studio, files: tuple[str, ...], prompts: str = "a cat\na dog", seeds: str = "3, 4") -> Job:
    job = studio.worker.compare(ME, make_comparison(UNET, files, prompts, seeds, COMMON))
    assert job.wait(120)
    return job


def cell(grid: Image.Image, column: int, row: int, rows: int) -> Image.Image:
    """A picture cut out of a grid, whose rows are as high as they are wide apart."""
    top = (grid.height - MARGIN) - rows * (COMMON.height + 18 + MARGIN)
    left, y = LABEL_WIDTH + column * (COMMON.width + MARGIN), top + row * (COMMON.height + 18 + MARGIN)
    return grid.crop((left, y, left + COMMON.width, y + COMMON.height))


def test_the_grid_holds_what_each_file_draws_alone(studio: Studio) -> None:
    before = studio.worker.settings.path.read_text()
    job = compared(studio, FILES)
    assert job.status == "finished" and job.notice is None
    grid = Image.open(job.pictures[0].path)
    assert 'Compared: "Default, demo-comfyui-bf16, demo-bundle-fp16"' in grid.info["parameters"]
    assert studio.worker.settings.path.read_text() == before
    assert studio.held == (DEMO_BASE, "demo-diffusers-fp32")
    for column, file in enumerate(FILES):
        for row, (prompt, seed) in enumerate((("a cat", 3), ("a cat", 4), ("a dog", 3), ("a dog", 4))):
            request = make_request(prompt, "", 2, 1, 192, 96, seed, 1)
            alone = studio.worker.generate(ME, request, {UNET: file})
            assert alone.wait(60)
            picture = Image.open(alone.pictures[0].path)
            assert cell(grid, column, row, 4).tobytes() == picture.tobytes(), (file, row)


def test_a_refused_file_has_its_reason_and_the_others_are_drawn(studio: Studio) -> None:
    studio.worker.catalog.described()
    wanted = make_comparison(UNET, ("demo-comfyui-bf16", "demo-flux", "Default"), "a cat", "1", COMMON)
    held = studio.worker.generate(ME, make_request("a cat", "", 100, 1, 64, 64, 1, 4))
    job = studio.worker.compare(ME, wanted)
    told = studio.worker.queue.notice(ME)
    assert told is not None and told.text == "Not for the loaded base model, and not drawn: demo-flux (FLUX.1)."
    studio.worker.queue.cancel(held.number)
    assert job.wait(120)
    assert job.status == "finished"
    grid = Image.open(job.pictures[0].path)
    spread = [float(np.asarray(cell(grid, column, 0, 1)).std()) for column in range(3)]
    assert spread[0] > 1 and spread[1] == 0 and spread[2] > 1
    assert job.notice is not None and job.notice.text == "Refused: demo-flux; the grid has the reasons."
    assert studio.held == (DEMO_BASE, "demo-diffusers-fp32")


def test_a_cancelled_comparison_keeps_what_was_done(studio: Studio) -> None:
    wanted = Comparison(UNET, FILES, tuple(make_request("x", "", 60, 1, 192, 96, seed, 1) for seed in range(3)))
    job = studio.worker.compare(ME, wanted)
    while not job.text.startswith("Picture 5 of 9"):
        assert not job.is_over
        time.sleep(0.005)
    studio.worker.queue.cancel(job.number)
    assert job.wait(60)
    assert job.status == "cancelled"
    grid = Image.open(job.pictures[0].path)
    assert np.asarray(cell(grid, 1, 0, 3)).std() > 1  # the fourth picture was done
    assert np.asarray(cell(grid, 1, 1, 3)).std() == 0  # the fifth was not
    assert studio.held == (DEMO_BASE, "demo-diffusers-fp32")


@pytest.mark.parametrize(
    ("files", "prompts", "seeds", "reason"),
    [
        ((), "x", "1", "choose at least one"),
        (("Default",), "x", "one", "whole numbers"),
        (("Default",), "x", "-1", "from 0"),
        (("Default", "a"), "x\n" * 30, "1 2 3 4 5 6 7", "420 pictures"),
    ],
)
def test_what_cannot_be_compared_is_said(files: tuple[str, ...], prompts: str, seeds: str, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        make_comparison(UNET, files, prompts, seeds, COMMON)


def test_a_file_that_is_not_in_the_list_is_refused(studio: Studio) -> None:
    with pytest.raises(OptionError, match="there is no"):
        studio.worker.compare(ME, make_comparison(UNET, ("../secret",), "x", "1", COMMON))


def test_files_of_which_none_is_for_the_base_model_are_refused_at_once(studio: Studio) -> None:
    studio.worker.catalog.described()
    with pytest.raises(OptionError, match=r"none of them is for the loaded base model: demo-flux \(FLUX\.1\)"):
        studio.worker.compare(ME, make_comparison(UNET, ("demo-flux",), "x", "1", COMMON))


def test_psnr_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 256, (40, 30, 3), np.uint8) for _ in range(2))
    error = sum((int(a) - int(b)) ** 2 for a, b in zip(one.ravel(), other.ravel(), strict=True)) / one.size
    expected = 20 * math.log10(255) - 10 * math.log10(error)
    assert psnr(Image.fromarray(one), Image.fromarray(other)) == pytest.approx(expected)
    assert closeness(Image.fromarray(one), Image.fromarray(one)) == "same"
    assert closeness(Image.fromarray(one), Image.fromarray(one[:20])) == "another size"


def test_long_labels_stay_in_their_place() -> None:
    picture = Image.new("RGB", (200, 100), (255, 0, 0))
    long = Column("w" * 200, "word " * 60, (Cell(picture, "1 s"),))
    grid = compose([long, long], ["label " * 80])
    for column in range(2):
        left = LABEL_WIDTH + column * (200 + MARGIN)
        box = (left, grid.height - 2 * MARGIN - 18 - 100, left + 200, grid.height - 2 * MARGIN - 18)
        assert set(grid.crop(box).get_flattened_data()) == {(255, 0, 0)}
    gap = grid.crop((LABEL_WIDTH - MARGIN, 0, LABEL_WIDTH, grid.height))
    assert gap.getextrema() == ((255, 255),) * 3
