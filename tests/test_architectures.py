"""Every architecture: real layouts are recognised and planned at full size, small ones load bit for bit."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from original_layouts import WRITTEN_OUT, from_recipes
from tiny_configs import TINY, UNET_SD1, UNET_SDXL
from tiny_models import BITS, MANIFESTS, manifest, save, write_from_manifest, write_sparse
from transplant import errors
from transplant.architectures import SPECS
from transplant.architectures.detect import Detection, identify
from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, TransformerSpec
from transplant.build import build
from transplant.checkpoint.header import read_header
from transplant.checkpoint.naming import PREFIXES, NamedKeys, normalise
from transplant.plan import LoadPlan, plan
from transplant.recipe import Made, evaluate, ranges_of, trace
from transplant.skeleton import resolve_class, resolve_converter, shapes_only
from transplant.view import plan_json

BY_NAME = {spec.name: spec for spec in SPECS}
EXPECTED = {
    "aio_sd15_fp32": "Stable Diffusion",
    "aio_sdxl_fp16": "SDXL",
    "anima_2_9b_bf16": "Anima",
    "anima_base_v1_bf16": "Anima",
    "anima_preview_fp8_mixed_PARTIAL_block24": "Anima",
    "chroma1_hd_bf16": "Chroma",
    "cosmos_predict2_2b_t2i_bf16": "Cosmos Predict 2",
    "flux1_dev_bfl_bf16": "FLUX.1",
    "flux1_dev_fp8_raw_cast": "FLUX.1",
    "flux1_dev_fp8_scaled": "FLUX.1",
    "flux1_schnell_bfl_bf16": "FLUX.1",
    "flux2_dev_bfl_bf16": "FLUX.2",
    "flux2_klein_4b_bf16": "FLUX.2",
    "flux2_klein_4b_fp8": "FLUX.2",
    "flux2_klein_4b_nvfp4": "FLUX.2",
    "hunyuan_video_t2v_bf16": "HunyuanVideo",
    "ideogram4_conditional_fp8_scaled": "Ideogram 4",
    "ideogram4_unconditional_int8_convrot": "Ideogram 4",
    "krea2_raw_bf16": "Krea 2",
    "krea2_raw_fp8_scaled": "Krea 2",
    "krea2_raw_int8_convrot": "Krea 2",
    "krea2_turbo_nvfp4": "Krea 2",
    "lumina_image_2_bf16": "Lumina 2",
    "qwen_image_2_1_bf16": "Qwen-Image 2.1",
    "qwen_image_bf16": "Qwen-Image",
    "qwen_image_fp8mixed": "Qwen-Image",
    "sd35_medium_fp16_with_vae": "Stable Diffusion 3",
    "sdxl_unet_fp16_prefixed": "SDXL",
    "wan22_t2v_a14b_high_noise_fp16": "Wan",
    "wan22_t2v_a14b_high_noise_fp8_scaled": "Wan",
    "wan22_t2v_a14b_low_noise_fp16": "Wan",
    "z_image_diffusers_bf16": "Z-Image",
    "z_image_turbo_comfy_bf16": "Z-Image",
    "z_image_turbo_comfy_bf16_prefixed": "Z-Image",
    "z_image_turbo_comfy_int8_convrot": "Z-Image",
    "z_image_turbo_kijai_fp8_scaled": "Z-Image",
}
FLOAT_DTYPES = {"F16", "BF16", "F32", "I32", "I64"}
FLOAT = [name for name in EXPECTED if {dtype for dtype, _ in manifest(name).tensors.values()} <= FLOAT_DTYPES]
TWINS = {"cosmos_predict2_2b_t2i_bf16": ["Cosmos Predict 2", "Anima"]}
"""Files that may be of two architectures, by nothing but the base model."""


def tiny_config(spec: TransformerSpec) -> dict[str, Any]:
    return {"SDXL": UNET_SDXL, "Stable Diffusion": UNET_SD1}.get(spec.name) or TINY[spec.cls]


def full_config(cls: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the class's defaults, as config.json has it."""
    parameters = inspect.signature(getattr(diffusers, cls).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(config)


def base_folder(folder: Path, spec: TransformerSpec, config: Mapping[str, Any], cls: str = "", pipe: str = "") -> Path:
    """A base model without weights: its index and configs."""
    cls = cls or spec.cls
    pipeline = pipe or f"{spec.model_types[0]}Pipeline"
    index: dict[str, Any] = {"_class_name": pipeline, spec.subfolder: ["diffusers", cls]}
    configs = {spec.subfolder: full_config(cls, config)}
    for sibling in spec.siblings:
        index[sibling.component] = ["diffusers", sibling.cls]
        configs[sibling.subfolder] = full_config(sibling.cls, {})
    for subfolder, entries in configs.items():
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        (folder / subfolder / "config.json").write_text(json.dumps(entries))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def keys_of(names: Iterable[str]) -> NamedKeys:
    return normalise(Path("x.safetensors"), names)


@cache
def class_shapes(cls: str, config: str) -> dict[str, tuple[int, ...]]:
    network = shapes_only(resolve_class(cls), json.loads(config))
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def shapes_of(cls: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a diffusers class at a config."""
    return class_shapes(cls, json.dumps(config))


def sparse(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> Path:
    return write_sparse(path, {name: (dtype, shape) for name, shape in shapes.items()})


def random_state(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layout_converter(spec: TransformerSpec, layout: str) -> Callable[..., dict[str, Any]]:
    converter = next(item.converter for item in spec.layouts if item.name == layout)
    assert converter is not None
    return resolve_converter(converter)


def own_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The transformer's tensors of a manifest by own name, without siblings and junk."""
    source, spec = manifest(name), BY_NAME[EXPECTED[name]]
    stored = keys_of(source.tensors).stored
    siblings = tuple(sibling.inline_prefix for sibling in spec.siblings)
    return {
        own: source.tensors[key][1]
        for own, key in stored.items()
        if not (siblings and own.startswith(siblings)) and not spec.drops(own)
    }


def made_of(name: str) -> dict[str, Made]:
    """The recipes of a manifest in the layout that is not diffusers'."""
    spec, source = BY_NAME[EXPECTED[name]], manifest(name)
    tensors = {own: (shape, torch.float32) for own, shape in own_shapes(name).items()}
    config = full_config(spec.cls, source.diffusers["config"])
    return trace(layout_converter(spec, spec.layouts[1].name), tensors, config)


# What a file is


def test_every_manifest_has_an_expected_answer() -> None:
    assert {path.name.removesuffix(".json.gz") for path in MANIFESTS.glob("*.json.gz")} == EXPECTED.keys()
    assert sum(path.stat().st_size for path in MANIFESTS.iterdir()) < 1_500_000


@pytest.mark.parametrize("name", EXPECTED)
def test_manifest_is_one_architecture_under_any_prefix(name: str) -> None:
    keys = keys_of(manifest(name).tensors)
    found = identify(keys)
    assert found.architecture == EXPECTED[name], [str(lost) for lost in found.rejected]
    assert [fit.spec.name for fit in found.fits] == TWINS.get(name, [EXPECTED[name]])
    assert {lost.architecture for lost in found.rejected} == BY_NAME.keys() - {fit.spec.name for fit in found.fits}
    assert found.layout is not None
    as_diffusers = ("z_image_diffusers", "qwen_image_bf16", "qwen_image_fp8")
    assert (found.layout.name == DIFFUSERS_LAYOUT) == name.startswith(as_diffusers)
    for prefix in ("", *PREFIXES, "module.", "module._orig_mod."):
        alone = identify(keys_of(prefix + own for own in keys.stored))
        assert replace(alone, kind=found.kind) == found, prefix


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_of_the_class_are_its_diffusers_layout(spec: TransformerSpec) -> None:
    for cls in (spec.cls, *spec.other_classes):
        found = identify(keys_of(shapes_of(cls, tiny_config(spec))))
        twins = ["Cosmos Predict 2", "Anima"]
        assert [fit.spec.name for fit in found.fits] == (twins if spec.name in twins else [spec.name])
        seen = found.seen_as(spec)
        assert (seen.spec, seen.layout) == (spec, spec.layouts[0])
        assert spec.layouts[0].name == DIFFUSERS_LAYOUT and spec.layouts[0].converter is None


@pytest.mark.parametrize("architecture", WRITTEN_OUT)
def test_original_names_without_a_manifest_are_recognised(architecture: str) -> None:
    spec = BY_NAME[architecture]
    original = WRITTEN_OUT[architecture](random_state(shapes_of(spec.cls, tiny_config(spec))))
    found = identify(keys_of(original))
    assert [fit.spec.name for fit in found.fits] == [architecture]
    assert found.layout is spec.layouts[1]


def test_every_spec_is_unique_and_resolves() -> None:
    assert len(BY_NAME) == len(SPECS)
    for spec in SPECS:
        for cls in (spec.cls, *spec.other_classes, *(sibling.cls for sibling in spec.siblings)):
            resolve_class(cls)
        for layout in spec.layouts:
            assert layout.keys.all_of
            if layout.converter is not None:
                renaming = isinstance(layout.converter, Renaming)
                resolve_converter(layout.converter.then or "" if renaming else layout.converter)


@pytest.mark.parametrize("name", FLOAT)
def test_a_stray_key_changes_no_layout(name: str) -> None:
    """Most of all, names of diffusers' own are never sent through a converter for other names."""
    keys = [*manifest(name).tensors, "stray.weight"]
    try:
        found = identify(keys_of(keys))
    except errors.MixedPrefixes:  # outside of the prefix it is refused before
        assert keys_of(manifest(name).tensors).prefix
        return
    assert found == identify(keys_of(manifest(name).tensors))


def test_pipelines_choose_their_spec(tmp_path: Path) -> None:
    for pipeline, cls, architecture in (
        ("FluxKontextPipeline", "FluxTransformer2DModel", "FLUX.1"),
        ("Flux2KleinPipeline", "Flux2Transformer2DModel", "FLUX.2"),
        ("Flux3ModularPipeline", "Flux3Transformer2DModel", "FLUX.3"),
        ("QwenImageEditPlusPipeline", "QwenImageTransformer2DModel", "Qwen-Image"),
        ("QwenImage21Pipeline", "QwenImage21Transformer2DModel", "Qwen-Image 2.1"),
        ("WanImageToVideoPipeline", "WanTransformer3DModel", "Wan"),
        ("WanVACEPipeline", "WanVACETransformer3DModel", "Wan VACE"),
        ("ChronoEditPipeline", "ChronoEditTransformer3DModel", "Wan"),
        ("SkyReelsV2Pipeline", "SkyReelsV2Transformer3DModel", "Wan"),
        ("Cosmos2TextToImagePipeline", "CosmosTransformer3DModel", "Cosmos Predict 2"),
        ("AnimaModularPipeline", "CosmosTransformer3DModel", "Anima"),
        ("StableDiffusionPipeline", "UNet2DConditionModel", "Stable Diffusion"),
        ("StableDiffusionXLImg2ImgPipeline", "UNet2DConditionModel", "SDXL"),
        ("StableDiffusion3Pipeline", "SD3Transformer2DModel", "Stable Diffusion 3"),
        ("LTXConditionPipeline", "LTXVideoTransformer3DModel", "LTX-Video"),
        ("LTX2ImageToVideoPipeline", "LTX2VideoTransformer3DModel", "LTX-2"),
        ("HunyuanSkyreelsImageToVideoPipeline", "HunyuanVideoTransformer3DModel", "HunyuanVideo"),
        ("SanaSprintPipeline", "SanaTransformer2DModel", "Sana"),
    ):
        assert next(spec.name for spec in SPECS if spec.serves(cls, pipeline)) == architecture


# Real layouts at full size


WHOLE = sorted(name for name in EXPECTED if "PARTIAL" not in name)
SIDECAR = re.compile(r"\.(weight_scale(_2)?|input_scale|scale_weight|scale_input|comfy_quant)$|scaled_fp8$")


@pytest.mark.parametrize("name", WHOLE)
def test_manifest_plans_at_full_size(name: str, tmp_path: Path) -> None:
    source, spec = manifest(name), BY_NAME[EXPECTED[name]]
    assert source.diffusers["class"] == spec.cls
    base = base_folder(tmp_path / "base", spec, source.diffusers["config"])
    file = write_from_manifest(tmp_path / "x.safetensors", name)
    try:
        start = time.process_time()
        planned = plan(file, base)
        seconds = time.process_time() - start
        assert seconds < 2
    finally:
        file.unlink()
    assert planned.header.data_start < 5_000_000
    assert (planned.spec, dict(planned.config_changes), planned.zero_filled) == (spec, {}, ())
    assert {t.name for t in planned.transformer.targets} == shapes_of(spec.cls, source.diffusers["config"]).keys()
    assert_every_stored_row_used_once(planned)
    assert [part.component for part in planned.siblings] == [sibling.component for sibling in spec.siblings]
    scaled = [key for key in source.tensors if key.endswith((".weight_scale", ".scale_weight"))]
    assert len(planned.layers) == len(scaled)
    held = {part.source for t in planned.targets if t.form or t.decoded for part in ranges_of(t.recipe)}
    assert held == planned.layers.keys()
    TABLE.append((planned.spec.name, plan_json(planned)["kind"], planned.layout, len(planned.targets), seconds, name))


TABLE: list[tuple[str, str, str, int, float, str]] = []


def test_table_of_the_real_files() -> None:
    """With `pytest -s`: what the test before this one found, and how long each plan took."""
    titles = ("architecture", "kind", "layout", "tensors", "plan s", "file")
    rows = [(*row[:3], str(row[3]), f"{row[4]:.2f}", row[5]) for row in sorted(TABLE)]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    assert len({row[5] for row in rows}) == len(rows)


def assert_every_stored_row_used_once(planned: LoadPlan) -> None:
    used: dict[str, int] = {}
    for target in planned.targets:
        assert target.recipe is not None
        for part in ranges_of(target.recipe):
            used[part.source] = used.get(part.source, 0) + part.stop - part.start
    stored = keys_of(planned.header.tensors).stored.values()
    weights = [name for name in stored if name not in planned.dropped and not SIDECAR.search(name)]
    expected = {name: (planned.header.tensors[name].shape or (1,))[0] for name in weights}
    assert used == expected


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - set(FLOAT) - {"flux1_dev_fp8_raw_cast"}))
def test_markers_and_scales_of_quantized_layers_do_not_disturb_detection(name: str) -> None:
    weights = [key for key in manifest(name).tensors if not SIDECAR.search(key)]
    assert len(weights) < len(manifest(name).tensors)
    assert identify(keys_of(weights)).architecture == EXPECTED[name]


