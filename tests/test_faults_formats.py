"""Faults that users of such software have met with quantized files, and whole files with one thing wrong.

| fault | test |
|---|---|
| A01 scales lost or unused | test_quantized_files.py: test_scales_without_a_declaration, test_declarations_that_cannot_be |
| A03 header names with another prefix | test_quantized_files.py: test_header_names_with_and_without_prefix |
| A13 unknown formats | test_quantized_files.py: test_declarations_that_cannot_be; test_formats_4bit.py: test_formats_without_a_definition_are_refused_by_name |
| A14 rotation lost | test_a14_rotation_is_the_flags; test_formats.py: test_int8_convrot |
| A15 file's size doubled in memory | test_format_table.py: test_bytes_a_weight |
| A16 whole model in fp32 | test_a16_peak_is_one_layer |
| A19 a toggle on a file that is quantized already | test_a19_toggles_on_quantized_files_say_so; test_gguf.py: test_quantized_matmul_does_not_apply |
| B22 mixed formats | test_quantized_files.py: test_mixed_formats |
| B23 group sizes a layer | test_b23_each_layer_has_its_rotation |
| B25 nibbles and block layout | test_formats_blocks.py: test_every_nibble_is_decoded_by_the_e2m1_table, test_other_shapes_of_block_scales |
| B26 markers on embeddings, convolutions, norms | test_b26_markers_on_what_is_no_linear |
| B28 mixed dtypes | test_b28_one_compute_dtype |
| B29 overflow in fp16 | test_b29_overflow_is_told |
| B31 bitsandbytes | test_quantized_files.py: test_declarations_that_cannot_be |
| B32 diffusers' names | test_quantized_files.py: test_diffusers_layout |
| C13 names of files | test_c13_names_of_files; test_folders.py: test_names_are_found_however_their_accents_are_encoded |
| C15 e5m2 under another name | test_c15_stored_dtype_counts |
| C21 a quantized base model | test_conversion.py: test_a_base_model_with_a_converted_transformer |
"""  # noqa: E501  # a table

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitchen import Written, float8, int8
from test_formats_4bit import awq, random_w4a4, w4a8
from test_formats_blocks import mxfp8, nvfp4
from test_plan import base_folder
from test_quantized_files import dequantized, expected_weights, marker, quantize, run
from tiny_models import random_z_image, save, tiny_pipeline, tiny_z_image_config, to_comfyui
from transplant.build import build
from transplant.errors import NonFiniteWeight, TransplantError, UnsupportedQuantization
from transplant.generate import GenerationError, generate
from transplant.nonfinite import is_finite
from transplant.plan import plan
from transplant.request import Request
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

CONFIG = tiny_z_image_config(dim=96, n_layers=1)
LAYER = "layers.0.feed_forward.w1"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), CONFIG)


def network() -> Any:
    return random_z_image(CONFIG, seed=3, dtype=torch.float32).eval()


def test_a14_rotation_is_the_flags(base: Path, tmp_path: Path) -> None:
    """The same codes with and without the flag are different weights; the plan says which are rotated."""
    stored, layers = quantize(network().state_dict(), lambda weight: int8(weight, convrot=16))
    rotated = build(plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.float32)).transformer
    for name, value in expected_weights(layers, torch.float32).items():
        assert torch.equal(dequantized(rotated, name), value)
    for name in [name for name in stored if name.endswith(".comfy_quant")]:
        stored[name] = marker(b'{"format": "int8_tensorwise"}')
    plain = build(plan(save(tmp_path / "y.safetensors", stored), base, dtype=torch.float32)).transformer
    assert not torch.equal(dequantized(plain, f"{LAYER}.weight"), dequantized(rotated, f"{LAYER}.weight"))
    assert torch.equal(
        dequantized(plain, f"{LAYER}.weight"), stored[f"{LAYER}.weight"] * stored[f"{LAYER}.weight_scale"].view(-1, 1)
    )


def test_a16_peak_is_one_layer(base: Path, tmp_path: Path) -> None:
    """What a plan says beside the model is at most three times the largest weight in fp32."""
    for kind in (int8, float8, nvfp4):
        stored, _ = quantize(network().state_dict(), kind)
        planned = plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.bfloat16)
        largest = max(math.prod(target.shape) for target in planned.targets)
        assert planned.peak_bytes - (planned.resident_bytes - planned.mapped_bytes) <= 3 * 4 * largest


