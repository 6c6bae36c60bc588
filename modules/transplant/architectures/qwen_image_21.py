"""Qwen-Image 2.1: one stream of tokens, one modulation for all blocks."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

QWEN_IMAGE_21 = TransformerSpec(
    name="Qwen-Image 2.1",
    cls="QwenImage21Transformer2DModel",
    model_types=("QwenImage21",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(all_of=("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_layer.weight")),
        ),
        Layout(
            "comfyui",
            Keys(all_of=("txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.gate_up.weight")),
            "diffusers.loaders.single_file_utils:convert_qwen_image21_transformer_checkpoint_to_diffusers",
        ),
    ),
    inputs=(takes_latents("img_in.weight"), takes_text("txt_in.in_layer.weight")),
    fp8_skip_patterns=("img_in", "txt_in", "time_text_embed"),
)
