"""Models that were saved load again exactly: the same bytes, the same outputs; and what other loaders make of them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from sdnq import load_sdnq_model

import transplant
from gguf_files import quantize as gguf_quantize
from gguf_files import write as write_gguf
from test_plan import base_folder
from test_quantized_files import ALL_WRITERS, dequantized, quantize, run
from tiny_models import random_z_image, save, tiny_z_image_config, to_comfyui
from transplant.build import build
from transplant.conversion import needs_transplant
from transplant.errors import (
    MissingShards,
    MissingTensors,
    OverrideArchMismatch,
    SavedQuantizedFolder,
    ShapeMismatch,
    UnexpectedTensors,
    UnreadableFile,
    UnsupportedQuantization,
)
from transplant.formats.base import Portable
from transplant.plan import plan
from transplant.saved import load_folder
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

CONFIG = tiny_z_image_config(dim=192, n_layers=1)
WIDTH = CONFIG["cap_feat_dim"]


@pytest.fixture(scope="module")
def network() -> ZImageTransformer2DModel:
    return random_z_image(CONFIG, seed=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, network: ZImageTransformer2DModel) -> Path:
    """A file of every format."""
    folder = tmp_path_factory.mktemp("files")
    for kind, writer in ALL_WRITERS.items():
        save(folder / f"{kind}.safetensors", quantize(network.state_dict(), writer)[0])
    return folder


def load(file: Path, base: Path, dtype: torch.dtype, compute: Compute | None = None) -> Any:
    """Read, not mapped: how memory lies decides the last bit of a sum on the CPU."""
    return build(plan(file, base, dtype=dtype, use_mmap=False, compute=compute)).transformer


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Byte for byte, and in what they compute."""
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (second[name].dtype, second[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(second[name]), as_bytes(tensor)), name
    assert torch.equal(run(one, WIDTH), run(other, WIDTH))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ALL_WRITERS)
def test_saved_models_load_again_exactly(
    kind: str, dtype: torch.dtype, files: Path, base: Path, tmp_path: Path
) -> None:
    """And who else loads them so: sdnq.load_sdnq_model equals ours where needs_transplant says nothing, only there."""
    planned = plan(files / f"{kind}.safetensors", base, dtype=dtype, use_mmap=False)
    model = build(planned).transformer
    model.save_pretrained(tmp_path / "x")
    again = load_folder(tmp_path / "x", use_mmap=False)
    assert_same(model, again)
    assert again.is_quantized and again.dtype == dtype
    with pytest.raises(ValueError, match="quantized"):
        again.to(torch.float16)
    for name, layer in again.named_modules():
        if hasattr(layer, "sdnq_dequantizer"):
            first = vars(model.get_submodule(name).sdnq_dequantizer)
            second = vars(layer.sdnq_dequantizer)
            assert type(layer.sdnq_dequantizer) is type(model.get_submodule(name).sdnq_dequantizer)
            differing = {key for key in first if first[key] != second[key]}
            assert {key for key in differing if "zero_point" not in key} <= {"original_stride"}, differing
    weights = [f"{target.module}.weight" for target in planned.targets if target.form]
    assert loads_exactly_with_sdnq(tmp_path / "x", model, weights, dtype) == (not needs_transplant(planned))


def loads_exactly_with_sdnq(folder: Path, model: Any, weights: list[str], dtype: torch.dtype) -> bool:
    """Whether SDNQ's own loading gives the same weights."""
    try:
        theirs = load_sdnq_model(str(folder), dtype=dtype)
        return all(torch.equal(dequantized(theirs, name), dequantized(model, name)) for name in weights)
    except RuntimeError:
        return False


@pytest.mark.parametrize("kind", ["int8 per tensor", "float8_e4m3fn", "nvfp4", "w4a8 table"])
def test_mapped_models_can_be_saved(kind: str, files: Path, base: Path, tmp_path: Path) -> None:
    """Also twice. Parts of a fused layer have one scalar scale: each in memory of its own, else it is not saved."""
    model = transplant.load_transformer(files / f"{kind}.safetensors", base=base, dtype=torch.bfloat16, use_mmap=True)
    for folder in ("once", "twice"):
        model.save_pretrained(tmp_path / folder)
        again = transplant.load_transformer(tmp_path / folder, base=base)
        for name, tensor in model.state_dict().items():
            assert torch.equal(as_bytes(again.state_dict()[name]), as_bytes(tensor)), name
        model = again


