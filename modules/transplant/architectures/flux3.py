"""FLUX.3 (Black Forest Labs): a stack of blocks per kind of token, then joint single blocks."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

FLUX_3 = TransformerSpec(
    name="FLUX.3",
    cls="Flux3Transformer2DModel",
    model_types=("Flux3",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("x_embedders.image.weight", "txt_mode_blocks.0.attn.to_q.weight"))),
        Layout(
            "original",
            Keys(all_of=("emb_in.image.weight", "txt_mode_blocks.0.q_proj.weight")),
            "diffusers.loaders.single_file_utils:convert_flux3_transformer_checkpoint_to_diffusers",
        ),
    ),
    junk=("repa_projectors.*",),  # heads that only training uses
    inputs=(takes_latents("x_embedders.image.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("x_embedders", "context_embedder", "timestep_embedder"),
)
