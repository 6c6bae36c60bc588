"""Quantized files as they are published, at a small width, against diffusers' converter of the dequantized tensors.

A file here has a real header's layers, roles, dtypes and declarations; comfy-kitchen writes its codes. The expected
weights never pass through this package: comfy-kitchen dequantizes, diffusers' own converter renames and splits.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_model, single_file_utils
from diffusers.models.transformers.transformer_ideogram4 import LLM_TOKEN_INDICATOR, OUTPUT_IMAGE_INDICATOR

from kitchen import Written, float8, int8
from original_layouts import WRITTEN_OUT, Tensors, from_recipes
from test_architectures import BY_NAME, FROM_MANIFEST, WIDTH_IS_FIXED, base_folder, full_config, made_of
from test_formats_blocks import nvfp4
from test_pipelines import WIDTH_IN_SOURCE
from test_quantized_files import dequantized
from tiny_configs import TINY
from tiny_models import MANIFESTS, Manifest, manifest, save, tiny_z_image_config
from tiny_pipelines import filled
from transplant.build import build
from transplant.checkpoint.reader import TORCH_DTYPES
from transplant.plan import LoadPlan, plan

WIDTH, GROUP = 64, 16
"""Rows of 64 fill half of a tile of nvfp4's block scales; a rotation takes a quarter of them."""

CONFIGS: dict[str, dict[str, Any]] = {
    "FLUX.1": {
        "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16, "joint_attention_dim": 48,
        "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8],
    },
    "FLUX.2": {
        "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16, "joint_attention_dim": 48,
        "axes_dims_rope": [4, 4, 4, 4], "guidance_embeds": False,
    },
    "Krea 2": {
        "attention_head_dim": 16, "in_channels": 16, "intermediate_size": 96, "text_hidden_dim": 32,
        "text_intermediate_size": 48, "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2,
        "axes_dims_rope": [4, 4, 8],
    },
    "Ideogram 4": {
        "attention_head_dim": 16, "num_attention_heads": 4, "in_channels": 16, "intermediate_size": 96,
        "adaln_dim": 32, "llm_features_dim": 48, "mrope_section": [4, 2, 2],
    },
    "Wan": {"attention_head_dim": 32, "in_channels": 16, "text_dim": 48, "freq_dim": 32, "ffn_dim": 96},
    "Qwen-Image": {
        "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 48, "axes_dims_rope": [4, 4, 8],
    },
    "Z-Image": tiny_z_image_config(dim=96, n_layers=2, n_refiner_layers=2, axes_lens=[64, 16, 16]),
}  # fmt: skip
"""What makes a small network wide enough for the formats, 64 or, of Z-Image, 96."""


@dataclass(frozen=True)
class Case:
    """A published file to rebuild.

    Attributes:
        architecture: name of its spec.
        header: the manifest whose layers are quantized.
        source: where its declarations are found.
        int8: the same layers as int8 with markers, where nobody's header is at hand.
        decoded: modules whose weights are made plain, as their network reads their dtype.
    """

    architecture: str
    header: str
    source: str
    int8: bool = False
    decoded: frozenset[str] = field(default_factory=frozenset)


