"""Tiny base models that a real SD.Next recognizes, and files for them in every form that it is asked to take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

import gguf_files
from kitchen import Written, float8, int8
from original_layouts import WRITTEN_OUT, Tensors, from_recipes
from test_architectures import FROM_MANIFEST, WIDTH_IS_FIXED, made_of
from test_formats_blocks import nvfp4
from tiny_models import make_demo, save, to_comfyui
from tiny_pipelines import clip, decoder, filled, flow, network, sdxl, t5, tokenizer, vae, vae_flux2, vae_wan

FLUX2 = {"attention_head_dim": 16, "axes_dims_rope": [4, 4, 4, 4], "joint_attention_dim": 24}
WAN = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64}
FLUX1 = {"attention_head_dim": 16, "axes_dims_rope": [4, 4, 8], "pooled_projection_dim": 8, "joint_attention_dim": 8}


def z_image() -> Any:
    return make_demo.make_pipeline(0, torch.float32, n_layers=2, dim=96)


def klein() -> Any:
    """Its text encoder gives the hidden states of layers 9, 18 and 27."""
    return diffusers.Flux2KleinPipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=vae_flux2(1), text_encoder=decoder("Qwen3ForCausalLM", 8, 28),
        tokenizer=tokenizer(), transformer=network("Flux2Transformer2DModel", **FLUX2),
    )  # fmt: skip


def wan() -> Any:
    return diffusers.WanPipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae_wan(4), scheduler=flow(shift=3.0),
        transformer=network("WanTransformer3DModel", seed=1, **WAN),
        transformer_2=network("WanTransformer3DModel", seed=2, **WAN), boundary_ratio=0.7,
    )  # fmt: skip


def flux(**changes: Any) -> Any:
    """The host looks for its T5 in the folder of CLIP, and makes one of random numbers by CLIP's config."""
    return diffusers.FluxPipeline(
        scheduler=flow(), vae=vae(1, shift_factor=0.1), text_encoder=clip(8), tokenizer=tokenizer(77),
        text_encoder_2=t5(8), tokenizer_2=tokenizer(),
        transformer=network("FluxTransformer2DModel", **{**FLUX1, **changes}),
    )  # fmt: skip


def wide_flux() -> Any:
    """Two blocks at the published width, at which alone diffusers splits the published layout."""
    pipe = flux(num_attention_heads=24, attention_head_dim=128, axes_dims_rope=[16, 56, 56], num_single_layers=1)
    pipe.transformer.to(torch.bfloat16)
    return pipe


def from_manifest(name: str) -> Callable[[Tensors], Tensors]:
    return lambda state: from_recipes(made_of({**FROM_MANIFEST, **WIDTH_IS_FIXED}[name]), state)


@dataclass(frozen=True)
class TinyBase:
    """A base model.

    Attributes:
        name: what the host's and the standalone's lists call it.
        make: makes its pipeline.
        original: a transformer's tensors in the published layout.
        gguf: architecture in a GGUF file.
        is_hub: whether it lies in the hub's cache; else it is a folder.
        component: what its files replace.
        forms: how its files are quantized.
        dtype: of their float tensors.
    """

    name: str
    make: Callable[[], Any]
    original: Callable[[Tensors], Tensors]
    gguf: str
    is_hub: bool = False
    component: str = "transformer"
    forms: tuple[str, ...] = ("int8", "int8-convrot", "fp8-scaled", "nvfp4", "gguf")
    dtype: torch.dtype = torch.float32


