"""FLUX.1 (Black Forest Labs): dev, schnell, Kontext and Fill, and pruned or distilled finetunes of them."""

from transplant.architectures.renaming import NORM_SCALES, Renaming
from transplant.architectures.sizes import Shapes, block_count, changed, holds
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    takes_latents,
    takes_text,
)


def depth(config: Config, shapes: Shapes) -> Config:
    """Number of double and single blocks, which pruned files have fewer of."""
    return changed(
        config,
        num_layers=block_count(shapes, "double_blocks.", "transformer_blocks."),
        num_single_layers=block_count(shapes, "single_blocks.", "single_transformer_blocks."),
    )


def _infer_config(config: Config, shapes: Shapes) -> Config:
    guidance = holds(shapes, "guidance_in.in_layer.weight", "time_text_embed.guidance_embedder.linear_1.weight")
    return {**depth(config, shapes), **changed(config, guidance_embeds=guidance)}


FLUX_1 = TransformerSpec(
    name="FLUX.1",
    cls="FluxTransformer2DModel",
    model_types=("Flux", "VisualCloze"),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=(
                    "time_text_embed.text_embedder.linear_1.weight",
                    "context_embedder.weight",
                    "single_transformer_blocks.0.norm.linear.weight",
                ),
            ),
        ),
        Layout(
            "original",
            # HunyuanVideo has no txt_in.weight, Chroma and FLUX.2 have no vector_in.
            Keys(all_of=("vector_in.in_layer.weight", "txt_in.weight", "single_blocks.0.linear1.weight")),
            Renaming(
                (NORM_SCALES,), "diffusers.loaders.single_file_utils:convert_flux_transformer_checkpoint_to_diffusers"
            ),
        ),
    ),
    infer_config=_infer_config,
    inputs=(takes_latents("x_embedder.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("x_embedder", "context_embedder", "time_text_embed"),
)
