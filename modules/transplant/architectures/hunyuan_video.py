"""HunyuanVideo (Tencent), text to video and image to video."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

_CONVERTER = "diffusers.loaders.single_file_utils:convert_hunyuan_video_transformer_to_diffusers"

_TO_TENCENT = Renaming(
    (
        (r"mlp\.0\.", r"mlp.fc1."),
        (r"mlp\.2\.", r"mlp.fc2."),
        (r"(time_in|guidance_in|t_embedder)\.in_layer\.", r"\1.mlp.0."),
        (r"(time_in|guidance_in|t_embedder)\.out_layer\.", r"\1.mlp.2."),
        (r"c_embedder\.in_layer\.", r"c_embedder.linear_1."),
        (r"c_embedder\.out_layer\.", r"c_embedder.linear_2."),
        (r"(_mod|\.modulation)\.lin\.", r"\1.linear."),
        (r"_attn\.(qkv|proj)\.", r"_attn_\1."),
        (r"_attn\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r"_attn_\1_norm.weight"),
        (r"\.norm\.(q|k)(?:uery|ey)_norm\.(?:scale|weight)$", r".\1_norm.weight"),
    ),
    _CONVERTER,
)
"""From the names that ComfyUI gives the network when it saves it, which follow FLUX.1."""

HUNYUAN_VIDEO = TransformerSpec(
    name="HunyuanVideo",
    cls="HunyuanVideoTransformer3DModel",
    model_types=("HunyuanVideo", "HunyuanSkyreels"),
    picture=(1280, 720),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("context_embedder.proj_in.weight", "time_text_embed.text_embedder.linear_1.weight"),
                none_of=("clean_x_embedder.proj.weight",),  # FramePack
            ),
        ),
        Layout(
            "original",
            Keys(all_of=("double_blocks.0.img_attn_qkv.weight", "vector_in.in_layer.weight")),
            _CONVERTER,
        ),
        Layout(
            "comfyui",
            Keys(all_of=("double_blocks.0.img_attn.qkv.weight", "txt_in.input_embedder.weight")),
            _TO_TENCENT,
        ),
    ),
    inputs=(takes_latents("x_embedder.proj.weight"), takes_text("context_embedder.proj_in.weight")),
    fp8_skip_patterns=("time_text_embed",),
)
