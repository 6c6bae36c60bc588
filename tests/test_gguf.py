"""GGUF files through plan, build and session: the blocks come through every recipe bit for bit."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import accelerate
import gguf
import pytest
import torch
from diffusers import ZImageTransformer2DModel
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

import transplant
from gguf_files import Quantized, quantize, write
from original_layouts import WRITTEN_OUT
from test_architectures import BY_NAME, FROM_MANIFEST, converted_by_diffusers, full_config, original_state, tiny_config
from test_architectures import base_folder as spec_base_folder
from test_plan import base_folder
from test_quantized_files import QUANTIZED, run
from test_session import TestHost
from tiny_models import (
    make_demo,
    random_z_image,
    tiny_flux_bfl,
    tiny_z_image_config,
    to_comfyui,
    with_prefix,
)
from transplant import errors
from transplant.architectures import SPECS
from transplant.architectures.gguf_names import FAMILIES
from transplant.build import build
from transplant.checkpoint.gguf import BLOCK_TYPES, LOADABLE
from transplant.checkpoint.header import GGUF, read_header
from transplant.formats.base import Portable
from transplant.load_plan import LoadPlan
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.quantized import LayerError, codes_of
from transplant.recipe import RowRange, Rows
from transplant.sdnq_bridge import Compute
from transplant.slots import Override
from transplant.view import plan_groups, plan_rows

SMALL, WIDE = tiny_z_image_config(dim=96), tiny_z_image_config(dim=768, n_layers=1, n_refiner_layers=0)
CONFIGS = {name: WIDE if BLOCK_TYPES[name].block == 256 else SMALL for name in LOADABLE}
PREFIX = "model.diffusion_model."


@pytest.fixture(scope="module")
def networks() -> dict[int, ZImageTransformer2DModel]:
    """Networks by width: K-quants need rows of 256 values."""
    return {c["dim"]: random_z_image(c, seed=3, dtype=torch.float32) for c in (SMALL, WIDE)}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {c["dim"]: base_folder(tmp_path_factory.mktemp("base"), c) for c in (SMALL, WIDE)}


@pytest.fixture(scope="module")
def base(bases: dict[int, Path]) -> Path:
    return bases[SMALL["dim"]]


Stored = dict[str, torch.Tensor | Quantized]


def quantized(network: ZImageTransformer2DModel, kind: str, also: tuple[str, ...] = ()) -> Stored:
    """The ComfyUI layout with quantized blocks, fused qkv included; the other tensors in fp32."""
    layers = QUANTIZED if BLOCK_TYPES[kind].block == 32 else ("attention.qkv", "feed_forward.w2")  # decoding takes time
    weights = tuple(f"{name}.weight" for name in layers) + also
    return {
        name: quantize(tensor, kind) if name.endswith(weights) else tensor
        for name, tensor in to_comfyui(network.state_dict()).items()
    }


def expected(stored: Stored) -> dict[str, torch.Tensor]:
    """Decoded by the gguf package, then split, in the model's own names."""
    weights: dict[str, torch.Tensor] = {}
    for name, written in stored.items():
        if isinstance(written, Quantized) and "qkv" in name:
            for part, rows in zip("qkv", written.value.chunk(3), strict=True):
                weights[name.replace("qkv", f"to_{part}")] = rows
        elif isinstance(written, Quantized):
            weights[name.replace("attention.out", "attention.to_out.0")] = written.value
    return weights


