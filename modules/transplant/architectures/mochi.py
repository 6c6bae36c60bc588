"""Mochi 1 (Genmo)."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

MOCHI = TransformerSpec(
    name="Mochi",
    cls="MochiTransformer3DModel",
    model_types=("Mochi",),
    picture=(848, 480),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("pos_frequencies", "time_embed.pooler.to_kv.weight"))),
        Layout(
            "original",
            Keys(all_of=("pos_frequencies", "t5_y_embedder.to_kv.weight")),
            "diffusers.loaders.single_file_utils:convert_mochi_transformer_checkpoint_to_diffusers",
        ),
    ),
    inputs=(takes_latents("patch_embed.proj.weight"), takes_text("time_embed.caption_proj.weight")),
    fp8_skip_patterns=("time_embed",),
)
