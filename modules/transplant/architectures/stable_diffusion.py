"""The UNets of Stable Diffusion 1 and 2, and of SDXL."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

_CONVERTER = Renaming(
    ((r"^", "model.diffusion_model."),), "diffusers.loaders.single_file_utils:convert_ldm_unet_checkpoint"
)
"""diffusers' converter takes only keys with the prefix that all-in-one files have."""

_INPUTS = (
    takes_latents("conv_in.weight"),
    takes_text("mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight"),
)

SDXL = TransformerSpec(
    name="SDXL",
    cls="UNet2DConditionModel",
    model_types=("StableDiffusionXL",),
    component="unet",
    subfolder="unet",
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("add_embedding.linear_1.weight", "down_blocks.0.resnets.0.conv1.weight"),
                none_of=("encoder_hid_proj.weight",),  # Kolors
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("label_emb.0.0.weight", "input_blocks.0.0.weight"),
                none_of=("encoder_hid_proj.weight", "input_blocks.1.0.time_stack.in_layers.2.weight"),  # Kolors, SVD
            ),
            _CONVERTER,
        ),
    ),
    inputs=_INPUTS,
    fp8_skip_patterns=("^conv_in", "^conv_out", "time_embedding", "add_embedding"),
)

STABLE_DIFFUSION = TransformerSpec(
    name="Stable Diffusion",
    cls="UNet2DConditionModel",
    model_types=("StableDiffusion", "LatentConsistencyModel"),
    picture=(512, 512),
    component="unet",
    subfolder="unet",
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("time_embedding.linear_1.weight", "down_blocks.0.attentions.0.proj_in.weight"),
                none_of=("add_embedding.linear_1.weight", "down_blocks.0.motion_modules."),  # SDXL, AnimateDiff
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("time_embed.0.weight", "input_blocks.1.1.proj_in.weight"),
                none_of=("label_emb.0.0.weight",),
            ),
            _CONVERTER,
        ),
    ),
    inputs=_INPUTS,
    fp8_skip_patterns=("^conv_in", "^conv_out", "time_embedding"),
)