def test_a19_toggles_on_quantized_files_say_so(base: Path, tmp_path: Path) -> None:
    """FP8 storage and quantization on load leave a quantized file as it is, and each says so."""
    stored, _ = quantize(network().state_dict(), int8)
    file = save(tmp_path / "x.safetensors", stored)
    wanted = Compute(fp8_storage=True, quantize=QuantizeOnLoad("uint4"))
    asked, plain = (plan(file, base, dtype=torch.float32, compute=compute) for compute in (wanted, None))
    assert len(asked.warnings) == 2
    assert "FP8 storage has no effect" in " ".join(asked.warnings)
    one, other = build(asked).transformer.state_dict(), build(plain).transformer.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_b23_each_layer_has_its_rotation(base: Path, tmp_path: Path) -> None:
    """4, 16 and plain in one file; a size that does not divide is refused with layer, width and size."""
    sizes = iter([4, 16, 0] * 100)
    stored, layers = quantize(network().state_dict(), lambda weight: int8(weight, convrot=next(sizes)))
    model = build(plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.bfloat16)).transformer
    for name, value in expected_weights(layers, torch.bfloat16).items():
        error = (dequantized(model, name).float() - value.float()).norm() / value.float().norm()
        assert error < 1e-3, name
    wrong = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    stored[f"{LAYER}.comfy_quant"] = marker(json.dumps(wrong).encode())
    with pytest.raises(UnsupportedQuantization, match=rf"{LAYER}.*64 does not divide its 96 columns"):
        plan(save(tmp_path / "y.safetensors", stored), base)


def test_b26_markers_on_what_is_no_linear(base: Path, tmp_path: Path) -> None:
    """A table of tokens is decoded with its scale; a norm, which has no rows, is refused by name."""
    state = to_comfyui(network().state_dict())
    written = int8(state.pop("x_pad_token"))
    table = {name.replace("x_pad_token.weight", "x_pad_token"): t for name, t in written.stored("x_pad_token").items()}
    with pytest.raises(TransplantError, match="x_pad_token"):
        plan(save(tmp_path / "x.safetensors", state | table), base)
    norm = "layers.0.attention_norm1"
    codes = torch.ones(len(to_comfyui(network().state_dict())[f"{norm}.weight"]), dtype=torch.int8)
    declared = {
        f"{norm}.weight": codes, f"{norm}.weight_scale": torch.ones(()),
        f"{norm}.comfy_quant": marker(b'{"format": "int8_tensorwise"}'),
    }  # fmt: skip
    state = to_comfyui(network().state_dict()) | declared
    with pytest.raises(UnsupportedQuantization, match=rf"{norm}.*only matrices"):
        plan(save(tmp_path / "y.safetensors", state), base)


