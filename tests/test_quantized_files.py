"""Quantized files through the whole way: containers, converters, plan, build, forward."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel

import transplant
from kitchen import Written, float8, float8_by_rows, int8
from test_formats_4bit import awq, random_w4a4, w4a4, w4a8
from test_formats_blocks import mxfp8, nvfp4
from test_plan import base_folder
from tiny_models import random_z_image, save, tiny_z_image_config, to_comfyui, with_prefix, write_sparse
from transplant import small_scales
from transplant.build import build
from transplant.checkpoint.header import read_header
from transplant.checkpoint.naming import normalise
from transplant.errors import UnsupportedQuantization
from transplant.formats.containers import read_quantization
from transplant.plan import plan
from transplant.quantized import LayerError

Writer = Callable[[torch.Tensor], Written]

WRITERS: dict[str, Writer] = {
    "int8 per row": int8,
    "int8 per tensor": lambda weight: int8(weight, per_row=False),
    "int8 convrot": lambda weight: int8(weight, convrot=16),
    "float8_e4m3fn": float8,
    "float8_e5m2": lambda weight: float8(weight, torch.float8_e5m2),
}
ALL_WRITERS: dict[str, Writer] = {
    **WRITERS,
    "float8 per row": float8_by_rows,
    "nvfp4": nvfp4,
    "mxfp8": mxfp8,
    "w4a4": lambda weight: w4a4(weight, 16),
    "w4a8": lambda weight: w4a8(weight, 16),
    "w6a8": lambda weight: w4a8(weight, 16, bits=6),
    "w4a8 table": lambda weight: w4a8(weight, 16, 64),
    "awq": awq,
}
"""The same for every form."""

QUANTIZED = ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


@pytest.fixture(scope="module")
def network() -> ZImageTransformer2DModel:
    """A small network whose widths every format can hold."""
    return random_z_image(tiny_z_image_config(dim=96), seed=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), tiny_z_image_config(dim=96))


def quantize(state: dict[str, torch.Tensor], writer: Writer) -> tuple[dict[str, torch.Tensor], dict[str, Written]]:
    """A ComfyUI-layout file whose blocks are quantized, fused qkv included, and the layers that were."""
    stored: dict[str, torch.Tensor] = {}
    layers: dict[str, Written] = {}
    for name, tensor in to_comfyui(state).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(QUANTIZED) and name != layer:
            layers[layer] = writer(tensor)
            stored |= layers[layer].stored(layer)
        else:
            stored[name] = tensor
    return stored, layers


def expected_weights(layers: dict[str, Written], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Dequantize with comfy-kitchen, then split, in the model's own names."""
    weights: dict[str, torch.Tensor] = {}
    for name, written in layers.items():
        value = written.value(dtype)
        if name.endswith("qkv"):
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                weights[f"{name.removesuffix('qkv')}to_{part}.weight"] = rows
        else:
            weights[f"{name.replace('attention.out', 'attention.to_out.0')}.weight"] = value
    return weights


