"""Krea 2: raw and turbo, which nothing in a file tells apart."""

from transplant.architectures.renaming import Renaming
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec

KREA_2 = TransformerSpec(
    name="Krea 2",
    cls="Krea2Transformer2DModel",
    model_types=("Krea2",),
    layouts=(
        Layout(DIFFUSERS_LAYOUT, Keys(all_of=("text_fusion.projector.weight", "time_mod_proj.weight"))),
        Layout(
            "original",
            Keys(all_of=("txtfusion.projector.weight", "tproj.1.weight")),
            # The residual branch last.up / last.down of early files is in no diffusers class: it stays under its
            # own name, without a place, so that a file is never loaded without it.
            Renaming(
                ((r"(prenorm|postnorm|qnorm|knorm|^txtmlp\.0|^last\.norm)\.weight$", r"\1.scale"),),
                "diffusers.loaders.single_file_utils:convert_krea2_transformer_checkpoint_to_diffusers",
            ),
        ),
    ),
)
