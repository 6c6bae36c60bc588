"""Sana and Sana-Sprint (NVIDIA): linear attention and mixed feed-forward convolutions."""

from typing import Any

from transplant.architectures.sizes import Shapes, block_count, changed
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    takes_latents,
    takes_text,
)

_UNUSED = ("pos_embed", "y_embedder.y_embedding")
"""A fixed table and the null caption of training: no diffusers class has them."""


def convert_sana(checkpoint: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Convert as diffusers does, for files that leave out the tensors that it asks for only to drop them."""
    from diffusers.loaders.single_file_utils import convert_sana_transformer_to_diffusers

    return convert_sana_transformer_to_diffusers({**dict.fromkeys(_UNUSED), **checkpoint}, **kwargs)


def _infer_config(config: Config, shapes: Shapes) -> Config:
    """The depth: 20, 28 or 60. The width of 0.6B comes with heads of another width, which no shape tells."""
    return changed(config, num_layers=block_count(shapes, "blocks.", "transformer_blocks."))


SANA = TransformerSpec(
    name="Sana",
    cls="SanaTransformer2DModel",
    model_types=("Sana",),
    layouts=(
        Layout(
            DIFFUSERS_LAYOUT,
            Keys(
                all_of=("caption_norm.weight", "transformer_blocks.0.ff.conv_inverted.weight"),
                none_of=("transformer_blocks.0.ff.conv_temp.weight",),  # Sana-Video
            ),
        ),
        Layout(
            "original",
            Keys(
                all_of=("attention_y_norm.weight", "blocks.0.mlp.inverted_conv.conv.weight"),
                none_of=("blocks.0.mlp.t_conv.weight",),  # Sana-Video
            ),
            convert_sana,
        ),
    ),
    infer_config=_infer_config,
    junk=_UNUSED,
    inputs=(takes_latents("patch_embed.proj.weight"), takes_text("caption_projection.linear_1.weight")),
    fp8_skip_patterns=("time_embed", "caption_projection"),
)
