"""Wan 2.1 and 2.2 (Alibaba): text and image to video in 1.3B, 5B and 14B, VACE, Animate, Animate 2.

Nothing in a file tells the high-noise from the low-noise transformer of Wan 2.2.
"""

from transplant.architectures.renaming import Renaming
from transplant.architectures.sizes import Shapes, block_count, changed, heads, rows
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    VariantSpec,
    takes_latents,
    takes_text,
)

_CONVERTER = Renaming(
    ((r"img_emb\.emb_pos", "condition_embedder.image_embedder.pos_embed"),),  # first and last frame to video
    "diffusers.loaders.single_file_utils:convert_wan_transformer_to_diffusers",
)


def _infer_config(config: Config, shapes: Shapes) -> Config:
    return changed(
        config,
        num_layers=block_count(shapes, "blocks."),
        num_attention_heads=heads(config, rows(shapes, "patch_embedding.bias")),
        ffn_dim=rows(shapes, "blocks.0.ffn.0.bias", "blocks.0.ffn.net.0.proj.bias"),
    )


def _infer_vace_config(config: Config, shapes: Shapes) -> Config:
    """As for Wan; the control blocks are spread evenly over the others, as in both published sizes."""
    layers, controls = block_count(shapes, "blocks."), block_count(shapes, "vace_blocks.")
    even = list(range(0, layers, layers // controls)) if layers and controls and layers % controls == 0 else None
    return {**_infer_config(config, shapes), **changed(config, vace_layers=even)}


_INPUTS = (takes_latents("patch_embedding.weight"), takes_text("condition_embedder.text_embedder.linear_1.weight"))

WAN = TransformerSpec(
    name="Wan",
    cls="WanTransformer3DModel",
    other_classes=("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
    model_types=("Wan", "LucyEdit", "SkyReelsV2", "ChronoEdit"),
    picture=(832, 480),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("condition_embedder.time_embedder.linear_1.weight", "blocks.0.attn1.to_q.weight"),
                none_of=("vace_patch_embedding.weight", "pose_patch_embedding.weight"),
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("time_projection.1.weight", "blocks.0.self_attn.q.weight"),
                none_of=("vace_patch_embedding.weight", "pose_patch_embedding.weight"),
            ),
            _CONVERTER,
        ),
    ),
    infer_config=_infer_config,
    variants=VariantSpec(
        ("Wan 2.1", "Wan 2.2 high noise", "Wan 2.2 low noise"),
        where=Keys(any_of=("blocks.39.",)),  # 14B
    ),
    inputs=_INPUTS,
)

WAN_VACE = TransformerSpec(
    name="Wan VACE",
    cls="WanVACETransformer3DModel",
    model_types=("Wan",),
    picture=(832, 480),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("vace_patch_embedding.weight", "blocks.0.attn1.to_q.weight"))),
        Layout("original", Keys(all_of=("vace_patch_embedding.weight", "blocks.0.self_attn.q.weight")), _CONVERTER),
    ),
    infer_config=_infer_vace_config,
    inputs=_INPUTS,
)

WAN_ANIMATE = TransformerSpec(
    name="Wan Animate",
    cls="WanAnimateTransformer3DModel",
    model_types=("Wan",),
    picture=(1280, 720),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("pose_patch_embedding.weight", "blocks.0.attn1.to_q.weight"))),
        Layout("original", Keys(all_of=("pose_patch_embedding.weight", "blocks.0.self_attn.q.weight")), _CONVERTER),
    ),
    junk=("motion_encoder.*.kernel",),  # fixed blur filters, which the class makes itself
    inputs=_INPUTS,
    fp8_skip_patterns=("face_encoder",),
)

WAN_ANIMATE_2 = TransformerSpec(
    name="Wan Animate 2",
    cls="WanAnimate2Transformer3DModel",
    model_types=("Wan",),
    picture=(1280, 720),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("time_projection.1.weight", "blocks.0.self_attn.to_q.weight"))),
        Layout(
            "original",
            Keys(all_of=("time_projection.1.weight", "blocks.0.block.self_attn.q.weight")),
            "diffusers.loaders.single_file_utils:convert_wan_animate_2_transformer_to_diffusers",
        ),
    ),
    fp8_skip_patterns=("text_embedding", "^head"),
)
