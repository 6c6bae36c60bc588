"""What a plan says and refuses, on real layouts at full size and on small files with one fault each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from tiny_models import (
    manifest,
    random_z_image,
    save,
    tiny_bundle,
    tiny_flux_bfl,
    tiny_pipeline,
    tiny_z_image_config,
    to_comfyui,
    with_prefix,
    write_from_manifest,
    write_sparse,
)
from transplant import errors
from transplant.base_model import read_base
from transplant.build import build
from transplant.inspection import inspect_file
from transplant.memory import anonymous_bytes
from transplant.plan import plan
from transplant.view import file_rows, plan_json, plan_rows

Z_IMAGE_FLOAT = ("z_image_turbo_comfy_bf16", "z_image_turbo_comfy_bf16_prefixed", "z_image_diffusers_bf16")
ROOT = Path(__file__).parent.parent
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "net.", "transformer.", "model.")


def base_folder(
    folder: Path, config: dict, cls: str = "ZImageTransformer2DModel", pipeline: str = "ZImagePipeline"
) -> Path:
    """A base model without weights: index and config are all that planning needs."""
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    index = {"_class_name": pipeline, "transformer": ["diffusers", cls], "scheduler": ["diffusers", "X"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "config.json").write_text(json.dumps({"_class_name": cls, **config}))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ZImageTransformer2DModel]:
    """A base folder and a network of its size."""
    config = tiny_z_image_config()
    return base_folder(tmp_path_factory.mktemp("base"), config), random_z_image(config, seed=7, dtype=torch.bfloat16)


def bytes_read() -> int:
    """Bytes that this process asked the system to read so far."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize("name", Z_IMAGE_FLOAT)
def test_real_layout_at_full_size(name: str, tmp_path: Path) -> None:
    """12 GB sparse: planned in under 2 s and 5 MB, built with hardly a byte of its own."""
    base = base_folder(tmp_path / "base", {})
    file = write_from_manifest(tmp_path / f"{name}.safetensors", name)
    plan(file, base)  # imports and caches are not the plan's
    start, before = time.perf_counter(), bytes_read()
    planned = plan(file, base, dtype=torch.bfloat16)
    assert time.perf_counter() - start < 2
    assert bytes_read() - before < 5_000_000
    expected = 6_154_908_736 * 2
    assert planned.resident_bytes == planned.mapped_bytes == expected
    assert planned.peak_bytes == 0
    anonymous = anonymous_bytes()
    model = build(planned).transformer
    assert anonymous_bytes() - anonymous < 1_000_000_000
    assert sum(p.numel() for p in model.parameters()) * 2 == expected
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    file.unlink()