# Small networks, bit for bit


FROM_MANIFEST = {
    "Anima": "anima_base_v1_bf16",
    "Cosmos Predict 2": "cosmos_predict2_2b_t2i_bf16",
    "FLUX.2": "flux2_dev_bfl_bf16",
    "Krea 2": "krea2_raw_bf16",
    "Qwen-Image 2.1": "qwen_image_2_1_bf16",
    "SDXL": "sdxl_unet_fp16_prefixed",
    "Stable Diffusion": "aio_sd15_fp32",
    "Stable Diffusion 3": "sd35_medium_fp16_with_vae",
    "Z-Image": "z_image_turbo_comfy_bf16",
}
WIDTH_IS_FIXED = {
    "Chroma": "chroma1_hd_bf16",
    "FLUX.1": "flux1_dev_bfl_bf16",
    "HunyuanVideo": "hunyuan_video_t2v_bf16",
    "Lumina 2": "lumina_image_2_bf16",
}
"""diffusers' converter splits at the published width only, so that no small network goes through it."""


def original_state(spec: TransformerSpec, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors in a layout other than diffusers'."""
    state = random_state(shapes_of(spec.cls, config))
    if spec.name in WRITTEN_OUT:
        return WRITTEN_OUT[spec.name](state)
    return from_recipes(made_of(FROM_MANIFEST[spec.name]), state)


def converted_by_diffusers(
    spec: TransformerSpec, original: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """What diffusers itself makes of the tensors."""
    if spec.component == "unet":
        original = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    if spec.name == "Sana":
        original = {**original, "pos_embed": torch.zeros(1), "y_embedder.y_embedding": torch.zeros(1)}
    converter = SINGLE_FILE_LOADABLE_CLASSES[spec.cls]["checkpoint_mapping_fn"]
    return converter(checkpoint=dict(original), config=dict(config))


@pytest.mark.parametrize("architecture", sorted({*FROM_MANIFEST, *WRITTEN_OUT} - {"Ideogram 4"}))
def test_loaded_tensors_are_those_that_diffusers_converts(architecture: str, tmp_path: Path) -> None:
    spec = BY_NAME[architecture]
    config = full_config(spec.cls, tiny_config(spec))
    original = original_state(spec, config)
    expected = converted_by_diffusers(spec, original, config)
    assert expected.keys() >= shapes_of(spec.cls, config).keys()
    assert_loads_as(tmp_path, spec, config, original, expected)


def assert_loads_as(
    folder: Path,
    spec: TransformerSpec,
    config: Mapping[str, Any],
    stored: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> LoadPlan:
    base = base_folder(folder / "base", spec, config)
    planned = plan(save(folder / "x.safetensors", dict(stored)), base)
    loaded = build(planned).transformer.state_dict()
    assert loaded.keys() == shapes_of(spec.cls, config).keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name
    return planned


def test_ideogram4_rows_are_query_key_value(tmp_path: Path) -> None:
    spec = BY_NAME["Ideogram 4"]
    config = full_config(spec.cls, tiny_config(spec))
    state = random_state(shapes_of(spec.cls, config))
    original = WRITTEN_OUT["Ideogram 4"](state)
    assert len(original) == len(state) - 2 * config["num_layers"]
    assert_loads_as(tmp_path, spec, config, original, state)
    manifest_keys = {re.sub(r"\d+", "0", key) for key in manifest("ideogram4_conditional_fp8_scaled").tensors}
    assert {re.sub(r"\d+", "0", key) for key in original} <= manifest_keys


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_diffusers_layout_loads_as_it_is(spec: TransformerSpec, tmp_path: Path) -> None:
    config = full_config(spec.cls, tiny_config(spec))
    state = random_state(shapes_of(spec.cls, config))
    planned = assert_loads_as(tmp_path, spec, config, state, state)
    assert planned.layout == DIFFUSERS_LAYOUT
    assert not planned.config_changes


@pytest.mark.parametrize(("architecture", "name"), WIDTH_IS_FIXED.items())
def test_recipes_of_fixed_width_give_what_diffusers_converts(architecture: str, name: str) -> None:
    """At the published count of rows, which is all that recipes are about, with two columns."""
    spec = BY_NAME[architecture]
    first = {
        own: (shape[0], *(2 for _ in shape[1:]))
        for own, shape in own_shapes(name).items()
        if not re.search(r"(double_blocks|single_blocks|^layers)\.(?!0\.)", own)
    }
    original = random_state(first)
    tensors = {own: (tuple(tensor.shape), tensor.dtype) for own, tensor in original.items()}
    made = trace(layout_converter(spec, "original"), tensors, {})
    expected = converted_by_diffusers(spec, original, {})
    assert made.keys() == expected.keys()
    for target, item in made.items():
        tensor = evaluate(item.recipe, lambda part: original[part.source][part.start : part.stop])
        assert torch.equal(tensor, expected[target]), target


# Layouts that differ from the published ones


@pytest.mark.parametrize(("name", "pattern"), [
    ("flux1_dev_bfl_bf16", r"(query|key)_norm\.scale$"),
    ("chroma1_hd_bf16", r"(query_norm|key_norm|norms\.\d+)\.scale$"),
    ("krea2_raw_bf16", r"\.scale$"),
])  # fmt: skip
def test_norms_called_weight_are_norms_called_scale(name: str, pattern: str) -> None:
    spec, source = BY_NAME[EXPECTED[name]], manifest(name)
    renamed = {re.sub(pattern, lambda m: m[0].replace("scale", "weight"), own): own for own in own_shapes(name)}
    assert sum(new != old for new, old in renamed.items()) > 4
    shapes = own_shapes(name)
    tensors = {new: (shapes[old], torch.float32) for new, old in renamed.items()}
    made = trace(layout_converter(spec, "original"), tensors, full_config(spec.cls, source.diffusers["config"]))
    assert {target: item.shape for target, item in made.items()} == {
        target: item.shape for target, item in made_of(name).items()
    }


def test_hunyuan_names_of_comfyui_are_those_of_tencent() -> None:
    spec, shapes = BY_NAME["HunyuanVideo"], own_shapes("hunyuan_video_t2v_bf16")
    comfyui = {_as_comfyui_names_hunyuan(name): shape for name, shape in shapes.items()}
    assert len(comfyui.keys() - shapes.keys()) > 600
    found = identify(keys_of(comfyui))
    assert ([fit.spec for fit in found.fits], found.layout) == ([spec], spec.layouts[2])
    converter = spec.layouts[2].converter
    assert isinstance(converter, Renaming)
    assert {converter.rename(name): shape for name, shape in comfyui.items()} == shapes


def _as_comfyui_names_hunyuan(name: str) -> str:
    for old, new in (
        ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
        ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
        ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
        ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
        ("_mod.linear.", "_mod.lin."),
        ("_attn_qkv.", "_attn.qkv."),
        ("mlp.fc1.", "mlp.0."),
        ("mlp.fc2.", "mlp.2."),
        ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"),
        ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
        (".q_norm.weight", ".norm.query_norm.scale"),
        (".k_norm.weight", ".norm.key_norm.scale"),
        ("_attn_proj.", "_attn.proj."),
        (".modulation.linear.", ".modulation.lin."),
        ("_in.mlp.2.", "_in.out_layer."),
        ("_in.mlp.0.", "_in.in_layer."),
    ):
        name = name.replace(old, new)
    return name


def test_ltx_2_3_and_its_bundle(tmp_path: Path) -> None:
    """Newer modulation names, and what the bundle holds for other components."""
    spec = BY_NAME["LTX-2"]
    config = full_config(spec.cls, {**tiny_config(spec), "cross_attn_mod": True, "gated_attn": True})
    state = random_state(shapes_of(spec.cls, config))
    original = WRITTEN_OUT["LTX-2"](state)
    assert "prompt_adaln_single.linear.weight" in original
    others = (
        "model.diffusion_model.video_embeddings_connector.learnable_registers",
        "model.diffusion_model.audio_embeddings_connector.transformer_1d_blocks.0.ff.net.2.weight",
        "text_embedding_projection.aggregate_embed.weight",
        "vae.decoder.conv_in.conv.weight",
        "audio_vae.decoder.conv_in.conv.weight",
        "vocoder.conv_pre.weight",
    )
    bundle = {f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}
    bundle |= {name: torch.zeros(2, 2) for name in others}
    planned = assert_loads_as(tmp_path, spec, config, bundle, state)
    assert len(planned.dropped) == 2
    assert sum(planned.companions.values()) == 4


def test_wan_image_to_video_with_first_and_last_frame(tmp_path: Path) -> None:
    spec = BY_NAME["Wan"]
    image = {"image_dim": 8, "added_kv_proj_dim": 24, "pos_embed_seq_len": 6}
    config = full_config(spec.cls, {**tiny_config(spec), **image})
    state = random_state(shapes_of(spec.cls, config))
    original = WRITTEN_OUT["Wan"](state)
    assert {"img_emb.emb_pos", "blocks.0.cross_attn.k_img.weight"} <= original.keys()
    assert_loads_as(tmp_path, spec, config, original, state)


@pytest.mark.parametrize("cls", ["ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel"])
def test_classes_with_the_keys_of_wan(cls: str, tmp_path: Path) -> None:
    spec = BY_NAME["Wan"]
    config = full_config(cls, tiny_config(spec))
    state = random_state(shapes_of(cls, config))
    base = base_folder(tmp_path / "base", spec, config, cls, f"{cls.partition('Transformer')[0]}Pipeline")
    planned = plan(save(tmp_path / "x.safetensors", WRITTEN_OUT["Wan"](state)), base)
    built = build(planned).transformer
    assert type(built).__name__ == cls
    assert all(torch.equal(tensor, state[name]) for name, tensor in built.state_dict().items())


def test_wan_animate_filters_are_dropped(tmp_path: Path) -> None:
    spec = BY_NAME["Wan Animate"]
    config = full_config(spec.cls, tiny_config(spec))
    state = random_state(shapes_of(spec.cls, config))
    kernel = "motion_encoder.enc.net_app.convs.1.conv2.0.kernel"
    planned = assert_loads_as(
        tmp_path, spec, config, {**WRITTEN_OUT["Wan Animate"](state), kernel: torch.ones(4, 4)}, state
    )
    assert planned.dropped == (kernel,)


@pytest.mark.parametrize(("architecture", "junk"), [
    ("Cosmos Predict 2", ("pos_embedder.seq", "accum_iteration", "blocks.0.self_attn.q_norm._extra_state")),
    ("Sana", ("pos_embed", "y_embedder.y_embedding")),
    ("FLUX.3", ("repa_projectors.0.weight",)),
    ("Qwen-Image", ("__index_timestep_zero__",)),
])  # fmt: skip
def test_junk_is_dropped_and_told(architecture: str, junk: tuple[str, ...], tmp_path: Path) -> None:
    spec = BY_NAME[architecture]
    config = tiny_config(spec)
    original = shapes_of(spec.cls, config) if architecture == "Qwen-Image" else {
        name: tuple(tensor.shape) for name, tensor in original_state(spec, config).items()
    }  # fmt: skip
    file = sparse(tmp_path / "x.safetensors", {**original, **dict.fromkeys(junk, (0,))})
    planned = plan(file, base_folder(tmp_path / "base", spec, config))
    assert planned.dropped == junk


# Sizes that the file tells


def config_changes(folder: Path, spec: TransformerSpec, base: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict:
    """Plan a file of these shapes over a base of another size. Gives what changed."""
    planned = plan(sparse(folder / "x.safetensors", shapes), base_folder(folder / "base", spec, base))
    changes = dict(planned.config_changes)
    assert {target.name: target.shape for target in planned.targets} == shapes_of(spec.cls, {**base, **changes})
    return changes


@pytest.mark.parametrize(("architecture", "base", "file"), [
    ("FLUX.1", {"guidance_embeds": True}, {"num_layers": 8, "num_single_layers": 30}),
    ("FLUX.1", {"guidance_embeds": True}, {"guidance_embeds": False}),
    ("Chroma", {}, {"num_layers": 15, "num_single_layers": 36}),
    ("FLUX.2", {}, {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "guidance_embeds": False}),
    ("Wan", {}, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),
    ("Wan VACE", {}, {
        "num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960, "vace_layers": list(range(0, 30, 2)),
    }),
    ("Qwen-Image", {}, {"num_layers": 40}),
    ("Anima", {**TINY["CosmosTransformer3DModel"], "num_layers": 28}, {"num_layers": 40}),
    ("Stable Diffusion 3", {
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
        "qk_norm": "rms_norm", "dual_attention_layers": [],
    }, {
        "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
        "dual_attention_layers": list(range(13)),
    }),
    ("Stable Diffusion 3", {
        "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm",
        "dual_attention_layers": list(range(13)),
    }, {"qk_norm": None, "dual_attention_layers": []}),
])  # fmt: skip
def test_config_follows_the_file(architecture: str, base: dict[str, Any], file: dict[str, Any], tmp_path: Path) -> None:
    """In diffusers' names: exactly the entries that differ, and no other way round either."""
    spec = BY_NAME[architecture]
    assert config_changes(tmp_path / "there", spec, base, shapes_of(spec.cls, {**base, **file})) == file
    back = config_changes(tmp_path / "back", spec, {**base, **file}, shapes_of(spec.cls, base))
    defaults = full_config(spec.cls, base)
    assert back == {name: defaults[name] for name in file}


@pytest.mark.parametrize(("name", "base", "changes"), [
    ("flux1_schnell_bfl_bf16", {"guidance_embeds": True, "num_layers": 5}, {
        "guidance_embeds": False, "num_layers": 19,
    }),
    ("chroma1_hd_bf16", {"num_single_layers": 3}, {"num_single_layers": 38}),
    ("flux2_klein_4b_bf16", {
        "num_layers": 8, "num_single_layers": 48, "num_attention_heads": 48, "guidance_embeds": True,
    }, {
        "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "guidance_embeds": False,
    }),
    ("anima_2_9b_bf16", {"num_layers": 28}, {"num_layers": 40}),
    ("wan22_t2v_a14b_low_noise_fp16", {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}, {
        "num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824,
    }),
    ("sd35_medium_fp16_with_vae", {"num_layers": 38, "qk_norm": None, "dual_attention_layers": []}, {
        "num_layers": 24, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13)),
    }),
])  # fmt: skip
def test_config_follows_the_original_layout(
    name: str, base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    spec = BY_NAME[EXPECTED[name]]
    folder = base_folder(tmp_path / "base", spec, {**manifest(name).diffusers["config"], **base})
    planned = plan(write_from_manifest(tmp_path / "x.safetensors", name), folder)
    assert planned.config_changes == changes


def test_marker_of_qwen_edit_2511_sets_the_config(tmp_path: Path) -> None:
    spec = BY_NAME["Qwen-Image"]
    shapes = {**shapes_of(spec.cls, tiny_config(spec)), "__index_timestep_zero__": (0,)}
    planned = plan(sparse(tmp_path / "x.safetensors", shapes), base_folder(tmp_path / "base", spec, tiny_config(spec)))
    assert planned.config_changes == {"zero_cond_t": True}


def test_missing_middle_blocks_are_named(tmp_path: Path) -> None:
    spec, config = BY_NAME["Anima"], {**TINY["CosmosTransformer3DModel"], "num_layers": 40}
    shapes = {name: shape for name, shape in shapes_of(spec.cls, config).items() if "_blocks.17." not in name}
    base = base_folder(tmp_path / "base", spec, {**config, "num_layers": 28})
    with pytest.raises(errors.MissingTensors, match=r"\(all of transformer_blocks\.17\)") as refusal:
        plan(sparse(tmp_path / "x.safetensors", shapes), base)
    assert all(name.startswith("transformer_blocks.17.") for name in refusal.value.names)


@pytest.mark.parametrize("index", ["99999", "123456789", "9" * 5000, "٣"])
def test_absurd_block_indices_build_no_network(index: str, tmp_path: Path) -> None:
    spec, config = BY_NAME["Anima"], TINY["CosmosTransformer3DModel"]
    shapes = {**shapes_of(spec.cls, config), f"transformer_blocks.{index}.attn1.to_q.weight": (24, 24)}
    with pytest.raises(errors.UnexpectedTensors):
        plan(sparse(tmp_path / "x.safetensors", shapes), base_folder(tmp_path / "base", spec, config))


@pytest.mark.parametrize("width", [0, 7, 2**62])
def test_absurd_widths_build_no_network(width: int, tmp_path: Path) -> None:
    spec, config = BY_NAME["FLUX.2"], tiny_config(BY_NAME["FLUX.2"])
    shapes = {**shapes_of(spec.cls, config), "x_embedder.weight": (width, 0)}
    with pytest.raises(errors.ShapeMismatch, match=r"x_embedder\.weight"):
        plan(sparse(tmp_path / "x.safetensors", shapes), base_folder(tmp_path / "base", spec, config))


# Refusals


def test_keys_that_a_converter_misses_are_named(tmp_path: Path) -> None:
    spec, source = BY_NAME["FLUX.1"], manifest("flux1_dev_bfl_bf16")
    tensors = {name: entry for name, entry in source.tensors.items() if not name.startswith("double_blocks.7.")}
    file = write_sparse(tmp_path / "x.safetensors", tensors)
    with pytest.raises(errors.ConverterFailed, match=r"convert_flux_transformer.*double_blocks\.7\."):
        plan(file, base_folder(tmp_path / "base", spec, source.diffusers["config"]))


def test_anima_and_cosmos_share_a_class_but_no_conditioner(tmp_path: Path) -> None:
    anima, cosmos = BY_NAME["Anima"], BY_NAME["Cosmos Predict 2"]
    config = manifest("anima_base_v1_bf16").diffusers["config"]
    bases = {spec: base_folder(tmp_path / spec.name, spec, config) for spec in (anima, cosmos)}
    full = write_from_manifest(tmp_path / "anima.safetensors", "anima_base_v1_bf16")
    without = write_from_manifest(tmp_path / "cosmos.safetensors", "cosmos_predict2_2b_t2i_bf16")
    assert [part.component for part in plan(full, bases[anima]).siblings] == ["text_conditioner"]
    with pytest.raises(errors.WrongArchitecture, match="a transformer of the Anima family"):
        plan(full, bases[cosmos])
    for spec, base in bases.items():  # nothing tells them apart: the base decides
        planned = plan(without, base)
        assert (planned.spec, planned.siblings) == (spec, ())


def test_cosmos_1_is_not_taken_for_cosmos_2(tmp_path: Path) -> None:
    names = ("x_embedder.proj.1.weight", "affline_norm.weight", "blocks.block0.blocks.0.block.attn.to_q.0.weight")
    found = identify(keys_of(f"net.{name}" for name in names))
    assert found.architecture is None
    assert found.nearest is not None


@pytest.mark.parametrize(
    ("found", "base"), [("sdxl_unet_fp16_prefixed", "Stable Diffusion"), ("aio_sd15_fp32", "SDXL")]
)
def test_unets_are_told_apart(found: str, base: str, tmp_path: Path) -> None:
    spec = BY_NAME[base]
    said = f"transformer of the {EXPECTED[found]} family.*base model is {base}"
    with pytest.raises(errors.WrongArchitecture, match=said):
        plan(write_from_manifest(tmp_path / "x.safetensors", found), base_folder(tmp_path, spec, tiny_config(spec)))


def test_every_other_pairing_is_refused_by_name(tmp_path: Path) -> None:
    """Each architecture's file over each other's base, at small size: one sentence, naming both."""
    files = {
        spec: sparse(tmp_path / f"{number}.safetensors", shapes_of(spec.cls, tiny_config(spec)))
        for number, spec in enumerate(SPECS)
    }
    for base in SPECS:
        folder = base_folder(tmp_path / f"base of {base.name}", base, tiny_config(base))
        for spec in SPECS:
            if spec is base or spec.name == "Anima" or (spec.name, base.name) == ("Cosmos Predict 2", "Anima"):
                continue  # Anima's names without its conditioner are those of Cosmos
            with pytest.raises(errors.WrongArchitecture) as refusal:
                plan(files[spec], folder)
            assert (refusal.value.expected, refusal.value.found) == (base.name, spec.name)


def test_class_without_a_spec_refuses_listed_architectures_by_name(tmp_path: Path) -> None:
    """A class that diffusers knows and this list does not still loads its own names."""
    cls, config = "PixArtTransformer2DModel", {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 4, "cross_attention_dim": 8, "sample_size": 8,
    }  # fmt: skip
    spec = TransformerSpec(cls, cls, ("PixArtAlpha",), ())
    base = base_folder(tmp_path / "base", spec, config)
    assert plan(sparse(tmp_path / "own.safetensors", shapes_of(cls, config)), base).spec.cls == cls
    with pytest.raises(errors.WrongArchitecture, match=r"transformer of the FLUX\.1 family"):
        plan(write_from_manifest(tmp_path / "flux.safetensors", "flux1_dev_bfl_bf16"), base)


def test_class_without_a_spec_may_have_the_keys_of_a_listed_one(tmp_path: Path) -> None:
    """Kolors has SDXL's class and nearly its names."""
    spec = BY_NAME["SDXL"]
    config = {**UNET_SDXL, "encoder_hid_dim": 8, "encoder_hid_dim_type": "text_proj"}
    base = base_folder(tmp_path / "base", spec, config, pipe="KolorsPipeline")
    file = sparse(tmp_path / "x.safetensors", shapes_of(spec.cls, config))
    assert identify(keys_of(read_header(file).tensors)).architecture is None
    assert plan(file, base).spec.name == spec.cls


def test_explanation_names_the_keys() -> None:
    found = identify(keys_of(manifest("flux1_dev_bfl_bf16").tensors))
    assert isinstance(found, Detection)
    assert "vector_in.in_layer.weight" in found.why
    reasons = {(lost.architecture, lost.layout): str(lost) for lost in found.rejected}
    assert reasons["Chroma", "original"].endswith("lacks distilled_guidance_layer.layers.0.in_layer.weight")


def test_dtypes_of_manifests_are_known() -> None:
    assert {dtype for name in EXPECTED for dtype, _ in manifest(name).tensors.values()} <= BITS.keys()
