"""AuraFlow (fal) and its finetunes, among them Pony 7."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

AURAFLOW = TransformerSpec(
    name="AuraFlow",
    cls="AuraFlowTransformer2DModel",
    model_types=("AuraFlow",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("register_tokens", "joint_transformer_blocks.0.attn.to_q.weight"))),
        Layout(
            "original",
            Keys(all_of=("register_tokens", "double_layers.0.attn.w1q.weight")),
            Renaming((), "diffusers.loaders.single_file_utils:convert_auraflow_transformer_checkpoint_to_diffusers"),
        ),
    ),
    inputs=(takes_latents("pos_embed.proj.weight"), takes_text("context_embedder.weight")),
    fp8_skip_patterns=("context_embedder", "time_step_proj"),
)
