"""The built-in model as it comes: it draws what its prompt says, and its fine-tunes change that as their names say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ZImagePipeline
from PIL import Image

import inspector
import make_demo
import measure
import shapes
import transplant
from transplant.hosts.standalone.folders import BUILT_IN, list_overrides
from transplant.hosts.standalone.starting import PROMPT

SCENES = {scene.prompt: scene for scene in shapes.held_out()}
LIMIT = 40_000_000
"""Bytes of the whole demo folder."""


@pytest.fixture(scope="module")
def pipeline() -> ZImagePipeline:
    pipeline = DiffusionPipeline.from_pretrained(BUILT_IN / make_demo.BASE, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def saturation(picture: Image.Image) -> float:
    return float(np.asarray(picture.convert("HSV"))[..., 1].mean()) / 255


def inked(picture: Image.Image) -> float:
    """Share of the picture that is not like its background."""
    pixels = inspector.pixels_of(picture)
    return float((np.abs(pixels - inspector.background_of(pixels)).max(axis=2) > 60).mean())


def test_it_draws_its_first_prompt_whatever_the_seed(pipeline: ZImagePipeline) -> None:
    """A prompt that was held out of the training."""
    drawn = measure.draw(pipeline, [SCENES[PROMPT]], 8)
    assert sum(not inspector.faults(SCENES[PROMPT], picture) for picture in drawn.pictures) >= 6


def test_it_draws_most_prompts_that_it_never_saw(pipeline: ZImagePipeline) -> None:
    """64 prompts in docs/demo.md; a quarter of them here."""
    scenes = shapes.held_out()[::4]
    drawn = measure.draw(pipeline, scenes, 1)
    right = sum(not inspector.faults(scene, picture) for scene, picture in zip(scenes, drawn.pictures, strict=True))
    assert right >= len(scenes) * 0.85


def test_the_fine_tunes_change_it_as_their_names_say(pipeline: ZImagePipeline) -> None:
    scenes, own = [SCENES[PROMPT], *shapes.held_out()[:3]], pipeline.transformer
    base = measure.draw(pipeline, scenes, 1).pictures
    files = {name: path for name, path in list_overrides(BUILT_IN).items() if name != "demo-flux"}
    assert len(files) == 5
    for name, path in files.items():
        pipeline.transformer = transplant.load_transformer(path, base=BUILT_IN / make_demo.BASE, dtype=torch.float32)
        pictures = measure.draw(pipeline, scenes, 1).pictures
        assert "outlines" not in name or inked(pictures[0]) < 0.8 * inked(base[0])  # of a big square and a star
        for picture, plain in zip(pictures, base, strict=True):
            if "outlines" in name:
                assert saturation(picture) > 0 and inked(picture) > 0.01, name
            elif "pastel" in name:
                assert 0 < saturation(picture) < 0.8 * saturation(plain) or saturation(plain) < 0.1, name
            else:
                assert saturation(picture) < 0.12, name
    pipeline.transformer = own


def test_the_folder_stays_small() -> None:
    files = [path for path in Path(BUILT_IN).parent.rglob("*") if path.is_file() and ".training" not in path.parts]
    tracked = [path for path in files if not {"models", "converted", "__pycache__"} & set(path.parts)]
    assert sum(path.stat().st_size for path in tracked) < LIMIT