def weight_of(model: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight that a loaded layer computes with."""
    module = model.get_submodule(name.removesuffix(".weight"))
    return module.decoded_weight() if isinstance(module, GGUFLinear) else module.get_parameter("weight")


@pytest.fixture(scope="module")
def q8(networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadPlan:
    """A plan for a Q8_0 file, in fp32."""
    file = tmp_path_factory.mktemp("q8") / "q8.gguf"
    return plan(write(file, quantized(networks[96], "Q8_0")), base, dtype=torch.float32)


# Values


@pytest.mark.parametrize("kind", LOADABLE)
def test_layers_equal_the_gguf_package(
    kind: str, networks: dict[int, ZImageTransformer2DModel], bases: dict[int, Path], tmp_path: Path
) -> None:
    """B11: every layer, and the network's output, equal gguf.quants.dequantize, cut by rows and placed by hand."""
    config = CONFIGS[kind]
    stored = quantized(networks[config["dim"]], kind)
    file = write(tmp_path / "x.gguf", with_prefix(stored, PREFIX if LOADABLE.index(kind) % 2 else ""))
    planned = plan(file, bases[config["dim"]], dtype=torch.float32)
    assert (planned.quantization, planned.warnings) == ("gguf", ())
    model = build(planned).transformer
    by_hand = copy.deepcopy(networks[config["dim"]])
    weights = expected(stored)
    assert {t.name for t in planned.targets if t.form} == set(weights)
    assert {t.resident for t in planned.targets if t.form} == {kind}
    for name, value in weights.items():
        assert torch.equal(weight_of(model, name), value), name
        by_hand.get_parameter(name).data = value.contiguous()
    assert torch.equal(run(model, config["cap_feat_dim"]), run(by_hand, config["cap_feat_dim"]))


@pytest.mark.parametrize("use_mmap", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_K"])
def test_size_is_as_planned(
    kind: str, use_mmap: bool, networks: dict[int, ZImageTransformer2DModel], bases: dict[int, Path], tmp_path: Path
) -> None:
    """The plan's bytes are the loaded model's within one per cent; mapped rows stay in the file."""
    dim = CONFIGS[kind]["dim"]
    file = write(tmp_path / "x.gguf", quantized(networks[dim], kind))
    planned = plan(file, bases[dim], dtype=torch.bfloat16, use_mmap=use_mmap)
    model = build(planned).transformer
    tensors = model.state_dict().values()
    held = sum(tensor.nbytes for tensor in tensors)
    assert abs(held - planned.resident_bytes) <= 0.01 * held
    assert (
        model.layers[0].feed_forward.w2.weight.nbytes
        == planned.header.tensors["layers.0.feed_forward.w2.weight"].nbytes
    )
    if sys.platform == "linux":
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
                if line.endswith(str(file))]  # fmt: skip
        ranges = [(int(start, 16), int(end, 16)) for start, end in maps]
        mapped = sum(t.nbytes for t in tensors if any(start <= t.data_ptr() < end for start, end in ranges))
        assert mapped == planned.mapped_bytes
        assert bool(mapped) is use_mmap


def test_decoding_in_fp32_is_the_option(q8: LoadPlan, base: Path) -> None:
    """With "dequantize in fp32" off, layers decode as diffusers' own do."""
    model = build(plan(q8.header.path, base, dtype=torch.float32, compute=Compute(dequantize_fp32=False))).transformer
    layer = model.layers[0].feed_forward.w1
    theirs = GGUFLinear(layer.in_features, layer.out_features, compute_dtype=torch.float32)
    theirs.weight = GGUFParameter(layer.weight.as_tensor(), quant_type=layer.ggml_type)
    inputs = torch.randn(3, layer.in_features)
    assert torch.equal(layer(inputs), theirs(inputs))
    assert not torch.equal(layer(inputs), build(q8).transformer.layers[0].feed_forward.w1(inputs))


DECODED = ("attention_norm1.weight", "t_embedder.mlp.0.weight", "x_pad_token")


def test_what_cannot_be_packed_is_decoded(
    networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path
) -> None:
    """Norms, parameters that are no `.weight`, layers whose dtype is read: values, decoded once from fp32."""
    stored = quantized(networks[96], "Q8_0", DECODED)
    planned = plan(write(tmp_path / "x.gguf", stored), base, dtype=torch.bfloat16)
    assert "quantized weights are decoded" in planned.warnings[0]
    model = build(planned).transformer
    names = [name for name in expected(stored) if name.endswith(DECODED)]
    assert {target.name for target in planned.targets if target.decoded} == set(names)
    for name in names:
        assert torch.equal(model.get_parameter(name), expected(stored)[name].to(torch.bfloat16)), name
    assert run(model, SMALL["cap_feat_dim"]).isfinite().all()


def test_reshaped_tensors(networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path) -> None:
    """Rows of 96 values in blocks of 256: the true shape is in the metadata; such layers are decoded, then cut."""
    stored = quantized(networks[96], "Q6_K")
    file = write(tmp_path / "x.gguf", stored)
    assert read_header(file).tensors["layers.0.attention.qkv.weight"].shape == (288, 96)
    planned = plan(file, base, dtype=torch.float32)
    model = build(planned).transformer
    for name, value in expected(stored).items():
        assert torch.equal(weight_of(model, name), value), name
    assert {t.module.split(".")[-1] for t in planned.targets if t.form} == {"w2"}  # of 256 columns


def test_lost_leading_ones(networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path) -> None:
    """GGML's tools store [1, K] as [K]."""
    stored = {name: value.squeeze(0) if name.endswith("pad_token") else value
              for name, value in to_comfyui(networks[96].state_dict()).items()}  # fmt: skip
    stored["x_pad_token"] = quantize(stored["x_pad_token"], "Q8_0")
    model = build(plan(write(tmp_path / "x.gguf", stored), base, dtype=torch.float32)).transformer
    assert torch.equal(model.x_pad_token[0], stored["x_pad_token"].value)
    assert torch.equal(model.cap_pad_token, networks[96].cap_pad_token)


def test_rows_are_joined_as_bytes(q8: LoadPlan) -> None:
    """Rows of several layers of one type are joined without decoding; of two types they cannot be."""
    one, other = "layers.0.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight"
    data = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(q8.header.path).tensors}
    recipe = Rows((RowRange(one, 3, 9), RowRange(other, 0, 5)))
    layers = dict(q8.layers)
    codes = codes_of(recipe, (11, 96), layers, lambda info, start, stop: data[info.name][start:stop], Portable())
    assert torch.equal(codes.weight, torch.cat([data[one][3:9], data[other][:5]]))
    layers[other] = replace(layers[other], params={"type": "Q5_1", "shape": (256, 96)})
    with pytest.raises(LayerError, match="quantized differently"):
        codes_of(recipe, (11, 96), layers, lambda info, start, stop: data[info.name][start:stop], Portable())


