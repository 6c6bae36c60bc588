"""What the checkpoints of a folder are: right, remembered, and never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from test_architectures import EXPECTED
from tiny_models import manifest, save, tiny_flux_bfl, write_from_manifest, write_sparse
from transplant import inventory
from transplant.architectures import detect
from transplant.checkpoint.header import read_header, read_names
from transplant.checkpoint.naming import normalise
from transplant.cli import main
from transplant.hosts.standalone.folders import Catalog
from transplant.inventory import UNREADABLE, Inventory, checkpoints_in, default_cache, identified

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "lora": ("LoRA", "transformer.blocks.0.attn.lora_A.weight"),
    "kohya": ("LoRA", "lora_unet_blocks_0_attn.lora_down.weight"),
    "vae": ("VAE", "decoder.conv_in.weight"),
    "text": ("text encoder", "text_model.encoder.layers.0.mlp.fc1.weight"),
    "control": ("ControlNet", "controlnet_blocks.0.weight"),
    "ip": ("IP-Adapter", "image_proj.norm.weight"),
    "clip-vision": ("image encoder", "vision_model.encoder.layers.0.mlp.fc1.weight"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of every kind."""
    root = tmp_path / "files"
    for name, (_, key) in KINDS.items():
        write_sparse(root / "kinds" / f"{name}.safetensors", {key: ("F32", (2,))})
    save(root / "flux.safetensors", tiny_flux_bfl())
    sizes = {key: (dtype, (2,)) for key, (dtype, _) in manifest("aio_sdxl_fp16").tensors.items()}
    write_sparse(root / "bundle.safetensors", sizes)
    write_sparse(root / "half-00002-of-00002.safetensors", {"w": ("F32", (2,))})
    (root / "page.safetensors").write_bytes(b"<!DOCTYPE html>")
    (root / "cut.safetensors").write_bytes((root / "flux.safetensors").read_bytes()[:-10])
    write_sparse(root / "other.safetensors", {"a.weight": ("F32", (2,))})
    write_sparse(root / ".hidden.safetensors", {"a.weight": ("F32", (2,))})
    (root / "notes.txt").touch()
    return root


def looks(cache: Path | None, folder: Path) -> dict[str, inventory.Entry]:
    found = Inventory(cache).look_at(checkpoints_in(folder))
    return {path.relative_to(folder).as_posix(): entry for path, entry in found.items()}


@pytest.mark.parametrize("names", [["emb_params"], ["clip_l", "clip_g"], ["<cat>"]])
def test_a_textual_inversion_is_told(names: list[str], tmp_path: Path) -> None:
    file = write_sparse(tmp_path / "x.safetensors", dict.fromkeys(names, ("F32", (2, 8))))
    assert identified(file).kind == "textual inversion"


def test_what_looks_alike_is_told_as_either(tmp_path: Path) -> None:
    """Nothing in its names tells an Anima file without a conditioner from a Cosmos one."""
    told = manifest("anima_base_v1_bf16").tensors
    alone = {name: (dtype, (2,)) for name, (dtype, _) in told.items() if "llm_adapter." not in name}
    write_sparse(tmp_path / "alone.safetensors", alone)
    write_sparse(tmp_path / "whole.safetensors", {name: (dtype, (2,)) for name, (dtype, _) in told.items()})
    found = looks(None, tmp_path)
    assert found["alone.safetensors"].title == "Cosmos Predict 2 or Anima"
    assert found["whole.safetensors"].title == "Anima"


def test_a_model_with_a_broken_index_is_one_choice(tmp_path: Path) -> None:
    index = tmp_path / "models" / "flux" / "diffusion_pytorch_model.safetensors.index.json"
    index.parent.mkdir(parents=True)
    index.write_text("{")
    assert checkpoints_in(tmp_path / "models") == [index.parent]


