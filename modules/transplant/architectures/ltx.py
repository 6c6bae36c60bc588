"""LTX-Video and LTX-2 (Lightricks). LTX-2 makes sound beside the picture."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec

LTX_VIDEO = TransformerSpec(
    name="LTX-Video",
    cls="LTXVideoTransformer3DModel",
    model_types=("LTX",),
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
)

LTX_2 = TransformerSpec(
    name="LTX-2",
    cls="LTX2VideoTransformer3DModel",
    model_types=("LTX2",),
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
)
