"""Cosmos Predict 2 (NVIDIA) and Anima, which adds a text conditioner of its own to the same network.

Neither names nor shapes tell an Anima file without its conditioner from a Cosmos one: such a file is
whichever of the two the base model is.
"""

from transplant.architectures.sizes import Shapes, block_count, changed, heads, rows
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    Config,
    Keys,
    Layout,
    SiblingSpec,
    TransformerSpec,
    takes_latents,
    takes_text,
)

_CONVERTER = "diffusers.loaders.single_file_utils:convert_cosmos_transformer_checkpoint_to_diffusers"
_CONDITIONER = "llm_adapter."
_ORIGINAL = ("t_embedding_norm.weight", "x_embedder.proj.1.weight")
_DIFFUSERS = ("time_embed.t_embedder.linear_1.weight", "patch_embed.proj.weight")
_JUNK = (
    "pos_embedder.*",  # buffers that the class computes from its config
    "accum_*",  # training counters
    "*._extra_state",  # of TransformerEngine
)
_FP8_SKIP = ("patch_embed", "time_embed", "norm", "proj_out")
"""time_embed conditions every token of every block: in fp8 it dithers the picture."""

_INPUTS = (takes_latents("patch_embed.proj.weight"), takes_text("transformer_blocks.0.attn2.to_k.weight"))


def _infer_config(config: Config, shapes: Shapes) -> Config:
    """Cosmos comes in 2B and 14B, Anima in several depths. The conditioner's blocks, with its prefix, do not count."""
    return changed(
        config,
        num_layers=block_count(shapes, "blocks.", "transformer_blocks."),
        num_attention_heads=heads(config, rows(shapes, "x_embedder.proj.1.weight", "patch_embed.proj.weight")),
    )


COSMOS_PREDICT_2 = TransformerSpec(
    name="Cosmos Predict 2",
    cls="CosmosTransformer3DModel",
    model_types=("Cosmos",),
    picture=(1360, 768),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=_DIFFUSERS, none_of=(_CONDITIONER,))),
        Layout("original", Keys(all_of=_ORIGINAL, none_of=(_CONDITIONER,)), _CONVERTER),
    ),
    infer_config=_infer_config,
    junk=_JUNK,
    fp8_skip_patterns=_FP8_SKIP,
    inputs=_INPUTS,
)


ANIMA = TransformerSpec(
    name="Anima",
    cls="CosmosTransformer3DModel",
    model_types=("Anima",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=_DIFFUSERS)),
        Layout("comfyui", Keys(all_of=_ORIGINAL), _CONVERTER),
    ),
    infer_config=_infer_config,
    siblings=(SiblingSpec("text_conditioner", "text_conditioner", _CONDITIONER, "AnimaTextConditioner"),),
    junk=_JUNK,
    fp8_skip_patterns=_FP8_SKIP,
    inputs=_INPUTS,
)
