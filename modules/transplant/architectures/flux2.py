"""FLUX.2 (Black Forest Labs): dev, and Klein in 4B and 9B. Modulation is shared by all blocks."""

from transplant.architectures.flux1 import depth
from transplant.architectures.sizes import Shapes, changed, heads, holds, rows
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    VariantSpec,
    takes_latents,
    takes_text,
)


def _infer_config(config: Config, shapes: Shapes) -> Config:
    guidance = holds(shapes, "guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight")
    width = rows(shapes, "img_in.weight", "x_embedder.weight")
    sizes = changed(config, num_attention_heads=heads(config, width), guidance_embeds=guidance)
    return {**depth(config, shapes), **sizes}


FLUX_2 = TransformerSpec(
    name="FLUX.2",
    cls="Flux2Transformer2DModel",
    model_types=("Flux2",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("double_stream_modulation_img.linear.weight", "x_embedder.weight"))),
        Layout(
            "original",
            Keys(all_of=("double_stream_modulation_img.lin.weight", "img_in.weight")),
            "diffusers.loaders.single_file_utils:convert_flux2_transformer_checkpoint_to_diffusers",
        ),
    ),
    infer_config=_infer_config,
    variants=VariantSpec(
        ("Klein", "Klein base"),
        where=Keys(none_of=("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight")),
    ),
    inputs=(takes_latents("x_embedder.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("x_embedder", "context_embedder", "time_guidance_embed"),
)
