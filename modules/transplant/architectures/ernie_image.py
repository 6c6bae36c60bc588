"""ERNIE-Image (Baidu): every known file has diffusers' own names."""

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec, takes_latents, takes_text

ERNIE_IMAGE = TransformerSpec(
    name="ERNIE-Image",
    cls="ErnieImageTransformer2DModel",
    model_types=("ErnieImage",),
    layouts=(Layout(DIFFUSERS_LAYOUT, Keys(all_of=("text_proj.weight", "layers.0.self_attention.to_q.weight"))),),
    fp8_skip_patterns=("x_embedder", "text_proj", "time_embedding", "adaLN_modulation", "norm", "_ln$", "final_linear"),
    inputs=(takes_latents("x_embedder.proj.weight"), takes_text("text_proj.weight")),
)
