"""Z-Image and Z-Image-Turbo (Tongyi): a single-stream transformer with noise and context refiners."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

Z_IMAGE = TransformerSpec(
    name="Z-Image",
    cls="ZImageTransformer2DModel",
    model_types=("ZImage",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("all_x_embedder.2-1.weight", "layers.0.attention.to_q.weight", "cap_embedder.1.weight"),
                any_of=("x_pad_token", "cap_pad_token"),
            ),
        ),
        Layout(
            "comfyui",
            # Lumina 2 shares all of these but the pad tokens.
            Keys(
                all_of=("x_embedder.weight", "layers.0.attention.qkv.weight", "cap_embedder.1.weight"),
                any_of=("x_pad_token", "cap_pad_token"),
                none_of=("all_x_embedder.",),
            ),
            converter="diffusers.loaders.single_file_utils:convert_z_image_transformer_checkpoint_to_diffusers",
        ),
    ),
    junk=("norm_final.weight",),  # left over from Lumina 2 in community merges, often NaN
    fp8_skip_patterns=("t_embedder", "cap_embedder"),
    inputs=(takes_latents("all_x_embedder.2-1.weight"), takes_text("cap_embedder.1.weight")),
)