SLOW = ("Mochi", "SDXL")


@pytest.mark.parametrize("architecture", sorted({*FROM_MANIFEST, *WRITTEN_OUT} - {"Ideogram 4", *SLOW}))
def test_every_converter_serves_blocks(architecture: str, tmp_path: Path) -> None:
    """All that is not a vector is quantized, convolutions and tables too: equal to decoding, then converting."""
    spec = BY_NAME[architecture]
    config = full_config(spec.cls, tiny_config(spec))
    stored: Stored = {
        name: quantize(value, "Q8_0") if value.ndim > 1 and value.numel() % 32 == 0 else value.float()
        for name, value in original_state(spec, config).items()
    }
    base = spec_base_folder(tmp_path / "base", spec, config)
    planned = plan(write(tmp_path / "x.gguf", stored, "pig"), base, dtype=torch.float32)
    model = build(planned).transformer
    plain = {name: value.value if isinstance(value, Quantized) else value for name, value in stored.items()}
    wanted = converted_by_diffusers(spec, plain, config)
    assert planned.layers
    for target in planned.targets:
        found = weight_of(model, target.name) if target.form else model.state_dict()[target.name]
        assert torch.equal(found, wanted[target.name].to(found.dtype)), target.name


# The model


def test_model_is_a_quantized_one(q8: LoadPlan, base: Path) -> None:
    """diffusers refuses a cast, knows the method, and every consumer sees the compute dtype."""
    model = transplant.load_transformer(q8.header.path, base=base, dtype=torch.bfloat16)
    for cast in (lambda: model.to(torch.float16), model.half, model.float):
        with pytest.raises(ValueError, match="quantized"):
            cast()
    assert model.is_quantized
    assert model.quantization_method == "gguf"
    assert model.hf_quantizer.compute_dtype == model.quantization_config.compute_dtype == torch.bfloat16
    assert model.config.quantization_config["quant_method"] in model.to_json_string()
    assert (model.dtype, type(model).__name__) == (torch.bfloat16, "ZImageTransformer2DModel")
    assert model.to("cpu") is model
    assert run(model, SMALL["cap_feat_dim"]).isfinite().all()
    assert not any(isinstance(module, GGUFLinear) for module in model.dequantize().modules())