def dequantized(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight that a loaded layer computes with."""
    module = model.get_submodule(name.removesuffix(".weight"))
    names = ("weight", "scale", "scale_2", "zero_point")
    return module.sdnq_dequantizer(**{n: getattr(module, n) for n in names})


INPUTS = ([torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))], torch.tensor([0.3]))


def run(model: torch.nn.Module, width: int) -> torch.Tensor:
    text = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        dtype = model.dtype
        return model([INPUTS[0][0].to(dtype)], INPUTS[1], [text.to(dtype)]).sample[0]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", WRITERS)
def test_file_equals_dequantize_then_split(
    kind: str, prefix: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """B11: every layer, and the network's output, equal comfy-kitchen's weights placed by hand."""
    stored, layers = quantize(network.state_dict(), WRITERS[kind])
    file = save(tmp_path / "x.safetensors", with_prefix(stored, prefix))
    planned = plan(file, base, dtype=torch.float32, use_mmap=False)
    assert planned.quantization == "markers"
    model = build(planned).transformer
    by_hand = random_z_image(tiny_z_image_config(dim=96), seed=3, dtype=torch.float32).eval()
    expected = expected_weights(layers, torch.float32)
    assert len(expected) == sum(target.form is not None for target in planned.targets)
    for name, value in expected.items():
        assert torch.equal(dequantized(model, name), value), name
        by_hand.get_parameter(name).data = value.contiguous()
    width = network.config.cap_feat_dim
    assert torch.equal(run(model, width), run(by_hand, width))


@pytest.mark.parametrize("kind", WRITERS)
def test_size_is_as_planned(kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """The plan's bytes are the loaded model's bytes, within one per cent."""
    stored, _ = quantize(network.state_dict(), WRITERS[kind])
    planned = plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.bfloat16)
    model = build(planned).transformer
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert abs(held - planned.resident_bytes) <= 0.01 * held


@pytest.mark.parametrize("kind", WRITERS)
def test_model_is_a_quantized_one(kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """diffusers refuses a cast, knows the method, and every consumer sees the compute dtype (A08)."""
    stored, _ = quantize(network.state_dict(), WRITERS[kind])
    file = save(tmp_path / "x.safetensors", stored)
    model = transplant.load_transformer(file, base=base, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="quantized"):
        model.to(torch.float16)
    assert model.is_quantized
    assert model.quantization_method == "sdnq"
    assert model.config.quantization_config["quant_method"] == "sdnq"
    assert model.dtype == torch.bfloat16
    assert isinstance(model, ZImageTransformer2DModel)
    assert model.to("cpu") is model
    assert run(model, network.config.cap_feat_dim).isfinite().all()


def as_header(stored: dict[str, torch.Tensor], prefix: str, bare_strings: bool = False) -> dict[str, str]:
    """The markers as header metadata; they are taken out of `stored`."""
    entries = {}
    for name in [n for n in stored if n.endswith(".comfy_quant")]:
        entry = json.loads(bytes(stored.pop(name).tolist()))
        entries[prefix + name.removesuffix(".comfy_quant")] = entry["format"] if bare_strings else entry
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": entries})}


@pytest.mark.parametrize("tensor_prefix", ["", "model.diffusion_model.", "net."])
@pytest.mark.parametrize("name_prefix", ["", "model.diffusion_model.", "net.", "same"])
def test_header_names_with_and_without_prefix(
    name_prefix: str, tensor_prefix: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """A03: names in the header carry the tensors' prefix, another, or none."""
    stored, layers = quantize(network.state_dict(), float8)
    metadata = as_header(stored, tensor_prefix if name_prefix == "same" else name_prefix, bare_strings=True)
    file = save(tmp_path / "x.safetensors", with_prefix(stored, tensor_prefix), metadata)
    planned = plan(file, base, dtype=torch.float32)
    assert planned.quantization == "header"
    model = build(planned).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(model, name), value)


def test_header_wins_over_markers(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """Both at once: what the header says counts."""
    stored, layers = quantize(network.state_dict(), lambda weight: int8(weight, convrot=16))
    markers = {name: tensor for name, tensor in stored.items() if name.endswith(".comfy_quant")}
    metadata = as_header(stored, "")
    wrong = {name: marker(b'{"format": "int8_tensorwise"}') for name in markers}
    file = save(tmp_path / "x.safetensors", stored | wrong, metadata)
    planned = plan(file, base, dtype=torch.float32)
    assert planned.quantization == "header and markers"
    model = build(planned).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(model, name), value)


@pytest.mark.parametrize("marker", [None, torch.empty(0), torch.empty(2), torch.zeros(1)])
@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale"])
def test_scales_without_a_declaration(
    spelling: str, marker: torch.Tensor | None, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """A01, B17: legacy and bare scales; the `scaled_fp8` flag has any number of elements, its dtype means nothing."""
    stored, layers = quantize(network.state_dict(), float8)
    legacy: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if not name.endswith(".comfy_quant"):
            legacy[name.replace("weight_scale", spelling)] = tensor
    if spelling == "scale_weight":
        legacy |= {f"{layer}.scale_input": torch.tensor(0.7) for layer in list(layers)[::2]}
    if marker is not None:
        legacy["scaled_fp8"] = marker.to(torch.float8_e5m2)
    planned = plan(
        save(tmp_path / "x.safetensors", with_prefix(legacy, "model.diffusion_model.")), base, dtype=torch.float32
    )
    assert planned.quantization == ("legacy" if spelling == "scale_weight" else "scales")
    model = build(planned).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(model, name), value)
    assert all(layer.full_precision_matmul == (marker is not None and len(marker) == 2 and spelling == "scale_weight")
               for layer in planned.layers.values())  # fmt: skip


