"""HiDream-I1: full, dev and fast. Every known file has diffusers' own names."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

HIDREAM = TransformerSpec(
    name="HiDream",
    cls="HiDreamImageTransformer2DModel",
    model_types=("HiDream",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=(
                    "p_embedder.pooled_embedder.linear_1.weight",
                    "double_stream_blocks.0.block.attn1.to_q_t.weight",
                )
            ),
        ),
    ),
    # The gates choose a token's experts: an error there is an error of a whole layer.
    fp8_skip_patterns=(
        "t_embedder", "p_embedder", "x_embedder", "caption_projection", "final_layer", "norm", r"\.gate$",
    ),
    inputs=(takes_latents("x_embedder.proj.weight"), takes_text("caption_projection.0.linear.weight")),
)  # fmt: skip