def test_default_dtype_is_not_that_of_the_norms(q8: LoadPlan, base: Path) -> None:
    """Beside blocks, fp32 norms and biases are a custom and no wish."""
    assert plan(q8.header.path, base).dtype == torch.bfloat16


def rebuilt_on_meta(model: torch.nn.Module) -> torch.nn.Module:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").load_state_dict(state, assign=True)
    return model


def offloaded(model: torch.nn.Module) -> torch.nn.Module:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def to_empty(model: torch.nn.Module) -> torch.nn.Module:
    state = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu").load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "rebuild",
    [copy.deepcopy, rebuilt_on_meta, to_empty, offloaded],
    ids=["deepcopy", "meta", "to_empty", "offload"],
)
def test_weights_survive_being_made_anew(
    rebuild: Callable[[torch.nn.Module], torch.nn.Module], q8: LoadPlan, base: Path
) -> None:
    """C07: a parameter that is built again keeps its type."""
    before = run(build(q8).transformer, SMALL["cap_feat_dim"])
    model = rebuild(build(q8).transformer)
    assert isinstance(model.layers[0].feed_forward.w1.weight, GGUFParameter)
    for _ in range(2):
        assert torch.equal(run(model, SMALL["cap_feat_dim"]), before)
    assert model.layers[0].feed_forward.w1.weight.quant_type == gguf.GGMLQuantizationType.Q8_0


def test_weights_survive_pickling_and_the_disk(q8: LoadPlan, tmp_path: Path) -> None:
    """C07: also where the bytes come back as a plain tensor, the layer knows what they are."""
    layer = build(q8).transformer.layers[0].feed_forward.w1
    inputs = torch.randn(2, layer.in_features)
    before = layer(inputs)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(inputs), before)
    torch.save(layer, tmp_path / "layer.pt")
    assert torch.equal(torch.load(tmp_path / "layer.pt", weights_only=False)(inputs), before)
    model = build(q8).transformer
    before = run(model, SMALL["cap_feat_dim"])
    accelerate.disk_offload(model, tmp_path / "disk", execution_device=torch.device("cpu"))
    assert torch.equal(run(model, SMALL["cap_feat_dim"]), before)