def test_every_kind_is_told(folder: Path) -> None:
    found = looks(None, folder)
    for name, (kind, key) in KINDS.items():
        entry = found.pop(f"kinds/{name}.safetensors")
        assert (entry.kind, entry.why, entry.tensors) == (kind, f"holds {key}", 1)
    assert {name: (entry.kind, entry.architecture) for name, entry in found.items()} == {
        "flux.safetensors": ("transformer", "FLUX.1"),
        "bundle.safetensors": ("all-in-one bundle", "SDXL"),
        "half-00002-of-00002.safetensors": ("pipeline shard", ""),
        "page.safetensors": ("unreadable", ""),
        "cut.safetensors": ("unreadable", ""),
        "other.safetensors": ("unknown", ""),
    }
    assert "half-00001-of-00002.safetensors is not there" in found["half-00002-of-00002.safetensors"].why
    assert "web page" in found["page.safetensors"].why
    assert found["flux.safetensors"].nbytes == (folder / "flux.safetensors").stat().st_size


@pytest.mark.parametrize("name", EXPECTED)
def test_real_headers(name: str, tmp_path: Path) -> None:
    """The quick way to the names gives what the whole header gives, and detection the same."""
    file = write_from_manifest(tmp_path / "x.safetensors", name)
    header = read_header(file)
    names = read_names(file)
    assert (list(names.names), names.metadata) == (list(header.tensors), header.metadata)
    assert identified(file).architecture == EXPECTED[name]
    found = detect.identify(normalise(file, header.tensors), metadata=header.metadata)
    assert (identified(file).kind, identified(file).why) == (found.kind, found.why)


def test_what_was_seen_is_not_read_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "inventory.json"
    first = looks(cache, folder)
    read: list[Path] = []
    monkeypatch.setattr(inventory, "identified", lambda path: read.append(path) or identified(path))
    assert looks(cache, folder) == first
    assert read == []
    os.utime(folder / "flux.safetensors", ns=(1, 1))
    (folder / "page.safetensors").write_bytes((folder / "flux.safetensors").read_bytes())
    (folder / "other.safetensors").rename(folder / "renamed.safetensors")
    found = looks(cache, folder)
    assert sorted(path.name for path in read) == ["flux.safetensors", "page.safetensors", "renamed.safetensors"]
    assert found["page.safetensors"].architecture == "FLUX.1"


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"version": 1}', '{"version": "x", "entries": {}}', "\0" * 100,
    '{"version": "VERSION", "entries": []}', '{"version": "VERSION", "entries": {"FILE": [SIZE, TIME]}}',
    '{"version": "VERSION", "entries": {"FILE": [SIZE, TIME, 1, 2, 3, 4, 5, 6, 7]}}', "[" * 100_000,
    '{"version": "older", "entries": {"FILE": [SIZE, TIME, "VAE", "", "", "", 1, 1, ""]}}',
])  # fmt: skip
def test_a_damaged_cache_is_ignored(text: str, folder: Path, tmp_path: Path) -> None:
    file, cache = folder / "flux.safetensors", tmp_path / "cache.json"
    status = file.stat()
    for word, value in (("FILE", file), ("SIZE", status.st_size), ("TIME", status.st_mtime_ns)):
        text = text.replace(word, str(value))
    cache.write_text(text.replace("VERSION", inventory._VERSION))
    assert Inventory(cache).look(file).architecture == "FLUX.1"
    assert Inventory(cache).look(file) == Inventory(None).look(file)
    assert json.loads(cache.read_text())["version"] == inventory._VERSION


def test_a_cache_that_cannot_be_written_changes_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blocked").touch()
    assert Inventory(tmp_path / "blocked" / "x.json").look(folder / "flux.safetensors").architecture == "FLUX.1"