def test_mixed_formats(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """B22: each layer by its own marker, rotated and plain ones, the rest plain."""
    writers = [int8, lambda w: int8(w, convrot=16), float8, lambda w: float8(w, torch.float8_e5m2)]
    count = iter(range(1000))
    stored, layers = quantize(network.state_dict(), lambda weight: writers[next(count) % len(writers)](weight))
    planned = plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.float32)
    model = build(planned).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(model, name), value)


def test_diffusers_layout(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """B32: scales follow their weights in the diffusers layout too, with a stray key and a prefix."""
    stored: dict[str, torch.Tensor] = {"norm_final.weight": torch.full((3,), float("nan"))}
    layers: dict[str, Written] = {}
    for name, tensor in network.state_dict().items():
        if ".feed_forward." in name:
            layers[name] = int8(tensor)
            stored |= layers[name].stored(name.removesuffix(".weight"))
        else:
            stored[name] = tensor
    planned = plan(save(tmp_path / "x.safetensors", with_prefix(stored, "diffusion_model.")), base, dtype=torch.float32)
    assert planned.layout == "diffusers"
    model = build(planned).transformer
    for name, written in layers.items():
        assert torch.equal(dequantized(model, name), written.value(torch.float32))


def test_layer_whose_dtype_is_read_is_decoded(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """A09, B14: the timestep embedder casts its input to its weight's dtype, so that is a value, scale and all."""
    state = to_comfyui(network.state_dict())
    written = float8(state.pop("t_embedder.mlp.0.weight"))
    file = save(tmp_path / "x.safetensors", state | written.stored("t_embedder.mlp.0"))
    planned = plan(file, base, dtype=torch.float32)
    assert "decoded" in planned.warnings[0]
    model = build(planned).transformer
    assert torch.equal(model.t_embedder.mlp[0].weight, written.value(torch.float32))
    assert run(model, network.config.cap_feat_dim).isfinite().all()


def broken(network: ZImageTransformer2DModel, change: Callable[[dict[str, torch.Tensor]], object]) -> dict:
    stored, _ = quantize(network.state_dict(), int8)
    change(stored)
    return stored


LAYER = "layers.0.feed_forward.w1"


def marker(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop(f"{LAYER}.weight_scale"), "lacks weight_scale"),
        (lambda s: s.pop(f"{LAYER}.comfy_quant"), "nothing says in which format"),
        (lambda s: s.update({f"{LAYER}.comfy_quant": marker(b"{")}), "not valid JSON"),
        (lambda s: s.update({f"{LAYER}.comfy_quant": marker(b'{"group": 3}')}), "names no format"),
        (lambda s: s.update({f"{LAYER}.comfy_quant": marker(b'{"format": "int8_blockwise"}')}), "int8_blockwise"),
        (lambda s: s.update({f"{LAYER}.comfy_quant": marker(b'{"format": "float9_made_up"}')}), "float9_made_up"),
        (lambda s: s.update({f"{LAYER}.comfy_quant": marker(b'{"format": "float8_e4m3fn"}')}), "stored as I8"),
        (lambda s: s.update({f"{LAYER}.weight_scale": torch.ones(3)}), r"shape \[3\]"),
        (lambda s: s.update({f"{LAYER}.weight_zeros": torch.ones(3)}), "no use for its weight_zeros"),
        (lambda s: s.update({"layers.0.attention_norm1.weight_scale": torch.ones(())}), "with a scale"),
        (lambda s: s.update({"nowhere.weight_scale": torch.ones(())}), "no weight"),
        (lambda s: s.update({"nowhere.comfy_quant": marker(b'{"format": "int8_tensorwise"}')}), "no such weight"),
        (lambda s: s.update({f"{LAYER}.absmax": torch.ones(3)}), "bitsandbytes"),
    ],
)
def test_declarations_that_cannot_be(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, network: ZImageTransformer2DModel, base: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A13, B19, B31, C15: refused by name before a weight is read, never loaded as raw codes."""
    file = save(tmp_path / "x.safetensors", broken(network, change))
    with pytest.raises(UnsupportedQuantization, match=said):
        plan(file, base)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}x", '{"layers": 3}', '{"layers": {"a": 3}}', '{"a": {"b": 1}}'])
def test_headers_that_cannot_be(text: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """B19: a declaration that cannot be read is an error, not an unquantized file."""
    stored, _ = quantize(network.state_dict(), float8)
    as_header(stored, "")
    file = save(tmp_path / "x.safetensors", stored, {"_quantization_metadata": text})
    with pytest.raises(UnsupportedQuantization):
        plan(file, base)


@pytest.mark.parametrize("nest", [lambda e: e, lambda e: {"layers": {"layers": e}}, lambda e: {"layers": e}])
def test_headers_nested_otherwise(
    nest: Callable[[dict], dict], network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """B19: layers at the top, nested twice, parameters under `params`."""
    stored, layers = quantize(network.state_dict(), lambda weight: int8(weight, convrot=16))
    entries = json.loads(as_header(stored, "")["_quantization_metadata"])["layers"]
    nested = {
        name: {"format": entry["format"], "params": {k: v for k, v in entry.items() if k != "format"}}
        for name, entry in entries.items()
    }
    file = save(tmp_path / "x.safetensors", stored, {"_quantization_metadata": json.dumps(nest(nested))})
    model = build(plan(file, base, dtype=torch.float32)).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(model, name), value)


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "NaN"), (math.inf, "infinity"), (0.0, "zero"), (-1.0, "a negative value")]
)
@pytest.mark.parametrize(
    ("writer", "role"),
    [
        ("int8 per row", "weight_scale"), ("int8 per tensor", "weight_scale"), ("float8_e4m3fn", "weight_scale"),
        ("float8_e5m2", "weight_scale"), ("w4a4", "weight_scale"), ("nvfp4", "weight_scale_2"),
        ("w4a8", "weight_s_channel"),
    ],
)  # fmt: skip
def test_small_scales_are_judged_in_the_plan(
    writer: str, role: str, value: float, said: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """One a tensor or a row: what loading would refuse is refused before, naming the layer."""
    writers = {**ALL_WRITERS, "w4a4": lambda weight: random_w4a4(tuple(weight.shape), 16)}
    stored, _ = quantize(network.state_dict(), writers[writer])
    assert plan(save(tmp_path / "good.safetensors", stored), base)
    scale = stored[f"{LAYER}.{role}"] = stored[f"{LAYER}.{role}"].clone()
    scale.view(-1)[-1] = value
    with pytest.raises(UnsupportedQuantization, match=rf"{LAYER}.*its {role} holds.* {said}"):
        plan(save(tmp_path / "bad.safetensors", stored), base)


def test_a_plan_reads_bounded_bytes_of_scales(
    network: ZImageTransformer2DModel, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest first; what is beyond the bound is judged when it is loaded."""
    stored, _ = quantize(network.state_dict(), int8)
    rows = {name: tensor.nbytes for name, tensor in stored.items() if name.endswith("weight_scale")}
    largest, smallest = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
    monkeypatch.setattr(small_scales, "MOST_BYTES", sum(rows.values()) - 1)
    for name, early in ((largest, False), (smallest, True)):
        bad = {**stored, name: torch.full_like(stored[name], math.nan)}
        file = save(tmp_path / "x.safetensors", bad)
        with pytest.raises(UnsupportedQuantization, match="NaN"):
            planned = plan(file, base)
            assert not early
            build(planned)


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="this system cannot tell holes")
def test_layers_that_were_never_written_are_not_judged(tmp_path: Path) -> None:
    """A sparse file of nothing but a header has zeros everywhere; of a written one a zero is refused."""
    shapes = {"a.weight": ("I8", [512, 64]), "a.weight_scale": ("F32", [512, 1])}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": {"format": "int8_tensorwise"}}})}
    for contents in ({}, {"a.weight": bytes(512 * 64)}):
        header = read_header(write_sparse(tmp_path / "x.safetensors", shapes, metadata, contents=contents))
        layers = read_quantization(header, normalise(header.path, header.tensors)).layers
        assert list(layers) == ["a"]
        if contents:
            with pytest.raises(LayerError, match="a: its weight_scale holds zero"):
                small_scales.check_small_scales(header, layers)
        else:
            small_scales.check_small_scales(header, layers)


def test_scales_that_a_plan_leaves_are_judged_before_anything_runs(
    network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """NaN among block scales is found and named while building."""
    stored, _ = quantize(network.state_dict(), mxfp8)
    stored[f"{LAYER}.weight_scale"].view(torch.uint8)[0] = 0xFF  # e8m0 has one NaN
    with pytest.raises(UnsupportedQuantization, match=rf"{LAYER}.*NaN"):
        transplant.load_transformer(save(tmp_path / "x.safetensors", stored), base=base)