FLUX_1, FLUX_2 = "flux1_dev_fp8_scaled", "flux2_klein_4b_fp8"
WAN_TIME = frozenset(f"condition_embedder.time_embedder.linear_{number}" for number in (1, 2))
Z_IMAGE_TIME = frozenset({"t_embedder.mlp.0"})
CASES = {
    "FLUX.1 fp8 scaled": Case("FLUX.1", FLUX_1, "legacy"),
    "FLUX.1 fp8 cast": Case("FLUX.1", "flux1_dev_fp8_raw_cast", ""),
    "FLUX.1 int8": Case("FLUX.1", FLUX_1, "markers", int8=True),
    "FLUX.2 Klein fp8": Case("FLUX.2", FLUX_2, "header"),
    "FLUX.2 Klein nvfp4": Case("FLUX.2", "flux2_klein_4b_nvfp4", "header"),
    "FLUX.2 Klein int8": Case("FLUX.2", FLUX_2, "markers", int8=True),
    "Krea 2 fp8 scaled": Case("Krea 2", "krea2_raw_fp8_scaled", "header"),
    "Krea 2 int8 ConvRot": Case("Krea 2", "krea2_raw_int8_convrot", "markers"),
    "Krea 2 nvfp4": Case("Krea 2", "krea2_turbo_nvfp4", "header"),
    "Ideogram 4 fp8 scaled": Case("Ideogram 4", "ideogram4_conditional_fp8_scaled", "markers"),
    "Ideogram 4 int8 ConvRot": Case("Ideogram 4", "ideogram4_unconditional_int8_convrot", "markers"),
    "Wan fp8 scaled": Case("Wan", "wan22_t2v_a14b_high_noise_fp8_scaled", "legacy", decoded=WAN_TIME),
    "Qwen-Image fp8 mixed": Case("Qwen-Image", "qwen_image_fp8mixed", "header and markers"),
    "Z-Image int8 ConvRot": Case("Z-Image", "z_image_turbo_comfy_int8_convrot", "markers"),
    "Z-Image fp8 scaled": Case(
        "Z-Image", "z_image_turbo_kijai_fp8_scaled", "legacy", decoded=frozenset({"t_embedder.mlp.0"})
    ),
}
INCOMPLETE = {"anima_preview_fp8_mixed_PARTIAL_block24"}
CODES = {"F8_E4M3", "F8_E5M2", "I8", "U8"}

# A small file with a real header's declarations


@dataclass
class Rebuilt:
    """A file, and what its tensors are worth by their names without prefix."""

    tensors: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)
    layers: dict[str, Written] = field(default_factory=dict)
    full_precision: dict[str, bool] = field(default_factory=dict)
    """By stored name of the weight, whether its matmul is to stay in floating point."""
    metadata: dict[str, str] | None = None


def small(marker: Any) -> Any:
    """The marker with a rotation that fits."""
    return {**marker, "convrot_groupsize": GROUP} if "convrot_groupsize" in marker else marker


