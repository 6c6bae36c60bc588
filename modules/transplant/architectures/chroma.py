"""Chroma (lodestones): FLUX.1 with a small network in place of the modulation of each block."""

from transplant.architectures.flux1 import depth
from transplant.architectures.renaming import NORM_SCALES, Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

CHROMA = TransformerSpec(
    name="Chroma",
    cls="ChromaTransformer2DModel",
    model_types=("Chroma",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(all_of=("distilled_guidance_layer.layers.0.linear_1.weight", "x_embedder.weight")),
        ),
        Layout(
            "original",
            # Chroma Radiance, which diffusers does not have, works on pixels and has no img_in.weight.
            Keys(all_of=("distilled_guidance_layer.layers.0.in_layer.weight", "img_in.weight")),
            Renaming(
                (NORM_SCALES,), "diffusers.loaders.single_file_utils:convert_chroma_transformer_checkpoint_to_diffusers"
            ),
        ),
    ),
    infer_config=depth,
    inputs=(takes_latents("x_embedder.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("x_embedder", "context_embedder", "distilled_guidance_layer"),
)