BASES = {
    "z-image": TinyBase("Tongyi-MAI/Z-Image", z_image, to_comfyui, "lumina2", is_hub=True),
    "klein": TinyBase("flux.2-klein-tiny", klein, from_manifest("FLUX.2"), "flux"),
    "wan": TinyBase("wan-a14b-tiny", wan, WRITTEN_OUT["Wan"], "wan"),
    "flux": TinyBase("flux.1-tiny", flux, dict, "flux"),
    "sdxl": TinyBase(
        "sdxl-tiny", sdxl, from_manifest("SDXL"), "sdxl", component="unet", forms=("int8", "fp8-scaled"),
        dtype=torch.bfloat16,
    ),
    "flux-wide": TinyBase(
        "flux.1-wide", wide_flux, from_manifest("FLUX.1"), "flux", forms=("int8", "fp8-scaled"), dtype=torch.bfloat16
    ),
}  # fmt: skip

WRITERS: dict[str, Callable[[torch.Tensor], Written]] = {
    "int8-convrot": lambda weight: int8(weight, convrot=16),
    "int8": int8,
    "fp8-scaled": float8,
    "nvfp4": nvfp4,
}


def is_a_layer(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the weight of a Linear in a block, wide enough for every format."""
    in_block = any(part.isdigit() for part in name.split("."))
    return in_block and name.endswith(".weight") and tensor.ndim == 2 and min(tensor.shape) >= 32


def quantized(tensors: Tensors, writer: Callable[[torch.Tensor], Written]) -> tuple[Tensors, Tensors]:
    """A file whose blocks' layers are quantized, and the same file with what these layers are worth as floats."""
    stored, worth = {}, {}
    for name, tensor in tensors.items():
        if not is_a_layer(name, tensor):
            stored[name] = worth[name] = tensor
            continue
        written = writer(tensor.float())
        stored |= written.stored(name.removesuffix(".weight"))
        worth[name] = written.value(torch.float32)
    return stored, worth


def write_gguf(file: Path, tensors: Tensors, architecture: str) -> Tensors:
    """A file of Q8_0; what its layers are worth is returned."""
    stored: dict[str, Any] = {}
    worth: Tensors = {}
    for name, tensor in tensors.items():
        stored[name] = worth[name] = tensor.float()
        if is_a_layer(name, tensor):
            stored[name] = gguf_files.quantize(tensor, "Q8_0")
            values = gguf_files.gguf.quants.dequantize(stored[name].data, stored[name].kind)
            worth[name] = torch.from_numpy(values.copy()).reshape(tensor.shape)
    gguf_files.write(file, stored, architecture)
    return worth


def write_files(base: TinyBase, model: Any, unets: Path, stem: str, seed: int = 7) -> None:
    """Files of a model with numbers of its own: `STEM-FORM`, and `STEM-FORM-worth` in floats where quantized."""
    state = filled(type(model).from_config(dict(model.config)), seed).to(base.dtype).state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in base.original(state).items()}
    save(unets / f"{stem}-float.safetensors", tensors)
    save(unets / f"{stem}-diffusers.safetensors", {name: tensor.contiguous() for name, tensor in state.items()})
    for form in base.forms:
        if form == "gguf":
            worth = write_gguf(unets / f"{stem}-gguf.gguf", tensors, base.gguf)
        else:
            stored, worth = quantized(tensors, WRITERS[form])
            save(unets / f"{stem}-{form}.safetensors", stored)
        save(unets / f"{stem}-{form}-worth.safetensors", worth)


def lay_out(models: Path, names: Mapping[str, TinyBase] = BASES) -> None:
    """Write base models and their files where the host looks for them."""
    from sdnext_real import put_in_cache

    (models / "UNET").mkdir(parents=True)
    for stem, base in names.items():
        pipe = base.make()
        folder = models / "Diffusers" / base.name.replace("/", "--")
        pipe.save_pretrained(folder)
        if base.is_hub:
            put_in_cache(folder, base.name, models)
        write_files(base, getattr(pipe, base.component), models / "UNET", stem)
        if getattr(pipe, "transformer_2", None) is not None:
            write_files(base, pipe.transformer_2, models / "UNET", f"{stem}-2", seed=8)
    (models / "UNET" / "broken.safetensors").write_text("<!DOCTYPE html>")
    shutil.rmtree(models / "Diffusers" / ".locks", ignore_errors=True)
