"""Which network a file is: one file an architecture, and the ordered list of them."""

from __future__ import annotations

from transplant.architectures.auraflow import AURAFLOW
from transplant.architectures.chroma import CHROMA
from transplant.architectures.cosmos import ANIMA, COSMOS_PREDICT_2
from transplant.architectures.ernie_image import ERNIE_IMAGE
from transplant.architectures.flux1 import FLUX_1
from transplant.architectures.flux2 import FLUX_2
from transplant.architectures.flux3 import FLUX_3
from transplant.architectures.hidream import HIDREAM
from transplant.architectures.hunyuan_video import HUNYUAN_VIDEO
from transplant.architectures.ideogram4 import IDEOGRAM_4
from transplant.architectures.krea2 import KREA_2
from transplant.architectures.ltx import LTX_2, LTX_VIDEO
from transplant.architectures.lumina2 import LUMINA_2
from transplant.architectures.mochi import MOCHI
from transplant.architectures.qwen_image import QWEN_IMAGE
from transplant.architectures.qwen_image_21 import QWEN_IMAGE_21
from transplant.architectures.sana import SANA
from transplant.architectures.spec import TransformerSpec
from transplant.architectures.stable_diffusion import SDXL, STABLE_DIFFUSION
from transplant.architectures.stable_diffusion_3 import STABLE_DIFFUSION_3
from transplant.architectures.wan import WAN, WAN_ANIMATE, WAN_ANIMATE_2, WAN_VACE
from transplant.architectures.z_image import Z_IMAGE

SPECS: tuple[TransformerSpec, ...] = (
    Z_IMAGE,
    LUMINA_2,
    FLUX_1,
    FLUX_2,
    FLUX_3,
    CHROMA,
    KREA_2,
    QWEN_IMAGE,
    QWEN_IMAGE_21,
    COSMOS_PREDICT_2,
    ANIMA,
    IDEOGRAM_4,
    HIDREAM,
    ERNIE_IMAGE,
    AURAFLOW,
    SANA,
    STABLE_DIFFUSION_3,
    SDXL,
    STABLE_DIFFUSION,
    WAN_VACE,
    WAN_ANIMATE,
    WAN_ANIMATE_2,
    WAN,
    HUNYUAN_VIDEO,
    LTX_2,
    LTX_VIDEO,
    MOCHI,
)
"""Every architecture with a file of its own. The first whose keys fit wins, so the more special comes first."""


def spec_serving(cls: str, pipeline: str) -> TransformerSpec | None:
    """The architecture of a component of class `cls` in a pipeline of class `pipeline`; None for others."""
    return next((spec for spec in SPECS if spec.serves(cls, pipeline)), None)