def declarations(source: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """What markers and what the header say, by the layer's stored name."""
    markers = {layer: small(json.loads(text)) for layer, text in source.markers.items()}
    text = (source.metadata or {}).get("_quantization_metadata", '{"layers": {}}')
    return markers, {layer: small(said) for layer, said in json.loads(text)["layers"].items()}


def written(weight: torch.Tensor, marker: Mapping[str, Any]) -> Written:
    match marker["format"]:
        case "int8_tensorwise":
            return int8(weight, convrot=marker.get("convrot_groupsize", 0))
        case "nvfp4":
            return nvfp4(weight)
        case "float8_e4m3fn":
            return float8(weight)
        case other:
            raise AssertionError(other)


def rebuilt(case: Case, original: Tensors) -> Rebuilt:
    """Store the tensors as the published file does: the same layers, roles, dtypes, prefix and declarations."""
    source, file = manifest(case.header), Rebuilt()
    markers, said = ({}, {}) if case.int8 else declarations(source)
    prefix = "model.diffusion_model." if any(key.startswith("model.diffusion_model.") for key in source.tensors) else ""
    turns = itertools.cycle(({}, {"convrot": True, "convrot_groupsize": GROUP}))
    for name, tensor in original.items():
        layer, _, role = (prefix + name).rpartition(".")
        beside = {key: stored for key, stored in source.tensors.items() if key.rpartition(".")[0] == layer}
        roles = {key.rpartition(".")[2]: stored for key, stored in beside.items()}
        if role == "weight" and any("scale" in other for other in roles) and tensor.ndim == 2:
            if case.int8:
                markers[layer] = {"format": "int8_tensorwise", **next(turns)}
            marker = said.get(layer) or markers.get(layer) or {"format": "float8_e4m3fn"}
            exact = marker.get("full_precision_matrix_mult", not markers and has_exact_flag(source, prefix))
            file.full_precision[f"{layer}.weight"] = exact
            file.layers[name] = made = written(tensor, marker)
            file.values[name] = made.value(torch.float32)
            file.tensors |= as_int8(layer, made) if case.int8 else in_roles(layer, made, roles)
        else:
            dtype = TORCH_DTYPES[source.tensors[prefix + name][0]]
            file.tensors[prefix + name] = tensor.to(dtype)
            file.values[name] = tensor.to(dtype).float()
    declare(file, source, prefix, markers, said)
    return file


def has_exact_flag(source: Manifest, prefix: str) -> bool:
    """`scaled_fp8` with two elements says that no matmul is to be in fp8."""
    return source.tensors.get(f"{prefix}scaled_fp8", ("", ()))[1] == (2,)


def as_int8(layer: str, made: Written) -> Tensors:
    return {f"{layer}.{role}": tensor for role, tensor in made.tensors.items()}


def in_roles(layer: str, made: Written, roles: Mapping[str, tuple[str, tuple[int, ...]]]) -> Tensors:
    """The layer's tensors by the names, and with the dtypes and ranks, that the header has."""
    tensors: Tensors = {}
    for role, (dtype, shape) in roles.items():
        if role in ("bias", "comfy_quant"):
            continue
        if role in ("input_scale", "scale_input"):
            tensors[f"{layer}.{role}"] = torch.tensor(0.37)
            continue
        tensor = made.tensors["weight_scale" if role == "scale_weight" else role]
        assert tensor.dtype == TORCH_DTYPES[dtype], role
        tensors[f"{layer}.{role}"] = tensor.reshape(1) if shape == (1,) else tensor
        assert tensors[f"{layer}.{role}"].ndim == len(shape), role
    assert len({role for role in roles if role.startswith(("weight", "scale_weight"))}) == len(made.tensors)
    return tensors


def declare(file: Rebuilt, source: Manifest, prefix: str, markers: dict[str, Any], said: dict[str, Any]) -> None:
    """Markers, header and flag, of the layers that a small network has."""
    stored = {f"{prefix}{name.removesuffix('.weight')}" for name in file.layers}
    for entries, where in ((markers, "markers"), (said, "header")):
        put_down(file, {layer: entry for layer, entry in entries.items() if layer in stored}, where)
    if f"{prefix}scaled_fp8" in source.tensors and not markers:
        dtype, shape = source.tensors[f"{prefix}scaled_fp8"]
        file.tensors[f"{prefix}scaled_fp8"] = torch.zeros(shape).to(TORCH_DTYPES[dtype])


def put_down(file: Rebuilt, entries: Mapping[str, Any], where: str) -> None:
    """Write declarations as marker tensors or into the header."""
    if where == "markers":
        for layer, entry in entries.items():
            text = bytearray(json.dumps(entry).encode())
            file.tensors[f"{layer}.comfy_quant"] = torch.frombuffer(text, dtype=torch.uint8)
    elif entries:
        file.metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": entries})}


# What it must load as


def by_hand(values: Tensors) -> Tensors:
    """Ideogram 4 has no converter in diffusers: two renames, and a fused layer cut in three."""
    result: Tensors = {}
    for name, value in values.items():
        if ".attention.qkv." in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                result[name.replace(".qkv.", f".to_{part}.")] = rows
        else:
            result[name.replace(".attention.o.", ".attention.to_out.0.")] = value
    return result


def converted(architecture: str, values: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The dequantized tensors through diffusers' own converter."""
    if architecture == "Ideogram 4":
        return by_hand(values)
    if architecture == "Qwen-Image":
        return values
    name = BY_NAME[architecture].cls
    name = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"].__name__
    return getattr(single_file_utils, name)(checkpoint=dict(values), config=dict(config))


@cache
def recipes(architecture: str) -> Any:
    """What its converter makes of a real header; asked for while diffusers' own width is in place."""
    return made_of({**FROM_MANIFEST, **WIDTH_IS_FIXED}[architecture])


def original(architecture: str, state: Tensors) -> Tensors:
    if architecture == "Qwen-Image":
        return dict(state)
    if architecture in WRITTEN_OUT:
        return WRITTEN_OUT[architecture](state)
    return from_recipes(recipes(architecture), state)


@pytest.fixture(scope="module", autouse=True)
def any_width() -> Iterator[None]:
    """Let diffusers' converter of FLUX.1 convert a small network: its own source with another number in it."""
    recipes("FLUX.1")
    name, _ = WIDTH_IN_SOURCE["FLUX.1"]
    source = inspect.getsource(getattr(single_file_utils, name))
    assert "inner_dim = 3072" in source
    scope = dict(vars(single_file_utils))
    exec(source.replace("inner_dim = 3072", f"inner_dim = {WIDTH}"), scope)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_file_utils, name, scope[name])
        yield


def weight_of(model: Any, name: str) -> torch.Tensor:
    """What a loaded model computes with, whatever holds it."""
    held = getattr(model.get_submodule(name.rpartition(".")[0]), "sdnq_dequantizer", None)
    if held is not None and name.endswith(".weight"):
        return dequantized(model, name)
    return model.get_parameter(name).float()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(count: int, axes: int) -> torch.Tensor:
    return torch.arange(float(count)).unsqueeze(1).repeat(1, axes)


PICTURE, TEXT, TIME = numbers(1, 6, 16, seed=1), numbers(1, 5, 48, seed=2), torch.tensor([0.3])
INPUTS: dict[str, dict[str, Any]] = {
    "FLUX.1": {
        "hidden_states": PICTURE, "encoder_hidden_states": TEXT, "pooled_projections": numbers(1, 32, seed=3),
        "timestep": TIME, "img_ids": places(6, 3), "txt_ids": places(5, 3), "guidance": torch.tensor([3.5]),
    },
    "FLUX.2": {
        "hidden_states": PICTURE, "encoder_hidden_states": TEXT, "timestep": TIME, "img_ids": places(6, 4),
        "txt_ids": places(5, 4),
    },
    "Krea 2": {
        "hidden_states": PICTURE, "encoder_hidden_states": numbers(1, 5, 2, 32, seed=3), "timestep": TIME,
        "position_ids": places(11, 3),
    },
    "Ideogram 4": {
        "hidden_states": numbers(1, 11, 16, seed=1), "encoder_hidden_states": numbers(1, 11, 48, seed=2),
        "timestep": TIME, "position_ids": places(11, 3).long()[None], "segment_ids": torch.zeros(1, 11).long(),
        "indicator": torch.tensor([[LLM_TOKEN_INDICATOR] * 5 + [OUTPUT_IMAGE_INDICATOR] * 6]),
    },
    "Wan": {"hidden_states": numbers(1, 16, 1, 4, 4, seed=1), "encoder_hidden_states": TEXT, "timestep": TIME},
    "Qwen-Image": {
        "hidden_states": PICTURE, "encoder_hidden_states": TEXT, "timestep": TIME, "img_shapes": [(1, 2, 3)],
        "encoder_hidden_states_mask": torch.ones(1, 5).bool(),
    },
    "Z-Image": {"x": [numbers(4, 1, 8, 8, seed=1)], "t": TIME, "cap_feats": [numbers(7, 128, seed=2)]},
}  # fmt: skip
"""Arguments of one call."""
FLOATS_STAY = ("t", "img_ids", "txt_ids", "position_ids", "guidance")


def output(architecture: str, model: Any) -> torch.Tensor:
    """What the network makes of the inputs in its dtype."""

    def cast(name: str, value: Any) -> Any:
        if isinstance(value, list) and isinstance(value[0], torch.Tensor):
            return [cast(name, item) for item in value]
        floats = isinstance(value, torch.Tensor) and value.is_floating_point() and name not in FLOATS_STAY
        return value.to(model.dtype) if floats else value

    with torch.no_grad():
        inputs = {name: cast(name, value) for name, value in INPUTS[architecture].items()}
        made = model(**inputs, return_dict=False)[0]
    return made[0] if isinstance(made, list) else made


@cache
def network(architecture: str) -> tuple[dict[str, Any], Tensors]:
    """The config of a small network, and tensors of its own in diffusers' names."""
    cls = BY_NAME[architecture].cls
    config = full_config(cls, {**TINY.get(cls, {}), **CONFIGS[architecture]})
    made: Any = getattr(diffusers, cls)(**config)
    return config, dict(filled(made, seed=5).state_dict())


def file_and_expected(name: str) -> tuple[Rebuilt, Tensors]:
    case = CASES[name]
    config, state = network(case.architecture)
    file = rebuilt(case, original(case.architecture, state))
    expected = converted(case.architecture, file.values, config)
    return file, {name: expected[name] for name in state}


def loaded(name: str, file: Rebuilt, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[LoadPlan, Any]:
    architecture = CASES[name].architecture
    base = base_folder(folder / "base", BY_NAME[architecture], network(architecture)[0])
    planned = plan(save(folder / "x.safetensors", file.tensors, file.metadata), base, dtype=dtype)
    return planned, build(planned).transformer


def assert_holds(model: Any, expected: Tensors) -> None:
    for name, value in expected.items():
        assert torch.equal(weight_of(model, name), value), name


def held_in_codes(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "sdnq_dequantizer")}


def fed_by_codes(name: str, file: Rebuilt) -> set[str]:
    """The modules that diffusers' converter fills from the file's quantized layers."""
    architecture = CASES[name].architecture
    told = {own: torch.full_like(value, own in file.layers) for own, value in file.values.items()}
    made = converted(architecture, told, network(architecture)[0])
    return {own.removesuffix(".weight") for own in network(architecture)[1] if made[own].any()}


@pytest.mark.parametrize("name", CASES)
def test_file_as_published(name: str, tmp_path: Path) -> None:
    """Every weight, and the output, are those of the dequantized tensors that diffusers converts."""
    case = CASES[name]
    file, expected = file_and_expected(name)
    planned, model = loaded(name, file, tmp_path)
    assert planned.quantization == case.source
    assert {name: layer.full_precision_matmul for name, layer in planned.layers.items()} == file.full_precision
    assert_holds(model, expected)
    assert held_in_codes(model) == fed_by_codes(name, file) - case.decoded
    assert {target.module for target in planned.targets if target.decoded} == case.decoded
    reference: Any = getattr(diffusers, BY_NAME[case.architecture].cls).from_config(network(case.architecture)[0])
    reference.load_state_dict(expected)
    got = output(case.architecture, model)
    assert got.isfinite().all() and got.any()
    assert torch.equal(got, output(case.architecture, reference.eval()))


@pytest.mark.parametrize("name", CASES)
def test_network_runs_in_bfloat16(name: str, tmp_path: Path) -> None:
    """No layer that the network asks for its dtype is left in codes (A09)."""
    file, _ = file_and_expected(name)
    got = output(CASES[name].architecture, loaded(name, file, tmp_path, torch.bfloat16)[1])
    assert got.dtype == torch.bfloat16
    assert got.isfinite().all()


@pytest.mark.parametrize("declared", ["markers", "header"])
@pytest.mark.parametrize("name", ["FLUX.2 Klein nvfp4", "FLUX.2 Klein int8", "Krea 2 int8 ConvRot", "Krea 2 fp8 scaled",
                                  "Ideogram 4 int8 ConvRot", "Ideogram 4 fp8 scaled", "FLUX.1 int8"])  # fmt: skip
def test_file_declared_otherwise(name: str, declared: str, tmp_path: Path) -> None:
    """The same file with its declarations in markers only, and in the header only."""
    file, expected = file_and_expected(name)
    entries = {
        layer.removesuffix(".comfy_quant"): json.loads(bytes(file.tensors.pop(layer).tolist()))
        for layer in list(file.tensors)
        if layer.endswith(".comfy_quant")
    } or json.loads((file.metadata or {})["_quantization_metadata"])["layers"]
    assert len(entries) == len(file.layers)
    file.metadata = None
    put_down(file, entries, declared)
    planned, model = loaded(name, file, tmp_path)
    assert planned.quantization == declared
    assert_holds(model, expected)


@pytest.mark.parametrize("name", [name for name in CASES if "fp8 scaled" in name])
def test_no_two_layers_have_the_same_scale(name: str) -> None:
    """So that a scale in the wrong place would be seen."""
    file, _ = file_and_expected(name)
    scales = {float(made.tensors["weight_scale"]) for made in file.layers.values()}
    assert len(scales) == len(file.layers) > 10


def test_every_quantized_manifest_is_rebuilt() -> None:
    """A walk through the folder: a case for each header that has codes; int8 of FLUX on the layers of its fp8 files."""
    names = {path.name.removesuffix(".json.gz") for path in MANIFESTS.glob("*.json.gz")}
    quantized = {name for name in names if any(dtype in CODES for dtype, _ in manifest(name).tensors.values())}
    assert quantized == {case.header for case in CASES.values()} | INCOMPLETE