@pytest.mark.parametrize("kind", ["int8 per tensor", "float8_e4m3fn", "w4a4"])
def test_plain_from_pretrained_is_exact_in_fp32(kind: str, files: Path, base: Path, tmp_path: Path) -> None:
    """diffusers casts scales to the dtype it is given: nothing is lost where that is fp32."""
    model = load(files / f"{kind}.safetensors", base, torch.float32)
    model.save_pretrained(tmp_path / "x")
    theirs = ZImageTransformer2DModel.from_pretrained(tmp_path / "x", dtype=torch.float32)
    for name, layer in model.named_modules():
        if hasattr(layer, "sdnq_dequantizer"):
            assert torch.equal(dequantized(theirs, f"{name}.weight"), dequantized(model, f"{name}.weight")), name


ON_LOAD = {
    "int8": QuantizeOnLoad("int8"),
    "uint4": QuantizeOnLoad("uint4"),
    "svd": QuantizeOnLoad("uint4", use_svd=True, svd_rank=8),
    "hadamard": QuantizeOnLoad("int8", use_hadamard=True),
    "float8": QuantizeOnLoad("float8_e4m3fn"),
    "mixed": QuantizeOnLoad("int8", modules_dtype_dict=(("uint4", ("layers.0.*",)),), modules_to_not_convert=("w2",)),
}


