"""Lumina-Image 2.0 (Alpha-VLLM)."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

LUMINA_2 = TransformerSpec(
    name="Lumina 2",
    cls="Lumina2Transformer2DModel",
    model_types=("Lumina2",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("time_caption_embed.caption_embedder.1.weight", "layers.0.attn.to_q.weight"),
                none_of=("ref_image_patch_embedder.weight",),  # OmniGen 2
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("cap_embedder.1.weight", "layers.0.attention.qkv.weight"),
                none_of=("x_pad_token", "cap_pad_token"),  # Z-Image
            ),
            "diffusers.loaders.single_file_utils:convert_lumina2_to_diffusers",
        ),
    ),
    junk=("norm_final.weight",),  # made in training, used nowhere
    inputs=(takes_latents("x_embedder.weight"), takes_text("time_caption_embed.caption_embedder.1.weight")),
    fp8_skip_patterns=("time_caption_embed",),
)
