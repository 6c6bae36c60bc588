"""Checkpoints in several files are one: listed, read, planned, built and hashed; what is missing is named."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

import gguf_files
from kitchen import int8
from test_session import TestHost
from tiny_models import random_z_image, save, tiny_base, tiny_z_image_config, to_comfyui
from transplant import errors
from transplant.build import build
from transplant.checkpoint.header import FileStamp, read_header
from transplant.checkpoint.reader import open_reader
from transplant.checkpoint.shards import choices, members, title
from transplant.cli import main
from transplant.digest import Digests
from transplant.hosts.standalone.folders import list_overrides
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.slots import Override
from transplant.view import plan_json, plan_rows

INDEX = "diffusion_pytorch_model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
Paths = list[Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"), 0, torch.float32)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_z_image(tiny_z_image_config(), 7, torch.float32)


def split(
    folder: Path, tensors: Mapping[str, torch.Tensor], stem: str = "x", count: int = 3, pad: int = 0
) -> list[Path]:
    """Tensors dealt out to the files of a set. `pad` makes the first file's size no multiple of anything."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    paths = [folder / f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        part = {name: tensors[name].contiguous() for name in names[number::count]}
        if pad and number == 0:
            part["x_pad_token_bytes"] = torch.zeros(pad, dtype=torch.uint8)
        save_file(part, path, {"format": "pt"})
    return paths


def indexed(folder: Path, tensors: Mapping[str, torch.Tensor], files: list[Path], name: str = INDEX) -> Path:
    weight_map = {key: files[number % len(files)].name for number, key in enumerate(tensors)}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


# Which files