def test_threads_may_ask_at_once(folder: Path, tmp_path: Path) -> None:
    shared = Inventory(tmp_path / "cache.json")
    found: list[dict[Path, inventory.Entry]] = []
    paths = checkpoints_in(folder)
    threads = [threading.Thread(target=lambda: found.append(shared.look_at(paths))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(each == found[0] for each in found)


def test_a_file_that_goes_away_is_unreadable(tmp_path: Path) -> None:
    assert Inventory().look(tmp_path / "gone.safetensors").kind == UNREADABLE


@pytest.mark.skipif(os.name != "posix", reason="symbolic links")
def test_folders_that_hold_themselves_are_walked_once(folder: Path) -> None:
    (folder / "kinds" / "loop").symlink_to(folder)
    assert len(checkpoints_in(folder)) == len(looks(None, folder)) == 6 + len(KINDS)


def test_the_lists_of_the_webui_say_what_files_are(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "UNET")
    catalog = Catalog(tmp_path, tmp_path / "demo", Inventory(tmp_path / "cache.json"))
    catalog.refresh(False)
    described = catalog.described()
    assert described.keys() == catalog.overrides.keys()
    assert (described["flux"].architecture, described["lora"].kind) == ("FLUX.1", "LoRA")
    assert described["half"].kind == "pipeline shard"


def test_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inventory, "default_cache", lambda: tmp_path / "c.json")
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "flux.safetensors" in text and "FLUX.1" in text and "web page" in text
    assert "5 unreadable" not in text and "2 unreadable" in text
    assert main(["inspect", str(folder), "--json"]) == 0
    told = {Path(entry["file"]).name: entry for entry in json.loads(capsys.readouterr().out)}
    assert told["bundle.safetensors"]["kind"] == "all-in-one bundle"
    assert (tmp_path / "c.json").is_file()
    assert main(["inspect", str(tmp_path / "files" / "kinds" / "nothing")]) == 1


def test_a_folder_is_listed_without_torch(folder: Path, tmp_path: Path) -> None:
    code = "import sys; from transplant.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "modules"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    modules = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert modules.isdisjoint({"torch", "diffusers", "numpy", "gradio"})


def test_cache_lies_where_caches_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_cache() == tmp_path / "transplant" / "inventory.json"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_cache() == Path.home() / "Library" / "Caches" / "transplant" / "inventory.json"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_cache() == tmp_path / "local" / "transplant" / "inventory.json"


# The quick way through a header


BROKEN = (
    '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {"dtype": "F32", "shape": [2], '
    '"data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    '{"__metadata__": {"x": "1", "x": "2"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}',
    '{"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], '
    '"data_offsets": [0, 4]}}',
    '{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    '{"__metadata__": {"x": 1}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    '{"__metadata__": "x", "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    '{"a": {"dtype": "F32", "shape": [9223372036854775808, 0], "data_offsets": [0, 8]}}',
    '{"a": 1}', "{}", "[]",
)  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_the_quick_way_takes_nothing_that_the_slow_one_refuses(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\0" * 8)
    for read in (read_header, read_names):
        with pytest.raises(inventory.OverrideArchMismatch):
            read(file)


def test_a_duplicate_is_seen_beside_escaped_quotes(tmp_path: Path) -> None:
    r"""`\"` and `\\` in metadata do not hide a name that occurs twice."""
    entry = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    for metadata in (r'{"x": "\"\\\""}', r'{"x": "\\\\"}', r'{"\"": "{\"a\": 1}"}'):
        for count in (1, 2):
            text = f'{{"__metadata__": {metadata}, {", ".join([f"{chr(34)}a{chr(34)}: {entry}"] * count)}}}'
            file = tmp_path / "x.safetensors"
            file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"\0" * 8)
            if count == 1:
                assert list(read_header(file).tensors) == ["a"]
            else:
                with pytest.raises(inventory.OverrideArchMismatch, match="occurs twice"):
                    read_header(file)


def test_empty_tensors_keep_their_place(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(0), "b": torch.ones(2), "c": torch.zeros(0, 4), "d": torch.ones(3)}
    header = read_header(save(tmp_path / "x.safetensors", tensors))
    assert set(header.tensors) == set(tensors)