def test_plan_accounts_for_every_tensor(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """The rows of every stored tensor are used exactly once."""
    base, network = tiny
    file = save(tmp_path / "x.safetensors", to_comfyui(network.state_dict()))
    planned = plan(file, base)
    used: dict[str, int] = {}
    for target in planned.targets:
        assert target.recipe is not None
        for part in target.recipe.ranges:
            used[part.source] = used.get(part.source, 0) + part.stop - part.start
    assert used == {name: info.shape[0] for name, info in planned.header.tensors.items()}
    assert [target.offset for target in planned.targets] == sorted(target.offset for target in planned.targets)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
def test_every_prefix(prefix: str, layout: str, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A02: one network under six prefixes in two layouts is one network."""
    base, network = tiny
    state = to_comfyui(network.state_dict()) if layout == "comfyui" else network.state_dict()
    planned = plan(save(tmp_path / "x.safetensors", with_prefix(state, prefix)), base)
    assert (planned.prefix, planned.layout) == (prefix, layout)
    loaded = build(planned).transformer.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.diffusion_model._orig_mod."])
def test_wrappers(wrapper: str, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """What torch.compile and DistributedDataParallel put in front of names."""
    base, network = tiny
    planned = plan(save(tmp_path / "x.safetensors", with_prefix(to_comfyui(network.state_dict()), wrapper)), base)
    loaded = build(planned).transformer.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in network.state_dict().items())


def test_bundle_reads_only_the_transformer(tmp_path: Path) -> None:
    """A23, A10: companions are named and not read, junk is dropped."""
    pipeline = tiny_pipeline(3, torch.bfloat16)
    base = base_folder(tmp_path / "base", dict(pipeline.transformer.config))
    bundle = tiny_bundle(pipeline)
    planned = plan(save(tmp_path / "bundle.safetensors", bundle), base)
    assert set(planned.companions) == {"text encoder", "VAE"}
    assert planned.dropped == ("model.diffusion_model.norm_final.weight",)
    loaded = build(planned).transformer.state_dict()
    for name, tensor in pipeline.transformer.state_dict().items():
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype))


def test_stray_key_of_the_other_layout(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """B32: a diffusers-layout file with one foreign key is never sent through the converter."""
    base, network = tiny
    state = dict(network.state_dict()) | {"norm_final.weight": torch.full((4,), float("nan"))}
    planned = plan(save(tmp_path / "x.safetensors", state), base)
    assert planned.layout == "diffusers"
    assert planned.dropped == ("norm_final.weight",)


def lora() -> dict[str, torch.Tensor]:
    return {f"diffusion_model.layers.0.attention.to_q.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}


def vae() -> dict[str, torch.Tensor]:
    return {"encoder.conv_in.weight": torch.ones(4, 3, 3, 3), "decoder.conv_in.weight": torch.ones(4, 4, 3, 3)}


def text_encoder() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.ones(8, 4),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4),
    }


def controlnet() -> dict[str, torch.Tensor]:
    return {"control_layers.0.attention.to_q.weight": torch.ones(4, 4)}


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [("LoRA", lora()), ("VAE", vae()), ("text encoder", text_encoder()), ("ControlNet", controlnet())],
)
def test_other_kinds(kind: str, tensors: dict, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Each is named for what it is; the way out is one that every host has. The rows call nothing the transformer's."""
    with pytest.raises(errors.NotATransformer) as refusal:
        plan(save(tmp_path / "x.safetensors", tensors), tiny[0])
    assert refusal.value.kind == kind
    assert f"where your program takes {kind}s, if it does" in refusal.value.remedy
    assert "folder" not in refusal.value.remedy
    found = inspect_file(tmp_path / "x.safetensors")
    assert dict(file_rows(found.header, found.keys, found.detection))["tensors"] == f"{len(tensors)} stored"


def test_vae_only_bundle(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A file of companions and nothing else is what the companions are."""
    with pytest.raises(errors.NotATransformer, match="is a VAE"):
        plan(save(tmp_path / "x.safetensors", with_prefix(vae(), "first_stage_model.")), tiny[0])


def test_other_architecture(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A known other network is named; the full-size file is refused from its header alone."""
    with pytest.raises(errors.WrongArchitecture) as refusal:
        plan(save(tmp_path / "small.safetensors", tiny_flux_bfl()), tiny[0])
    assert refusal.value.expected == "Z-Image"
    file = write_from_manifest(tmp_path / "flux.safetensors", "flux1_dev_bfl_bf16")
    before, start = bytes_read(), time.perf_counter()
    with pytest.raises(errors.WrongArchitecture):
        plan(file, tiny[0])
    assert bytes_read() - before < 5_000_000
    assert time.perf_counter() - start < 2
    file.unlink()


def test_unknown_keys_show_found_and_expected(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A02, B07: keys nobody knows are shown beside the keys that were expected."""
    with pytest.raises(errors.WrongArchitecture) as refusal:
        plan(save(tmp_path / "x.safetensors", {f"mystery.{i}.weight": torch.ones(2) for i in range(9)}), tiny[0])
    assert "mystery.0.weight" in str(refusal.value)
    assert "x_embedder.weight" in str(refusal.value)
    assert refusal.value.found is None


def test_other_width_names_tensor_and_both_shapes(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A12: a file of another size shows one stored tensor, its shape and the model's."""
    wide = random_z_image(tiny_z_image_config(dim=72), seed=1, dtype=torch.bfloat16)
    state = to_comfyui(wide.state_dict())
    with pytest.raises(errors.ShapeMismatch) as refusal:
        plan(save(tmp_path / "x.safetensors", state), tiny[0])
    error = refusal.value
    assert error.expected == tuple(tiny[1].state_dict()[error.tensor].shape)
    assert error.found == tuple(wide.state_dict()[error.tensor].shape)
    assert error.stored in state
    for part in (error.stored, str(list(error.expected)), str(list(error.found))):
        assert part in str(error)


def test_missing_tensors(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Each missing target is named, in the model's own words."""
    state = to_comfyui(tiny[1].state_dict())
    del state["layers.1.attention.qkv.weight"]
    with pytest.raises(errors.MissingTensors) as refusal:
        plan(save(tmp_path / "x.safetensors", state), tiny[0])
    assert set(refusal.value.names) == {f"layers.1.attention.to_{part}.weight" for part in "qkv"}


def test_unexpected_tensors(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Keys without a place in the model are named as they are stored, and never dropped silently."""
    state = with_prefix(to_comfyui(tiny[1].state_dict()), "model.diffusion_model.")
    state["model.diffusion_model.layers.0.attention.extra.weight"] = torch.ones(3)
    with pytest.raises(errors.UnexpectedTensors) as refusal:
        plan(save(tmp_path / "x.safetensors", state), tiny[0])
    assert refusal.value.names == ("model.diffusion_model.layers.0.attention.extra.weight",)


def test_two_sources_for_one_target(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A fused qkv beside a separate to_q: it cannot be told which one is meant."""
    state = to_comfyui(tiny[1].state_dict())
    state["layers.0.attention.to_q.weight"] = tiny[1].state_dict()["layers.0.attention.to_q.weight"].clone()
    with pytest.raises(errors.UnexpectedTensors) as refusal:
        plan(save(tmp_path / "x.safetensors", state), tiny[0])
    assert refusal.value.names == ("layers.0.attention.to_q.weight",)


def test_mixed_prefixes(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Half of the keys under one prefix, some under none."""
    state = with_prefix(to_comfyui(tiny[1].state_dict()), "model.diffusion_model.")
    for name in list(state)[:3]:
        state[name.removeprefix("model.diffusion_model.")] = state.pop(name)
    with pytest.raises(errors.MixedPrefixes) as refusal:
        plan(save(tmp_path / "x.safetensors", state), tiny[0])
    assert len(refusal.value.strangers) == 3


@pytest.mark.parametrize("dtype", ["F6_E2M3", "MXFP3"])
def test_unknown_dtype(dtype: str, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A dtype that torch cannot hold, and one that nobody knows, are refused by name."""
    tensors = {n: ("BF16", tuple(t.shape)) for n, t in to_comfyui(tiny[1].state_dict()).items()}
    file = write_sparse(tmp_path / "x.safetensors", tensors)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entry = header["layers.0.feed_forward.w1.weight"]
    entry["dtype"] = dtype
    entry["shape"] = [(entry["data_offsets"][1] - entry["data_offsets"][0]) * 8 // 6]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(errors.UnknownDtype) as refusal:
        plan(file, tiny[0])
    assert (refusal.value.tensor, refusal.value.dtype) == ("layers.0.feed_forward.w1.weight", dtype)


def test_converter_that_fails_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class without a spec whose converter stumbles over the keys: a sentence, not a traceback."""
    base = base_folder(
        tmp_path / "base", {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8},
        "AuraFlowTransformer2DModel", "AuraFlowPipeline",
    )  # fmt: skip
    with pytest.raises(errors.OverrideArchMismatch) as refusal:
        plan(save(tmp_path / "x.safetensors", {"init_x_linear.weight": torch.ones(2, 2)}), base)
    assert "x.safetensors" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "form"),
    [("z_image_turbo_comfy_int8_convrot", "int8"), ("z_image_turbo_kijai_fp8_scaled", "float8_e4m3fn")],
)
def test_quantized_files_stay_at_their_width(name: str, form: str, tmp_path: Path) -> None:
    """A15: a 6 GB file is 6 GB once loaded, nearly all of it left in the file."""
    file = write_from_manifest(tmp_path / "x.safetensors", name)
    planned = plan(file, base_folder(tmp_path / "base", {}), dtype=torch.bfloat16)
    assert {target.form.weights_dtype for target in planned.targets if target.form} == {form}
    assert planned.resident_bytes < file.stat().st_size
    assert planned.peak_bytes < 0.02 * planned.resident_bytes
    file.unlink()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_raw_fp8_values_are_taken_as_they_are(
    dtype: torch.dtype, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path
) -> None:
    """fp8 without scales, norms and biases included, is a plain cast; the plan says so."""
    state = {name: tensor.to(dtype) for name, tensor in to_comfyui(tiny[1].state_dict()).items()}
    planned = plan(save(tmp_path / "x.safetensors", state), tiny[0])
    assert "fp8 without scales" in planned.warnings[0]
    loaded = build(planned).transformer.state_dict()
    for name, tensor in tiny[1].state_dict().items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor.to(dtype).to(torch.bfloat16))


BASE_FAULTS = {
    "no folder": "nowhere: no such folder",
    "no index": "base: the folder holds no model_index.json",
    "not json": "base: model_index.json is not valid JSON",
    "no component": "base: a ZImagePipeline has no component 'transformer'",
    "unknown class": "NoSuchModel",
    "bad config": "",
    "no config": "base: transformer/config.json cannot be read",
}


@pytest.mark.parametrize("damage", BASE_FAULTS)
def test_unusable_base(damage: str, tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A base model that cannot be used is another error than a file that cannot."""
    file = save(tmp_path / "x.safetensors", to_comfyui(tiny[1].state_dict()))
    base = base_folder(tmp_path / "base", tiny_z_image_config())
    index = base / "model_index.json"
    if damage == "no folder":
        base = tmp_path / "nowhere"
    elif damage == "no index":
        index.unlink()
    elif damage == "not json":
        index.write_text("{")
    elif damage == "no component":
        index.write_text(json.dumps({"_class_name": "ZImagePipeline"}))
    elif damage == "unknown class":
        index.write_text(json.dumps({"_class_name": "P", "transformer": ["diffusers", "NoSuchModel"]}))
    else:
        config = base / "transformer" / "config.json"
        config.unlink() if damage == "no config" else config.write_text(json.dumps({"n_heads": "many"}))
    with pytest.raises(errors.BaseModelError) as refusal:
        plan(file, base)
    assert BASE_FAULTS[damage] in str(refusal.value)


def test_plan_prints_itself(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """Rows and JSON say the same, and JSON is JSON."""
    planned = plan(save(tmp_path / "x.safetensors", to_comfyui(tiny[1].state_dict())), tiny[0], dtype=torch.float32)
    told = json.loads(json.dumps(plan_json(planned)))
    assert told["architecture"] == "Z-Image"
    assert told["resident_bytes"] == sum(group["nbytes"] for group in told["groups"])
    assert told["resident_bytes"] == 4 * sum(tensor.numel() for tensor in tiny[1].state_dict().values())
    assert dict(plan_rows(planned))["layout"] == "comfyui, no prefix"


def test_predicted_memory_is_what_it_takes(tmp_path: Path) -> None:
    """Resident and peak as printed before the load, against what a fresh process really took."""
    config = tiny_z_image_config(dim=1536, n_layers=4)
    base = base_folder(tmp_path / "base", config)
    file = save(tmp_path / "x.safetensors", to_comfyui(random_z_image(config, 1, torch.bfloat16).state_dict()))
    for options in (["--dtype=bf16"], ["--dtype=fp32"], ["--dtype=bf16", "--no-mmap"]):
        command = [sys.executable, "extension.py", "load", str(file), "--base", str(base), "--device=cpu", "--json"]
        told = json.loads(subprocess.run([*command, *options], capture_output=True, check=True, cwd=ROOT).stdout)
        own = told["resident_bytes"] - told["mapped_bytes"]
        assert own - 5_000_000 < told["memory_bytes"] < told["peak_bytes"] + 20_000_000, (options, told)


def test_manifest_of_another_size_over_the_real_config(tmp_path: Path) -> None:
    """The real file over a base of one layer less: unexpected tensors, each of that layer."""
    file = write_from_manifest(tmp_path / "x.safetensors", Z_IMAGE_FLOAT[0])
    with pytest.raises(errors.UnexpectedTensors) as refusal:
        plan(file, base_folder(tmp_path / "base", {"n_layers": 29}))
    assert all(name.startswith("layers.29.") for name in refusal.value.names)
    assert len(refusal.value.names) == sum(n.startswith("layers.29.") for n in manifest(Z_IMAGE_FLOAT[0]).tensors)
    file.unlink()


def test_base_is_read_once(tiny: tuple[Path, ZImageTransformer2DModel], tmp_path: Path) -> None:
    """A BaseModel that was read already is taken as it is."""
    file = save(tmp_path / "x.safetensors", to_comfyui(tiny[1].state_dict()))
    base = read_base(tiny[0])
    assert plan(file, base).base is base


def test_missing_blocks_are_each_named() -> None:
    """Not the first five tensors of the first block alone."""
    names = [f"transformer_blocks.{block}.{part}" for block in (17, 18) for part in ("a", "b", "c", "d")]
    told = str(errors.MissingTensors("x.safetensors", [*names, "proj_out.weight"], "Anima"))
    assert "lacks 9 tensors of Anima (all of transformer_blocks.17, transformer_blocks.18, proj_out.weight)" in told
    held = ["layers.4.b", "layers.5.a"]
    some = str(errors.MissingTensors("x.safetensors", ["layers.3.a", "layers.4.a"], "Z-Image", held))
    assert "(all of layers.3, layers.4.a)" in some
