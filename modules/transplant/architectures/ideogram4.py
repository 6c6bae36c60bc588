"""Ideogram 4: a conditional and an unconditional transformer of one architecture. diffusers 0.42 has no converter."""

from collections.abc import Mapping
from typing import Any

from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Keys,
    Layout,
    TransformerSpec,
    VariantSpec,
    takes_latents,
    takes_text,
)


def convert_ideogram4_transformer_to_diffusers(checkpoint: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Split the fused attention.qkv (query rows first, then key, then value) and rename attention.o."""
    converted: dict[str, Any] = {}
    for name, tensor in checkpoint.items():
        if ".attention.qkv." in name:
            for part, rows in zip(("to_q", "to_k", "to_v"), tensor.chunk(3), strict=True):
                converted[name.replace(".qkv.", f".{part}.")] = rows
        else:
            converted[name.replace(".attention.o.", ".attention.to_out.0.")] = tensor
    return converted


IDEOGRAM_4 = TransformerSpec(
    name="Ideogram 4",
    cls="Ideogram4Transformer2DModel",
    model_types=("Ideogram4",),
    picture=(2048, 2048),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("llm_cond_proj.weight", "layers.0.attention.to_q.weight"))),
        Layout(
            "comfyui",
            Keys(all_of=("llm_cond_proj.weight", "layers.0.attention.qkv.weight")),
            convert_ideogram4_transformer_to_diffusers,
        ),
    ),
    variants=VariantSpec(
        ("conditional", "unconditional"),
        key="model_type",
        values=(("ideogram4_cond", "conditional"), ("ideogram4_uncond", "unconditional")),
        components=(("conditional", "transformer"), ("unconditional", "unconditional_transformer")),
    ),
    inputs=(takes_latents("input_proj.weight"), takes_text("llm_cond_proj.weight")),
    fp8_skip_patterns=("input_proj", "llm_cond_proj", "final_layer"),
)
