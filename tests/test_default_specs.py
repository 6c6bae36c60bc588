"""Everything that diffusers' single-file table knows: by a file here, or by its class and converter alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from original_layouts import Tensors
from test_architectures import full_config, random_state, shapes_of
from tiny_models import save, tiny_flux_bfl, with_prefix
from transplant import errors
from transplant.architectures import SPECS
from transplant.build import build
from transplant.plan import plan
from transplant.skeleton import make_default_spec

LISTED = {cls for spec in SPECS for cls in (spec.cls, *spec.other_classes)}
OTHER_PARTS = re.compile(r"^Autoencoder|ControlNet|^MotionAdapter$")
"""Autoencoders, ControlNets, adapters: no transformer that a file could replace."""

BLOCKS = (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),)
SMALL: dict[str, dict[str, Any]] = {
    "MiniMaxH3Transformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "hidden_size": 16, "num_layers": 2, "num_refiner_layers": 1,
        "ffn_dim": 24, "in_channels": 2, "audio_in_channels": 2, "text_dim": 12, "freq_dim": 8, "rope_freq_dim": 2,
        "time_embed_hidden_dim": 16, "time_embed_dim": 8,
    },
    "MotifVideoTransformer3DModel": {
        "in_channels": 5, "out_channels": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
        "num_single_layers": 1, "text_embed_dim": 12, "rope_axes_dim": (2, 2, 4),
    },
    "StableCascadeUNet": {
        "in_channels": 2, "out_channels": 2, "timestep_ratio_embedding_dim": 4, "conditioning_dim": 8,
        "block_out_channels": (8, 8), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1), "block_types_per_layer": BLOCKS * 2, "clip_text_in_channels": 4,
        "clip_text_pooled_in_channels": 4, "clip_image_in_channels": 4, "switch_level": (False,),
    },
}  # fmt: skip
PIPELINES = {
    "MiniMaxH3Transformer3DModel": ("MiniMaxH3Pipeline", "transformer"),
    "MotifVideoTransformer3DModel": ("MotifVideoPipeline", "transformer"),
    "StableCascadeUNet": ("StableCascadePriorPipeline", "prior"),
}


def base_of(cls: str, folder: Path) -> tuple[Path, str]:
    """A base model without weights, and the component to replace."""
    pipeline, component = PIPELINES[cls]
    (folder / component).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, component: ["diffusers", cls]}))
    (folder / component / "config.json").write_text(json.dumps(full_config(cls, SMALL[cls])))
    return folder, component


def minimax(state: Tensors) -> Tensors:
    """The published layout: fused [q; k; v], the gate before the value."""
    stored: Tensors = {}
    for name, tensor in state.items():
        if ".attn.to_q." in name:
            parts = [state[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            name, tensor = name.replace(".attn.to_q.", ".attn.qkv_proj."), torch.cat(parts)
        elif ".attn.to_k." in name or ".attn.to_v." in name:
            continue
        elif ".ff.net.0.proj.weight" in name:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        for new, old in (
            ("transformer_blocks.", "blocks."), ("refiner_blocks.", "blocks."), ("audio_proj_in.", "audio_patch_proj."),
            ("audio_proj_out.", "final_layer.audio_out."), ("norm_out.norm.", "final_layer.norm."),
            ("norm_out.linear.", "final_layer.adaln_proj.linear."), (".attn.norm_q.", ".attn.q_norm."),
            ("time_embedder.linear_1.", "time_embedder.proj_in."), ("context_embedder.", "condition_proj."),
            ("time_embedder.linear_2.", "time_embedder.proj_out."), (".attn.norm_k.", ".attn.k_norm."),
            (".attn.to_out.0.", ".attn.out_proj."), (".ff.net.0.proj.", ".mlp.fc1."), (".ff.net.2.", ".mlp.fc2."),
        ):  # fmt: skip
            name = name.replace(new, old)
        name = re.sub(r"^proj_in\.", "video_patch_proj.", name)
        stored[re.sub(r"^proj_out\.", "final_layer.video_out.", name)] = tensor
    return stored


def cascade(state: Tensors) -> Tensors:
    """Stage C as published: torch's own attention, q, k and v in one."""
    stored: Tensors = {}
    for name, tensor in state.items():
        if ".to_q." in name:
            parts = [state[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")]
            stored[re.sub(r"to_q\.(\w+)$", r"attn.in_proj_\1", name)] = torch.cat(parts)
        elif ".to_k." not in name and ".to_v." not in name:
            stored[name.replace("to_out.0.", "attn.out_proj.")] = tensor
    return stored


ORIGINAL = {"MiniMaxH3Transformer3DModel": minimax, "StableCascadeUNet": cascade}


def test_every_class_of_the_table_is_accounted_for() -> None:
    """With a spec, by its class alone (and then tried below), or no transformer."""
    others = {cls for cls in SINGLE_FILE_LOADABLE_CLASSES if OTHER_PARTS.search(cls)}
    assert others.isdisjoint(LISTED)
    assert SINGLE_FILE_LOADABLE_CLASSES.keys() - LISTED - others == SMALL.keys()


@pytest.mark.parametrize("cls", sorted(SINGLE_FILE_LOADABLE_CLASSES))
def test_a_default_spec_has_the_converter_of_the_table(cls: str) -> None:
    spec = make_default_spec(cls)
    assert [layout.name for layout in spec.layouts] == ["diffusers", "original"]
    assert spec.layouts[1].converter is SINGLE_FILE_LOADABLE_CLASSES[cls]["checkpoint_mapping_fn"]
    assert spec.infer_config is None and spec.serves(cls, "AnyPipeline")


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("cls", sorted(SMALL))
def test_own_names_load_bit_for_bit(cls: str, prefix: str, tmp_path: Path) -> None:
    state = random_state(shapes_of(cls, SMALL[cls]))
    base, component = base_of(cls, tmp_path / "base")
    planned = plan(save(tmp_path / "x.safetensors", with_prefix(state, prefix)), base, component=component)
    assert (planned.layout, planned.transformer.component) == ("diffusers", component)
    built = build(planned).transformer
    assert type(built) is getattr(diffusers, cls)
    assert all(torch.equal(tensor, state[name]) for name, tensor in built.state_dict().items())


@pytest.mark.parametrize("cls", sorted(ORIGINAL))
def test_original_names_load_bit_for_bit(cls: str, tmp_path: Path) -> None:
    state = random_state(shapes_of(cls, SMALL[cls]))
    stored = ORIGINAL[cls](state)
    assert stored.keys() - state.keys()
    base, component = base_of(cls, tmp_path / "base")
    planned = plan(save(tmp_path / "x.safetensors", stored), base, component=component)
    assert planned.layout == "original"
    built = build(planned).transformer.state_dict()
    assert built.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in built.items())


@pytest.mark.parametrize("cls", sorted(SMALL))
def test_files_of_others_are_refused(cls: str, tmp_path: Path) -> None:
    base, component = base_of(cls, tmp_path / "base")
    flux = save(tmp_path / "flux.safetensors", tiny_flux_bfl())
    with pytest.raises(errors.WrongArchitecture, match=r"FLUX\.1"):
        plan(flux, base, component=component)
    state = random_state(shapes_of(cls, SMALL[cls]))
    name = next(iter(state))
    with pytest.raises(errors.MissingTensors, match=re.escape(name)):
        plan(save(tmp_path / "x.safetensors", {k: v for k, v in state.items() if k != name}), base, component=component)


@pytest.mark.parametrize("cls", sorted(SMALL))
def test_a_stray_key_sends_own_names_through_no_converter(cls: str, tmp_path: Path) -> None:
    """The layout is decided by how much of the model its names cover, not by whether every name matches."""
    state = random_state(shapes_of(cls, SMALL[cls]))
    base, component = base_of(cls, tmp_path / "base")
    with pytest.raises(errors.UnexpectedTensors) as refusal:
        plan(save(tmp_path / "x.safetensors", {**state, "stray": torch.zeros(1)}), base, component=component)
    assert refusal.value.names == ("stray",)
