"""A picture's parameters read back: what made it, what of that is here, and what is not the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tiny_models import write_sparse
from transplant.digest import Digests
from transplant.errors import TransplantError
from transplant.hosts.standalone.folders import Catalog
from transplant.hosts.standalone.recall import Recalled, recall
from transplant.pictures import png_bytes
from transplant.request import Request, infotext

REQUEST = Request("a cat, sitting\non a mat", "blurry: no", 12, 3.5, 320, 192, 7, sampler="Euler FlowMatch", frames=5)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """A base model and two files, which nobody will read."""
    models = tmp_path / "models"
    (models / "Diffusers" / "base").mkdir(parents=True)
    (models / "Diffusers" / "base" / "model_index.json").write_text(json.dumps({"_class_name": "ZImagePipeline"}))
    for name in "ab":
        write_sparse(models / "UNET" / f"{name}.safetensors", {name: ("F32", (2,))})
    catalog = Catalog(models, tmp_path / "demo")
    catalog.refresh(False)
    return catalog


@pytest.fixture
def digests(catalog: Catalog) -> Digests:
    digests = Digests()
    for path in catalog.overrides.values():
        digests.short(path)
    return digests


def png(folder: Path, names: dict[str, str], request: Request = REQUEST) -> Path:
    file = folder / "picture.png"
    file.write_bytes(png_bytes(Image.new("RGB", (8, 8)), infotext(request, request.seed, names)))
    return file


def read(tmp_path: Path, catalog: Catalog, digests: Digests, **names: str) -> Recalled:
    return recall(png(tmp_path, {name.replace("_", " "): value for name, value in names.items()}), catalog, digests)


def test_every_field_comes_back(tmp_path: Path, catalog: Catalog, digests: Digests) -> None:
    hashed = digests.short(catalog.overrides["a"])
    found = read(tmp_path, catalog, digests, Model="base", UNET="a", UNET_hash=hashed)
    assert found.warnings == ()
    assert found.models == {"sd_model_checkpoint": "base", "sd_unet": "a", "sd_unet_secondary": "Default"}
    assert found.fields == {
        "prompt": REQUEST.prompt, "negative": REQUEST.negative_prompt, "steps": 12, "guidance": 3.5, "width": 320,
        "height": 192, "seed": 7, "sampler": "Euler FlowMatch", "frames": 5,
    }  # fmt: skip


def test_what_is_not_here_is_said(tmp_path: Path, catalog: Catalog, digests: Digests) -> None:
    """B38, B05: nothing takes its place."""
    found = read(tmp_path, catalog, digests, Model="other", UNET="gone", UNET_secondary="lost")
    assert found.models == {}
    assert found.warnings == (
        "The base model other is not here.",
        "The override gone is not here.",
        "The override lost is not here.",
    )


def test_a_file_is_known_by_its_hash(tmp_path: Path, catalog: Catalog, digests: Digests) -> None:
    """Under another name it is found, and under the same name another file is told from it."""
    of_a, of_b = (digests.short(catalog.overrides[name]) for name in "ab")
    renamed = read(tmp_path, catalog, digests, Model="base", UNET="old name", UNET_hash=of_b)
    assert renamed.models["sd_unet"] == "b"
    assert renamed.warnings == ("The override old name is here under the name b.",)
    swapped = read(tmp_path, catalog, digests, Model="base", UNET="a", UNET_hash=of_b)
    assert (swapped.models["sd_unet"], swapped.warnings) == ("b", ())
    other = read(tmp_path, catalog, digests, Model="base", UNET="a", UNET_hash="0" * len(of_a))
    assert other.models["sd_unet"] == "a"
    assert other.warnings == ("The file a is another one than made this picture: their hashes differ.",)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_pictures_of_other_programs(kind: str, tmp_path: Path, catalog: Catalog, digests: Digests) -> None:
    """They write into the EXIF user comment, in UTF-16 after the word UNICODE."""
    text = infotext(REQUEST, 7, {"Model": "base"}) + ", Hires upscale: 2"
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + text.encode("utf-16-be")
    file = tmp_path / "picture"
    Image.new("RGB", (8, 8)).save(file, kind, exif=exif)
    found = recall(file, catalog, digests)
    assert (found.fields["prompt"], found.fields["seed"]) == (REQUEST.prompt, 7)
    assert found.models["sd_model_checkpoint"] == "base"


def test_entries_that_are_no_numbers_are_left_out(tmp_path: Path, catalog: Catalog, digests: Digests) -> None:
    file = tmp_path / "picture.png"
    text = "x\nSteps: many, Size: 10x, Seed: -3, CFG scale: 1e9, Frames: 2.5, Model: base"
    file.write_bytes(png_bytes(Image.new("RGB", (8, 8)), text))
    assert set(recall(file, catalog, digests).fields) == {"prompt", "negative", "sampler"}


@pytest.mark.parametrize(
    ("content", "told"), [(b"no picture", "cannot be read as a picture"), (None, "no parameters are written")]
)
def test_what_cannot_be_read_is_said(
    content: bytes | None, told: str, tmp_path: Path, catalog: Catalog, digests: Digests
) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(content) if content else Image.new("RGB", (8, 8)).save(file)
    with pytest.raises(TransplantError, match=told):
        recall(file, catalog, digests)
