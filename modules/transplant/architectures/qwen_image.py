"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Layered: every known file has diffusers' own names."""

from transplant.architectures.sizes import Shapes, block_count, changed, holds
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    TransformerSpec,
    takes_latents,
    takes_text,
)

_ZERO_CONDITION = "__index_timestep_zero__"
"""An empty tensor that says: the tokens of the reference picture are modulated at timestep 0 (Edit 2511)."""


def _infer_config(config: Config, shapes: Shapes) -> Config:
    zero_condition = True if holds(shapes, _ZERO_CONDITION) else None
    return changed(config, num_layers=block_count(shapes, "transformer_blocks."), zero_cond_t=zero_condition)


QWEN_IMAGE = TransformerSpec(
    name="Qwen-Image",
    cls="QwenImageTransformer2DModel",
    model_types=("QwenImage",),
    layouts=(Layout(DIFFUSERS_LAYOUT, Keys(all_of=("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"))),),
    infer_config=_infer_config,
    junk=(_ZERO_CONDITION,),
    inputs=(takes_latents("img_in.weight"), takes_text("txt_in.weight")),
    fp8_skip_patterns=("img_in", "txt_in", "time_text_embed"),
)
