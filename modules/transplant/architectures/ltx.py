"""LTX-Video and LTX-2 (Lightricks). LTX-2 makes sound beside the picture."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.sizes import Shapes, block_count, changed, rows
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    takes_latents,
    takes_text,
)

_INPUTS = (takes_latents("proj_in.weight"), takes_text("caption_projection.linear_1.weight"))


def _infer_config(config: Config, shapes: Shapes) -> Config:
    """2B and 13B have as many heads, of another width."""
    width, count = rows(shapes, "patchify_proj.bias", "proj_in.bias"), config.get("num_attention_heads", 32)
    sized = {"attention_head_dim": width // count, "cross_attention_dim": width} if width else {}
    return changed(config, num_layers=block_count(shapes, "transformer_blocks."), **sized)


LTX_VIDEO = TransformerSpec(
    name="LTX-Video",
    cls="LTXVideoTransformer3DModel",
    model_types=("LTX",),
    picture=(704, 512),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("proj_in.weight", "time_embed.emb.timestep_embedder.linear_1.weight", "scale_shift_table"),
                none_of=("audio_proj_in.weight",),
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("patchify_proj.weight", "adaln_single.linear.weight"), none_of=("audio_patchify_proj.weight",)
            ),
            "diffusers.loaders.single_file_utils:convert_ltx_transformer_checkpoint_to_diffusers",
        ),
    ),
    infer_config=_infer_config,
    inputs=_INPUTS,
    fp8_skip_patterns=("time_embed", "caption_projection"),
)

LTX_2 = TransformerSpec(
    name="LTX-2",
    cls="LTX2VideoTransformer3DModel",
    model_types=("LTX2",),
    picture=(768, 512),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT, Keys(all_of=("audio_proj_in.weight", "av_cross_attn_video_scale_shift.linear.weight"))
        ),
        Layout(
            "original",
            Keys(all_of=("audio_patchify_proj.weight", "av_ca_video_scale_shift_adaln_single.linear.weight")),
            Renaming(
                ((r"prompt_adaln_single\.", "prompt_adaln."),),  # LTX-2.3
                "diffusers.loaders.single_file_utils:convert_ltx2_transformer_to_diffusers",
            ),
        ),
    ),
    # The text connectors are a component of their own, which comes from the base model.
    junk=("video_embeddings_connector.*", "audio_embeddings_connector.*"),
    inputs=_INPUTS,
    fp8_skip_patterns=("time_embed", "caption_projection", "audio_proj_(in|out)", "timestep_embedder"),
)