def test_a_file_of_a_set_stands_for_the_set(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    assert all(members(path) == tuple(paths) for path in paths)
    assert members(indexed(tmp_path, model.state_dict(), paths)) == tuple(paths)
    assert [title(path) for path in paths] == ["x"] * 3


@pytest.mark.parametrize("name", [
    "x.safetensors", "x-1-of-3.safetensors", "x-00000-of-00003.safetensors", "x-00004-of-00003.safetensors",
    "x-00001-of-99999.safetensors", "x-00001-of-00003.bin", "-00001-of-00003.safetensors",
    "x-\u0660\u0660\u0660\u0660\u0661-of-00003.safetensors",
])  # fmt: skip
def test_other_names_are_single_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert members(tmp_path / name) == (tmp_path / name,)


def test_a_set_of_one_is_a_file(tmp_path: Path, model: Any, base: Path) -> None:
    (path,) = split(tmp_path, model.state_dict(), count=1)
    assert read_header(path).parts == ()
    assert plan(path, base).header.path == path


@pytest.mark.parametrize("gone", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("with_index", [False, True])
def test_missing_files_are_named(gone: tuple[int, ...], with_index: bool, tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    chosen = [path for number, path in enumerate(paths) if number not in gone][:1]
    chosen += [indexed(tmp_path, model.state_dict(), paths)] if with_index else []
    for number in gone:
        paths[number].unlink()
    for path in chosen:
        with pytest.raises(errors.MissingShards) as refusal:
            read_header(path)
        assert refusal.value.missing == tuple(paths[number].name for number in gone)
        assert all(paths[number].name in str(refusal.value) for number in gone)
        assert refusal.value.count == 3


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\0",
    '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}',
    '{"weight_map": {"a": "b/x.safetensors"}}', '{"weight_map": {"a": ""}}', '{"weight_map": {"a": ".."}}',
    '{"weight_map": {"a": "b\\\\x.safetensors"}}', "[" * 100_000,
])  # fmt: skip
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    index = tmp_path / INDEX
    index.write_text(text)
    for path in (index, tmp_path):
        with pytest.raises(errors.BadIndex, match="Download the index again"):
            members(path)
        assert FileStamp.of(path)


# Reading


@pytest.mark.parametrize("use_mmap", [True, False])
def test_every_tensor_is_read_from_its_own_file(use_mmap: bool, tmp_path: Path, model: Any) -> None:
    """Also where a file's size is odd, and rows of a tensor."""
    state = model.state_dict()
    header = read_header(split(tmp_path, state, pad=13)[0])
    assert set(header.tensors) == {*state, "x_pad_token_bytes"}
    with open_reader(header, use_mmap) as reader:
        for name, tensor in state.items():
            assert torch.equal(reader.read(header.tensors[name]), tensor), name
            if tensor.ndim == 2 and len(tensor) > 5:
                assert torch.equal(reader.read(header.tensors[name], 1, 5), tensor[1:5])


@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_file_that_changes_after_planning_is_named(use_mmap: bool, tmp_path: Path, model: Any, base: Path) -> None:
    paths = split(tmp_path, model.state_dict())
    planned = plan(paths[0], base, use_mmap=use_mmap)
    os.utime(paths[1], ns=(1, 1))
    with pytest.raises(errors.FileChanged, match=paths[1].name):
        build(planned)


def test_two_files_with_one_tensor_are_refused(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    name = next(iter(model.state_dict()))
    save_file({name: model.state_dict()[name]}, paths[1])
    with pytest.raises(errors.BadHeader, match=rf"{name}.*{paths[1].name}.*another file of the set"):
        read_header(paths[0])


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        metadata = {"format": f"{number}", "_quantization_metadata": json.dumps({"layers": {f"{number}": {}}})}
        save_file({f"w{number}": torch.zeros(2)}, tmp_path / f"x-0000{number}-of-00002.safetensors", metadata)
    with pytest.raises(errors.BadHeader, match="contradict each other in '_quantization_metadata'"):
        read_header(tmp_path / "x-00001-of-00002.safetensors")


def test_a_damaged_part_is_named(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    with paths[2].open("r+b") as file:
        file.truncate(paths[2].stat().st_size - 10)
    with pytest.raises(errors.TruncatedFile, match=paths[2].name):
        read_header(paths[0])


def test_stamp_changes_with_every_part(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    stamps = {FileStamp.of(paths[0]), read_header(paths[1]).stamp}
    assert len(stamps) == 1
    for number, path in enumerate(paths):
        os.utime(path, ns=(number + 5, number + 5))
        stamps.add(FileStamp.of(paths[0]))
    paths[1].unlink()
    stamps.add(FileStamp.of(paths[0]))
    assert len(stamps) == 5


# Planning and building


def as_a_set(kind: str, folder: Path, state: Tensors) -> Path:
    """What a user would choose."""
    if kind == "saved by huggingface_hub":
        folder.mkdir()
        save_torch_state_dict(state, folder, filename_pattern="x{suffix}.safetensors", max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        return folder / "x.safetensors.index.json"
    paths = split(folder, state)
    return indexed(folder, state, paths, "x.safetensors.index.json") if kind == "index" else paths[1]


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("kind", ["files", "index", "saved by huggingface_hub"])
def test_a_set_is_built_as_one_file(kind: str, use_mmap: bool, tmp_path: Path, model: Any, base: Path) -> None:
    state = to_comfyui(model.state_dict())
    planned = plan(as_a_set(kind, tmp_path / "set", state), base, use_mmap=use_mmap)
    one = plan(save(tmp_path / "one.safetensors", state), base, use_mmap=use_mmap)
    assert (planned.resident_bytes, planned.layout) == (one.resident_bytes, one.layout)
    assert planned.mapped_bytes == one.mapped_bytes
    built, expected = build(planned).transformer.state_dict(), model.state_dict()
    assert built.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in built.items())
    assert dict(plan_rows(planned))["file"].startswith(f"{planned.header.path.name} ({len(planned.header.parts)} files")
    assert len(plan_json(planned)["files"]) == len(planned.header.parts)


def test_a_folder_that_diffusers_saved(tmp_path: Path, model: Any, base: Path) -> None:
    """Sharded, whole, and without the index."""
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "bare", max_shard_size="100KB")
    (tmp_path / "bare" / INDEX).unlink()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for name in ("sharded", "whole", "bare"):
        built = build(plan(tmp_path / name, base)).transformer.state_dict()
        assert all(torch.equal(tensor, built[key]) for key, tensor in model.state_dict().items()), name
    with pytest.raises(errors.UnreadableFile, match="is a folder without"):
        read_header(tmp_path)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ((), "It holds no checkpoint: choose a .safetensors"),
        (("x.bin", "config.json"), "It holds pickled weights, which are never opened"),
        (("x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"), "Choose in it x-00001-of-00002.safetensors"),
        (("b.gguf", "a.safetensors"), "Choose in it a.safetensors, b.gguf"),
        (
            ("model_index.json", "transformer/diffusion_pytorch_model.safetensors", f"vae/{INDEX}"),
            "a whole pipeline: choose transformer in it, or use it as base model",
        ),
    ],
)
def test_a_folder_without_a_model_names_the_way_out(tmp_path: Path, files: tuple[str, ...], told: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(errors.UnreadableFile) as caught:
        read_header(tmp_path)
    assert caught.value.problem.startswith("is a folder without diffusion_pytorch_model.safetensors")
    assert told in caught.value.remedy
    assert caught.value.remedy.count("x-0000") < 2


def test_quantized_layers_spread_over_files(tmp_path: Path, model: Any, base: Path) -> None:
    """Marker, codes and scale of one layer lie in different files."""
    state = to_comfyui(model.state_dict())
    name = "layers.0.feed_forward.w1"
    written = int8(state.pop(f"{name}.weight"))
    paths = split(tmp_path, {**state, **written.stored(name)}, pad=0)
    planned = plan(paths[0], base)
    parts = {planned.header.part_of(planned.header.tensors[key]).path for key in written.stored(name)}
    assert len(parts) == 3
    assert [layer.format for layer in planned.layers.values()] == ["int8_tensorwise"]
    layer: Any = build(planned).transformer.get_submodule(name)
    assert (
        torch.equal(layer.sdnq_dequantizer(layer.weight, layer.scale).float(), written.value(torch.float32))
        if (hasattr(layer, "sdnq_dequantizer"))
        else False
    )


def test_gguf_in_several_files(tmp_path: Path, model: Any, base: Path) -> None:
    state = to_comfyui(model.state_dict())
    names = list(state)
    for number in range(2):
        part = {name: state[name] for name in names[number::2]}
        gguf_files.write(tmp_path / f"x-{number + 1:05d}-of-00002.gguf", part)
    built = build(plan(tmp_path / "x-00001-of-00002.gguf", base, dtype=torch.float32)).transformer.state_dict()
    assert all(torch.equal(tensor, built[key]) for key, tensor in model.state_dict().items())


def test_hash_is_that_of_all_files(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    expected = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:10]
    digests = Digests(tmp_path / "cache.json")
    assert [digests.short(path) for path in paths] == [expected] * 3
    paths[2].unlink()
    with pytest.raises(OSError, match=paths[2].name):
        Digests().short(paths[0])


def test_a_missing_file_is_remembered_until_it_comes(tmp_path: Path, model: Any, base: Path) -> None:
    paths = split(tmp_path, to_comfyui(model.state_dict()))
    kept = paths[2].read_bytes()
    paths[2].unlink()
    session = Session(TestHost())
    session.load_base(base)
    override = Override("x", paths[0])
    first = session.choose(override).refused
    assert isinstance(first, errors.MissingShards)
    assert session.choose(override).refused is first
    paths[2].write_bytes(kept)
    assert session.choose(override).changed
    assert session.primary.selected == "x"
    assert not session.choose(override).changed


# Lists


def test_the_list_has_a_set_once(tmp_path: Path, model: Any) -> None:
    root, state = tmp_path / "UNET", model.state_dict()
    split(root, state, "set")
    split(root / "sub", state, "set")
    split(root / "incomplete", state, "half")[0].unlink()
    model.save_pretrained(root / "saved", max_shard_size="100KB")
    model.save_pretrained(root / "deep" / "whole")
    save(root / "saved" / "extra.safetensors", state)
    named = split(root / "named", state, "part", 2)
    for number, path in enumerate(named):
        path.rename(root / "named" / f"p{number}.safetensors")
    indexed(
        root / "named", state, [root / "named" / f"p{number}.safetensors" for number in range(2)], f"own{INDEX[23:]}"
    )
    indexed(root, state, split(root, state, "both", 2), f"both{INDEX[23:]}")
    save(root / "single.safetensors", state)
    listed = list_overrides(tmp_path)
    assert list(listed) == [
        "both", "extra", "half", "own", "saved", "set-00001-of-00003.safetensors", "single",
        "sub/set-00001-of-00003.safetensors", "whole",
    ]  # fmt: skip
    assert listed["saved"] == root / "saved"
    assert listed["half"].name == "half-00002-of-00003.safetensors"
    assert all(len(members(listed[name])) > 1 for name in ("both", "own", "saved"))


def test_weights_of_diffusers_in_the_root_keep_their_name(tmp_path: Path, model: Any) -> None:
    """The folder of all models is no model."""
    model.save_pretrained(tmp_path / "UNET")
    assert list(list_overrides(tmp_path)) == ["diffusion_pytorch_model"]


def test_choices_have_no_file_twice(tmp_path: Path, model: Any) -> None:
    paths = split(tmp_path, model.state_dict())
    index = indexed(tmp_path, model.state_dict(), paths, "x.safetensors.index.json")
    assert choices(tmp_path, [*paths, index]) == [paths[0]]
    index.write_text("{")
    assert choices(tmp_path, [*paths, index]) == [paths[0], index]


def test_command_line(tmp_path: Path, model: Any, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = split(tmp_path, to_comfyui(model.state_dict()))
    assert main(["inspect", str(paths[1]), "--base", str(base), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 3
    paths[2].unlink()
    assert main(["inspect", str(paths[1])]) == 2
    assert paths[2].name in capsys.readouterr().err