def test_b28_one_compute_dtype(base: Path, tmp_path: Path) -> None:
    """fp32 norms, fp16 biases and quantized layers in one file: all plain values end in the compute dtype."""
    stored, _ = quantize(network().state_dict(), float8)
    for name, tensor in stored.items():
        if tensor.dtype == torch.float32 and "scale" not in name:
            stored[name] = tensor.half() if name.endswith("bias") else tensor
    model = build(plan(save(tmp_path / "x.safetensors", stored), base, dtype=torch.bfloat16)).transformer
    kept = ("weight_scale", "scale", "scale_2")
    plain = {name: t.dtype for name, t in model.state_dict().items() if t.is_floating_point()
             and not name.endswith(kept) and t.dtype != torch.float8_e4m3fn}  # fmt: skip
    assert set(plain.values()) == {torch.bfloat16}
    assert run(model, CONFIG["cap_feat_dim"]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b29_overflow_is_told(dtype: torch.dtype) -> None:
    """What fp16 cannot hold is said at the first step, with what to do, instead of a black picture; bf16 can."""
    pipeline: Any = tiny_pipeline(0, dtype)
    feed_forward = pipeline.transformer.layers[0].feed_forward
    for weight in (feed_forward.w1.weight, feed_forward.w2.weight, feed_forward.w3.weight):
        weight.data.fill_(6e4)  # each of which fp16 holds, but not their products
    request = Request(prompt="x", steps=2, width=64, height=64)
    if dtype == torch.bfloat16:
        assert len(list(generate(pipeline, request))) == 1
        feed_forward.w2.weight.data *= float("nan")
        named = r"layers\.0\.feed_forward\.w2\.weight of transformer \(.*\) holds NaN or infinity: download it again"
        with pytest.raises(GenerationError, match=f"in step 1; {named}"):
            list(generate(pipeline, request))
    else:
        with pytest.raises(GenerationError, match=r"in step 1; fp16 cannot hold what .* bf16 or fp32"):
            list(generate(pipeline, request))
        feed_forward.w2.weight.data *= 1e3
        with pytest.raises(GenerationError, match=r"w2\.weight of .* holds .*: fp16 cannot hold them, .* bf16 or fp32"):
            list(generate(pipeline, request))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_values_that_are_no_numbers_are_found(dtype: torch.dtype, value: float) -> None:
    """One among many, and opposite infinities that cancel; the largest finite values are none."""
    largest = torch.full((300, 7), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert is_finite(largest)
    assert is_finite(torch.empty(0, dtype=dtype))
    bad = torch.zeros(300, 7)
    bad[299, 6], bad[0, 0] = value, -value
    assert not is_finite(bad.to(dtype))


def test_nan_in_a_float_file(tmp_path: Path) -> None:
    """It loads, mapped, and the picture that fails names weight and file."""
    pipeline: Any = tiny_pipeline(0, torch.float32)
    folder = base_folder(tmp_path / "base", dict(pipeline.transformer.config))
    state = to_comfyui(pipeline.transformer.state_dict())
    state["layers.0.feed_forward.w1.weight"][3, 2] = math.nan
    file = save(tmp_path / "bad.safetensors", state)
    pipeline.transformer = build(plan(file, folder, dtype=torch.float32)).transformer
    with pytest.raises(GenerationError, match=r"layers\.0\.feed_forward\.w1\.weight of .*\(bad\.safetensors\)"):
        list(generate(pipeline, Request(prompt="x", steps=2, width=64, height=64)))


def test_nan_in_what_is_quantized_on_load(base: Path, tmp_path: Path) -> None:
    state = to_comfyui(network().state_dict())
    state[f"{LAYER}.weight"][3, 2] = math.nan
    compute = Compute(quantize=QuantizeOnLoad("int8"))
    planned = plan(save(tmp_path / "bad.safetensors", state), base, dtype=torch.float32, compute=compute)
    assert any(target.form and target.name == f"{LAYER}.weight" for target in planned.targets)
    with pytest.raises(NonFiniteWeight, match=r"bad\.safetensors: cannot be quantized: layers\.0\.feed_forward\.w1"):
        build(planned)


@pytest.mark.parametrize("name", ["模型 ü 😀", "spaces [and] (brackets)", "a'b\"c", "é", "é"])
def test_c13_names_of_files(name: str, base: Path, tmp_path: Path) -> None:
    stored, layers = quantize(network().state_dict(), int8)
    file = save(tmp_path / name / f"{name}.safetensors", stored)
    model = build(plan(file, base, dtype=torch.float32)).transformer
    value = expected_weights(layers, torch.float32)[f"{LAYER}.weight"]
    assert torch.equal(dequantized(model, f"{LAYER}.weight"), value)


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (torch.float8_e5m2, "float8_e4m3fn"),
        (torch.float8_e4m3fn, "float8_e5m2"),
        (torch.float8_e4m3fn, "int8_tensorwise"),
    ],
)
def test_c15_stored_dtype_counts(stored: torch.dtype, told: str, base: Path, tmp_path: Path) -> None:
    """A marker that contradicts it is refused naming both."""
    state, _ = quantize(network().state_dict(), lambda weight: float8(weight, stored))
    state[f"{LAYER}.comfy_quant"] = marker(json.dumps({"format": told}).encode())
    kind = {torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3"}[stored]
    with pytest.raises(UnsupportedQuantization, match=f"{LAYER}.*{told} but stored as {kind}"):
        plan(save(tmp_path / "x.safetensors", state), base)


def test_c15_fnuz_is_no_e4m3(base: Path, tmp_path: Path) -> None:
    state, _ = quantize(network().state_dict(), float8)
    state[f"{LAYER}.weight"] = state[f"{LAYER}.weight"].view(torch.uint8).view(torch.float8_e4m3fnuz)
    with pytest.raises(UnsupportedQuantization, match="F8_E4M3FNUZ"):
        plan(save(tmp_path / "x.safetensors", state), base)


# Whole files with one thing changed: refused by a TransplantError, or loaded with the right values


KINDS = {
    "int8": int8, "float8": float8, "nvfp4": nvfp4, "mxfp8": mxfp8, "awq": awq,
    "convrot": lambda weight: int8(weight, convrot=16),
    "w4a4": lambda weight: random_w4a4((weight.shape[0], weight.shape[1]), 16),
    "w4a8": lambda weight: w4a8(weight, 16), "w6a8": lambda weight: w4a8(weight, 16, bits=6),
}  # fmt: skip
ROTATED = ("convrot", "w4a4", "w4a8", "w6a8")
ENTRIES: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8_tensorwise"},
    "float8": {"format": "float8_e4m3fn"},
    "nvfp4": {"format": "nvfp4"},
    "convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    "mxfp8": {"format": "mxfp8"},
    "awq": {"format": "awq_w4a16", "group_size": 32},
    "w4a4": {"format": "convrot_w4a4", "convrot_groupsize": 16},
    "w4a8": {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 16},
}
JUNK = st.sampled_from([None, True, 0, -1, 16, 1e300, "", "nvfp4", [], [16], {}, {"layers": {}}, "\u0000", "int8"])
VALUES = st.one_of(JUNK, st.sampled_from(list(ENTRIES.values())))
ROLES = (
    "weight", "weight_scale", "weight_scale_2", "weight_zeros", "weight_s_rel", "weight_s_channel", "comfy_quant",
)  # fmt: skip
"""Not weight_codebook: without it the levels of a w4a8 layer are evenly spaced, and nothing tells that it had one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, dict[str, Written]]]:
    """One valid file a format: its bytes, and its layers."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for kind, writer in KINDS.items():
        stored, layers = quantize(network().state_dict(), writer)
        found[kind] = save(folder / f"{kind}.safetensors", stored).read_bytes(), layers
    return found


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def mutated(data: st.DataObject, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """One change."""
    role = data.draw(st.sampled_from([role for role in ROLES if f"{LAYER}.{role}" in header]))
    name = f"{LAYER}.{role}"
    change = data.draw(st.sampled_from(["dtype", "shape", "rename", "drop", "marker", "metadata", "entry"]))
    if change == "dtype":
        header[name]["dtype"] = data.draw(st.sampled_from(["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "F32"]))
    elif change == "shape":
        shape = header[name]["shape"]
        options = [shape[::-1], [1, *shape], [*shape, 1], [], [s * 2 for s in shape], [s // 2 for s in shape]]
        header[name]["shape"] = data.draw(st.sampled_from(options))
    elif change == "rename":
        ending = data.draw(
            st.sampled_from([".scale", ".weight_scale", ".scale_weight", ".weights", ".weight", ".absmax"])
        )
        header[f"{LAYER}{ending}"] = header.pop(name)
    elif change == "drop":
        del header[name]
    elif change == "marker":
        start, stop = header[f"{LAYER}.comfy_quant"]["data_offsets"]
        raw = data.draw(st.binary(min_size=stop - start, max_size=stop - start))
        body = body[:start] + raw + body[stop:]
    elif change == "metadata":
        text = json.dumps(data.draw(st.one_of(JUNK, st.dictionaries(st.sampled_from([LAYER, "layers", "x"]), VALUES))))
        header["__metadata__"] = {"_quantization_metadata": text}
    else:
        entry = {**json.loads(body[slice(*header[f"{LAYER}.comfy_quant"]["data_offsets"])]),
                 data.draw(st.sampled_from(["format", "group_size", "convrot_groupsize", "params", "orig_shape"])):
                 data.draw(JUNK)}  # fmt: skip
        header["__metadata__"] = {"_quantization_metadata": json.dumps({"layers": {LAYER: entry}})}
    return header, body


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_changed_files_are_refused_or_right(
    data: st.DataObject, files: dict[str, tuple[bytes, dict[str, Written]]], base: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Never another exception, and never other weights in the layers that are quantized still."""
    kind = data.draw(st.sampled_from(list(KINDS)))
    raw, layers = files[kind]
    header, body = mutated(data, *split(raw))
    file = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    file.write_bytes(joined(header, body))
    try:
        model = build(plan(file, base, dtype=torch.float32, use_mmap=False)).transformer
    except TransplantError as refusal:
        assert str(refusal)
        return
    finally:
        file.unlink()
    reference = expected_weights(layers, torch.float32)[f"{LAYER}.weight"]
    layer = model.get_submodule(LAYER)
    value = dequantized(model, f"{LAYER}.weight") if hasattr(layer, "sdnq_dequantizer") else layer.weight
    told = (header.get("__metadata__") or {}).get("_quantization_metadata", "")
    if kind in ROTATED and (told or "comfy_quant" not in "".join(header)):
        return  # how codes are rotated is what the declaration says, and nothing else can tell
    assert torch.equal(value, reference)
