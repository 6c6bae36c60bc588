"""Which base models and overrides are listed, under which names."""

import json
import logging
import os
import unicodedata
from pathlib import Path

import pytest
from huggingface_hub import constants

from tiny_models import write_sparse
from transplant.hosts.standalone.folders import Catalog, find, list_bases, list_overrides

LINKS = pytest.mark.skipif(os.name != "posix", reason="symbolic links and undecodable names need a POSIX system")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache of our own instead of the user's."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def write_base(folder: Path, shards: int = 0) -> Path:
    """A pipeline folder whose weights are a few bytes."""
    index = {
        "_class_name": "ZImagePipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "safety_checker": [None, None],
    }
    for name in ("scheduler", "tokenizer", "transformer"):
        (folder / name).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    stem = "diffusion_pytorch_model"
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)] or [f"{stem}.safetensors"]
    for number, name in enumerate(names):
        write_sparse(folder / "transformer" / name, {f"w{number}": ("F32", (2,))})
    if shards:
        weight_map = {f"w{number}": name for number, name in enumerate(names)}
        (folder / "transformer" / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_override(path: Path) -> Path:
    return write_sparse(path, {"weight": ("F32", (2,))})


# Overrides


def test_overrides_are_named_by_stem_and_by_path_where_stems_collide(tmp_path: Path) -> None:
    unet = tmp_path / "UNET"
    for name in ("Zeta.safetensors", "alpha.SAFETENSORS", "a/same.safetensors", "b/c/same.safetensors"):
        write_override(unet / name)
    listed = list_overrides(tmp_path)
    assert list(listed) == ["a/same.safetensors", "alpha", "b/c/same.safetensors", "Zeta"]
    assert listed["b/c/same.safetensors"] == unet / "b/c/same.safetensors"


def test_no_models_folder_is_an_empty_list(tmp_path: Path, hub: Path) -> None:
    assert list_overrides(tmp_path / "nowhere") == {}
    assert list_bases(tmp_path / "nowhere", True) == {}


def test_hidden_temporary_and_other_files_are_left_out(tmp_path: Path) -> None:
    hidden = (".hidden.safetensors", "._mac.safetensors", "~temp.safetensors", ".git/x.safetensors")
    for name in (*hidden, "ok.safetensors"):
        write_override(tmp_path / "UNET" / name)
    for name in ("a.safetensors.part", "b.safetensors.incomplete", "c.ckpt", "d.txt"):
        (tmp_path / "UNET" / name).write_bytes(b"x")
    (tmp_path / "UNET" / "folder.safetensors").mkdir()
    assert list(list_overrides(tmp_path)) == ["ok"]


def test_entries_of_the_dropdown_are_not_taken_by_files(tmp_path: Path) -> None:
    for name in ("Default.safetensors", "None.safetensors"):
        write_override(tmp_path / "UNET" / name)
    assert list(list_overrides(tmp_path)) == ["Default.safetensors", "None.safetensors"]


@LINKS
def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_override(elsewhere / "deep" / "linked.safetensors")
    unet = tmp_path / "UNET"
    unet.mkdir()
    (unet / "link").symlink_to(elsewhere, target_is_directory=True)
    (elsewhere / "back").symlink_to(unet, target_is_directory=True)
    (unet / "file.safetensors").symlink_to(elsewhere / "deep" / "linked.safetensors")
    (unet / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert list(list_overrides(tmp_path)) == ["file", "linked"]


@LINKS
def test_undecodable_names_are_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unet = tmp_path / "UNET"
    write_override(unet / "good.safetensors")
    try:
        for name in (b"\xff1.safetensors", b"\xff2.safetensors"):
            Path(os.fsdecode(os.fsencode(unet) + b"/" + name)).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    with caplog.at_level(logging.WARNING, "transplant"):
        assert list(list_overrides(tmp_path)) == ["good"]
    assert len(caplog.records) == 1
    assert "\\udcff1.safetensors" in caplog.text


def test_names_are_found_however_their_accents_are_encoded(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
    path = write_override(tmp_path / "UNET" / f"{decomposed}.safetensors")
    listed = list_overrides(tmp_path)
    assert list(listed) == [composed]
    assert find(listed, composed) == find(listed, decomposed) == path
    assert find(listed, "../Zürich") is None


@LINKS
def test_names_that_differ_in_encoding_only_are_both_listed(tmp_path: Path) -> None:
    for form in ("NFC", "NFD"):
        write_override(tmp_path / "UNET" / f"{unicodedata.normalize(form, 'é')}.safetensors")
    if len(list((tmp_path / "UNET").iterdir())) < 2:
        pytest.skip("this file system holds both names for one")
    assert list(list_overrides(tmp_path)) == ["é.safetensors", "é.safetensors (2)"]


# Base models


def test_bases_are_folders_with_an_index(tmp_path: Path, hub: Path) -> None:
    root = tmp_path / "Diffusers"
    for name in ("one", "sub/two", "x/same", "y/same", "one/nested"):
        write_base(root / name)
    (root / "not-a-model").mkdir()
    assert list(list_bases(tmp_path, True)) == ["one", "two", "x/same", "y/same"]


def test_repositories_of_a_cache_layout_are_listed_by_their_id(tmp_path: Path, hub: Path) -> None:
    local = write_base(tmp_path / "Diffusers" / "models--org--name" / "snapshots" / "abc")
    cached = write_base(hub / "models--other--model-x" / "snapshots" / "def", shards=2)
    write_base(hub / "models--org--name" / "snapshots" / "ghi")
    assert list_bases(tmp_path, True) == {"org/name": local, "other/model-x": cached}
    assert list_bases(tmp_path, False) == {"org/name": local}


def test_the_snapshot_of_main_comes_before_newer_ones(tmp_path: Path, hub: Path) -> None:
    repository = hub / "models--org--name"
    main, newest = (write_base(repository / "snapshots" / name) for name in ("aaa", "bbb"))
    os.utime(main, (1, 1))
    assert list_bases(tmp_path, True) == {"org/name": newest}
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaa\n")
    assert list_bases(tmp_path, True) == {"org/name": main}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model_index.json", None),
        ("transformer/diffusion_pytorch_model-00002-of-00002.safetensors", "no transformer/diffusion"),
        ("transformer", "no transformer"),
        ("tokenizer", "no tokenizer"),
    ],
)
def test_incomplete_downloads_are_not_listed(
    tmp_path: Path, hub: Path, caplog: pytest.LogCaptureFixture, missing: str, said: str | None
) -> None:
    snapshot = write_base(hub / "models--org--name" / "snapshots" / "abc", shards=2)
    path = snapshot / missing
    path.rename(tmp_path / "away")
    with caplog.at_level(logging.INFO, "transplant"):
        assert list_bases(tmp_path, True) == {}
    assert said is None or said in caplog.text


def test_pickled_weights_do_not_count(tmp_path: Path, hub: Path) -> None:
    snapshot = write_base(hub / "models--org--name" / "snapshots" / "abc")
    weights = snapshot / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    assert list_bases(tmp_path, True) == {}


# The catalog


def test_the_demo_is_offered_only_while_there_is_no_base_model(tmp_path: Path, hub: Path) -> None:
    catalog = Catalog(tmp_path / "models")
    write_override(tmp_path / "models" / "UNET" / "mine.safetensors")
    catalog.refresh(True)
    assert catalog.is_built_in
    assert list(catalog.bases) == ["transplant-demo-z-image"]
    demo = ["flux", "outlines-bf16", "outlines-nvfp4", "pastel-gguf-q8_0", "pastel-int8-convrot", "pencil-fp8-bundle"]
    assert list(catalog.overrides) == [*(f"demo-{name}" for name in demo), "mine"]
    write_base(tmp_path / "models" / "Diffusers" / "own")
    catalog.refresh(True)
    assert not catalog.is_built_in
    assert list(catalog.bases) == ["own"]
    assert list(catalog.overrides) == ["mine"]


def test_folders_of_their_own_are_listed_instead(tmp_path: Path, hub: Path) -> None:
    catalog = Catalog(tmp_path / "models", tmp_path / "demo")
    write_override(tmp_path / "models" / "UNET" / "usual.safetensors")
    write_override(tmp_path / "disk" / "files" / "elsewhere.safetensors")
    write_base(tmp_path / "disk" / "bases" / "own")
    catalog.refresh(True, str(tmp_path / "disk" / "bases"), str(tmp_path / "disk" / "files"))
    assert (list(catalog.bases), list(catalog.overrides)) == (["own"], ["elsewhere"])
    catalog.refresh(True, str(tmp_path / "disk" / "bases"))
    assert (list(catalog.bases), list(catalog.overrides)) == (["own"], ["usual"])
