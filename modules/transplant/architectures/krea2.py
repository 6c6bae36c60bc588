"""Krea 2: raw and turbo, which nothing in a file tells apart.

Early files hold a residual branch in the last layer, `x + up(down(x))` beside the modulated norm, that diffusers'
class has not. It begins at zero (`up` all zeros), where it does nothing.
"""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import (
    DIFFUSERS_LAYOUT,
    BranchSpec,
    Keys,
    Layout,
    TransformerSpec,
    VariantSpec,
    takes_latents,
    takes_text,
)

_UP, _DOWN = ("last.up.weight", "final_layer.up.weight"), ("last.down.weight", "final_layer.down.weight")

KREA_2 = TransformerSpec(
    name="Krea 2",
    cls="Krea2Transformer2DModel",
    model_types=("Krea2",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("text_fusion.projector.weight", "time_mod_proj.weight"))),
        Layout(
            "original",
            Keys(all_of=("txtfusion.projector.weight", "tproj.1.weight")),
            Renaming(
                (
                    (r"(prenorm|postnorm|qnorm|knorm|^txtmlp\.0|^last\.norm)\.weight$", r"\1.scale"),
                    (r"^last\.(up|down)\.", r"final_layer.\1."),
                ),
                "diffusers.loaders.single_file_utils:convert_krea2_transformer_checkpoint_to_diffusers",
            ),
        ),
    ),
    branch=BranchSpec("residual branch", (*_UP, *_DOWN), _UP, "Krea2ResidualTransformer2DModel"),
    variants=VariantSpec(("raw", "turbo")),
    inputs=(takes_latents("img_in.weight"), takes_text("txt_in.linear_1.weight")),
    fp8_skip_patterns=("img_in", "txt_in", "final_layer"),
)