def test_session(networks: dict[int, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Default, file, broken file, Default: the slot says what the pipeline holds."""
    base = make_demo.save_base(tmp_path / "base", 5, torch.float32, dim=96)
    file = write(tmp_path / "x.gguf", quantized(networks[96], "Q4_0"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:-200])
    session = Session(TestHost())
    session.load_base(base)
    own = run(session.transformer, SMALL["cap_feat_dim"])
    assert session.choose(Override("x", file)).changed
    other = run(session.transformer, SMALL["cap_feat_dim"])
    assert not torch.equal(own, other)
    assert isinstance(session.choose(Override("broken", broken)).refused, errors.TruncatedFile)
    assert torch.equal(run(session.transformer, SMALL["cap_feat_dim"]), other)
    assert session.choose(None).changed
    assert torch.equal(run(session.transformer, SMALL["cap_feat_dim"]), own)


# What the file calls itself


@pytest.mark.parametrize("told", ["pig", "", "lumina2", "z_image"])
def test_architecture_string_is_a_hint(
    told: str, networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path
) -> None:
    """C05: made up, missing or right, tensor names decide."""
    planned = plan(write(tmp_path / "x.gguf", quantized(networks[96], "Q4_0"), told), base)
    assert (planned.spec.name, planned.warnings) == ("Z-Image", ())
    assert (planned.header.metadata or {}).get("general.architecture") == (told or None)


def test_architecture_string_of_another(
    networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path
) -> None:
    """C05: a contradiction is told, by the plan and its table, and the file loads."""
    planned = plan(write(tmp_path / "x.gguf", quantized(networks[96], "Q4_0"), "flux"), base)
    assert "'flux'" in planned.warnings[0]
    assert ("warning", planned.warnings[0]) in plan_rows(planned)
    assert {group.resident for group in plan_groups(planned)} >= {"Q4_0"}
    assert run(build(planned).transformer, SMALL["cap_feat_dim"]).isfinite().all()
    assert {name for names in FAMILIES.values() for name in names} <= {spec.name for spec in SPECS}


def test_wrong_architecture(base: Path, tmp_path: Path) -> None:
    """A FLUX file, and a language model with its vocabulary."""
    with pytest.raises(errors.WrongArchitecture) as refused:
        plan(write(tmp_path / "x.gguf", tiny_flux_bfl(1, torch.bfloat16), "flux"), base)
    assert refused.value.found == "FLUX.1"
    words = write(
        tmp_path / "llm.gguf", {"blk.0.attn_q.weight": torch.ones(4, 4)}, "llama",
        lambda w: (w.add_array("tokenizer.ggml.tokens", ["a", "b"] * 5000), w.add_array("x.scores", [0.5] * 99)),
    )  # fmt: skip
    with pytest.raises(errors.OverrideArchMismatch):
        plan(words, base)


def test_suffix_does_not_matter(q8: LoadPlan, base: Path, tmp_path: Path) -> None:
    """A GGUF file called .safetensors is loaded as what it is, and the plan says so."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(q8.header.path.read_bytes())
    planned = plan(file, base)
    assert planned.header.container == GGUF
    assert ".safetensors" in planned.warnings[0]


def test_quantized_matmul_does_not_apply(q8: LoadPlan, base: Path) -> None:
    """A19: a switch that does nothing is told."""
    planned = plan(q8.header.path, base, dtype=torch.float32, compute=Compute(quantized_matmul="auto"))
    assert "quantized matmul" in planned.warnings[0]
    assert planned.mapped_bytes == q8.mapped_bytes
    run(build(planned).transformer, SMALL["cap_feat_dim"])


def test_types_that_cannot_be_decoded(
    networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path
) -> None:
    """Known to GGML but not to diffusers: refused by name, with what can be loaded."""
    stored = to_comfyui(networks[96].state_dict())
    stored["layers.0.feed_forward.w2.weight"] = quantize(stored["layers.0.feed_forward.w2.weight"], "TQ2_0")
    with pytest.raises(errors.UnknownDtype, match=r"w2.weight has the dtype 'TQ2_0'.*Q4_K"):
        plan(write(tmp_path / "x.gguf", stored), base)


def test_two_ways_of_declaring(networks: dict[int, ZImageTransformer2DModel], base: Path, tmp_path: Path) -> None:
    """Blocks beside a layer with a ComfyUI marker, and a marker on blocks."""
    stored = quantized(networks[96], "Q4_0")
    marker = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.int8)
    stored["layers.0.feed_forward.w1.comfy_quant"] = marker
    with pytest.raises(errors.UnsupportedQuantization, match="another way"):
        plan(write(tmp_path / "x.gguf", stored), base)
