"""Stable Diffusion 3 and 3.5, medium and large."""

import math

from transplant.architectures.sizes import Shapes, block_count, changed, heads, holds, rows
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    takes_latents,
    takes_text,
)


def _infer_config(config: Config, shapes: Shapes) -> Config:
    layers = block_count(shapes, "joint_blocks.", "transformer_blocks.")
    width = rows(shapes, "x_embedder.proj.bias", "pos_embed.proj.bias")
    table = shapes.get("pos_embed") or shapes.get("pos_embed.pos_embed") or (1,)
    sizes = changed(
        config,
        num_layers=layers,
        num_attention_heads=heads(config, width, default_head_dim=64),
        caption_projection_dim=rows(shapes, "context_embedder.bias"),
        pos_embed_max_size=math.isqrt(table[1]) if len(table) == 3 else None,
        dual_attention_layers=_dual_attention_layers(shapes, layers or 0),
    )
    qk_norm = "rms_norm" if holds(shapes, _FIRST_NORM, _FIRST_NORM_DIFFUSERS) else None
    return sizes if config.get("qk_norm") == qk_norm else {**sizes, "qk_norm": qk_norm}


def _dual_attention_layers(shapes: Shapes, layers: int) -> list[int]:
    original, diffusers = "joint_blocks.{}.x_block.attn2.qkv.weight", "transformer_blocks.{}.attn2.to_q.weight"
    return [layer for layer in range(layers) if holds(shapes, original.format(layer), diffusers.format(layer))]


_FIRST_NORM = "joint_blocks.0.x_block.attn.ln_q.weight"
_FIRST_NORM_DIFFUSERS = "transformer_blocks.0.attn.norm_q.weight"

STABLE_DIFFUSION_3 = TransformerSpec(
    name="Stable Diffusion 3",
    cls="SD3Transformer2DModel",
    model_types=("StableDiffusion3",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(all_of=("pos_embed.pos_embed", "transformer_blocks.0.attn.add_q_proj.weight")),
        ),
        Layout(
            "original",
            Keys(all_of=("joint_blocks.0.x_block.attn.qkv.weight", "y_embedder.mlp.0.weight")),
            "diffusers.loaders.single_file_utils:convert_sd3_transformer_checkpoint_to_diffusers",
        ),
    ),
    infer_config=_infer_config,
    inputs=(takes_latents("pos_embed.proj.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("time_text_embed", "context_embedder"),
)