@pytest.mark.parametrize("kind", ON_LOAD)
def test_what_was_quantized_on_load(kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """Also layers that are too small, or whose dtype is read, and stayed as they were."""
    file = save(tmp_path / "x.safetensors", to_comfyui(network.to(torch.bfloat16).state_dict()))
    model = load(file, base, torch.bfloat16, Compute(quantize=ON_LOAD[kind]))
    model.save_pretrained(tmp_path / "x")
    assert_same(model, load_folder(tmp_path / "x", use_mmap=False))
    theirs = load_sdnq_model(str(tmp_path / "x"), dtype=torch.bfloat16)
    assert torch.equal(run_plain(theirs), run_plain(model))
    network.to(torch.float32)


def run_plain(model: Any) -> torch.Tensor:
    text = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    image = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        return model([image], torch.tensor([0.3]), [text]).sample[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_models_load_again_exactly(
    kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    stored = {
        name: gguf_quantize(value, kind) if ".feed_forward." in name else value
        for name, value in to_comfyui(network.state_dict()).items()
    }
    model = load(write_gguf(tmp_path / "x.gguf", stored), base, torch.bfloat16)
    model.save_pretrained(tmp_path / "x")
    again = load_folder(tmp_path / "x", use_mmap=False)
    assert_same(model, again)
    assert again.quantization_method == "gguf"
    with pytest.raises((AttributeError, KeyError, ValueError, TypeError)):  # never silently wrong
        ZImageTransformer2DModel.from_pretrained(tmp_path / "x", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["int8 per row", "float8_e4m3fn", "awq"])
@pytest.mark.parametrize("saved_with", ["", "auto"])
def test_quantized_matmul_is_chosen_anew(kind: str, saved_with: str, files: Path, base: Path, tmp_path: Path) -> None:
    """Saved with or without it, loaded with or without it: what a load of the file itself gives."""
    model = load(files / f"{kind}.safetensors", base, torch.bfloat16, Compute(quantized_matmul=saved_with))
    model.save_pretrained(tmp_path / "x")
    for wanted in ("", "auto"):
        compute = Compute(quantized_matmul=wanted)
        expected = load(files / f"{kind}.safetensors", base, torch.bfloat16, compute)
        got = load_folder(tmp_path / "x", use_mmap=False, compute=compute)
        assert torch.equal(run(got, WIDTH), run(expected, WIDTH))


def test_layers_in_full_precision_stay_so(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """The file's wish is SDNQ's list of modules that never use its matmul, saved and loaded."""
    stored, layers = quantize(network.state_dict(), ALL_WRITERS["int8 per row"])
    entry = {"format": "int8_tensorwise", "full_precision_matrix_mult": True}
    text = json.dumps(entry).encode()
    chosen = [name for name in layers if name.endswith("w1")]
    for name in chosen:
        stored[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    file = save(tmp_path / "x.safetensors", stored)
    for saved_with in ("", "auto"):
        model = load(file, base, torch.bfloat16, Compute(quantized_matmul=saved_with))
        assert {f"{name}.weight" for name in chosen} == set(model.quantization_config.modules_to_not_use_matmul)
        model.save_pretrained(tmp_path / "x")
        again = load_folder(tmp_path / "x", compute=Compute(quantized_matmul="auto"))
        for name, layer in again.named_modules():
            if hasattr(layer, "sdnq_dequantizer"):
                assert layer.sdnq_dequantizer.use_quantized_matmul == (name not in chosen), name


def test_layers_can_be_pickled(files: Path, base: Path) -> None:
    """C07: also those that rotate in fp32."""
    layer = load(files / "int8 convrot.safetensors", base, torch.bfloat16).layers[0].feed_forward.w1
    x = torch.randn(3, layer.in_features).bfloat16()
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_devices_without_fp8(files: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with fp8 codes takes the portable form there, as a file does."""
    for kind in ("float8_e4m3fn", "mxfp8", "nvfp4"):
        model = load(files / f"{kind}.safetensors", base, torch.float32)
        model.save_pretrained(tmp_path / kind)
        monkeypatch.setattr("transplant.sdnq_bridge.portable_on", lambda compute, device: Portable(True, True))
        again = load_folder(tmp_path / kind)
        layer = again.layers[0].feed_forward.w1
        assert layer.weight.dtype == torch.uint8 or layer.scale.dtype == torch.bfloat16 or kind == "nvfp4"
        assert torch.equal(
            dequantized(again, "layers.0.feed_forward.w1.weight"), dequantized(model, "layers.0.feed_forward.w1.weight")
        )
        monkeypatch.undo()


# What is refused


@pytest.fixture
def folder(files: Path, base: Path, tmp_path: Path) -> Path:
    """A saved model in three shards."""
    model = load(files / "nvfp4.safetensors", base, torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size=sum(p.nbytes for p in model.parameters()) // 3)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 3
    return tmp_path / "model"


def test_a_folder_is_not_chosen_as_a_file(folder: Path, base: Path) -> None:
    """Refused at once with the ways out, each of which works; what is no config of a folder is not looked at."""
    with pytest.raises(SavedQuantizedFolder, match=r"saved quantized \(sdnq\).*in the place of the transformer"):
        plan(folder, base)
    assert load_folder(folder).is_quantized
    assert transplant.load_transformer(folder, base=base).is_quantized
    (folder / "config.json").write_text("{")
    with pytest.raises(OverrideArchMismatch):
        plan(folder, base)


def test_shards(folder: Path, files: Path, base: Path) -> None:
    assert_same(load_folder(folder, use_mmap=False), load(files / "nvfp4.safetensors", base, torch.bfloat16))


def test_a_shard_that_is_missing(folder: Path) -> None:
    next(folder.glob("*2-of-*.safetensors")).unlink()
    with pytest.raises(MissingShards):
        load_folder(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "ZImageTransformer2DModel", **CONFIG}))
    with pytest.raises(UnreadableFile):
        load_folder(folder)


def test_folders_that_are_not_what_their_config_says(folder: Path, base: Path) -> None:
    """Each is refused by the name of a tensor, none is loaded wrong."""
    config = json.loads((folder / "config.json").read_text())

    def change(**entries: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **entries}))

    settings = config["quantization_config"]
    bare = {key: value for key, value in settings.items() if key != "modules_quant_config"}
    change(quantization_config={**bare, "weights_dtype": "int8", "scale_dtype": None})
    with pytest.raises(UnsupportedQuantization, match="no use for its scale_2"):
        load_folder(folder)
    change(quantization_config={**bare, "group_size": 32})
    with pytest.raises(UnsupportedQuantization, match=r"its scale is \["):
        load_folder(folder)
    change(quantization_config={**settings, "weights_dtype": "int99"})
    with pytest.raises(UnsupportedQuantization, match="int99"):
        load_folder(folder)
    change(quantization_config={**settings, "quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedQuantization, match="bitsandbytes"):
        load_folder(folder)
    change(quantization_config=None)
    with pytest.raises((UnexpectedTensors, ShapeMismatch)):
        load_folder(folder)
    change(n_layers=CONFIG["n_layers"] + 1)
    with pytest.raises(MissingTensors):
        load_folder(folder)
    with pytest.raises(MissingTensors):
        transplant.load_transformer(folder, base=base)
