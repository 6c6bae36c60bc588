"""What a GGUF file calls its architecture. A hint: tensor names decide, and made-up strings are common."""

from __future__ import annotations

from collections.abc import Mapping

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "flux": ("FLUX.1", "FLUX.2", "FLUX.3", "Chroma"),
    "sd1": ("Stable Diffusion",),
    "sdxl": ("SDXL",),
    "sd3": ("Stable Diffusion 3",),
    "aura": ("AuraFlow",),
    "hidream": ("HiDream",),
    "cosmos": ("Cosmos Predict 2", "Anima"),
    "ltxv": ("LTX-Video", "LTX-2"),
    "hyvid": ("HunyuanVideo",),
    "wan": ("Wan", "Wan VACE", "Wan Animate", "Wan Animate 2"),
    "lumina2": ("Lumina 2", "Z-Image"),
    "z_image": ("Z-Image",),
    "qwen_image": ("Qwen-Image", "Qwen-Image 2.1"),
}
"""`general.architecture` as the usual converters write it → architectures that are written under it."""


def contradiction(told: str | None, found: str | None) -> str | None:
    """A sentence where a file's architecture string speaks against its tensors.

    Args:
        told: the file's `general.architecture`.
        found: name of the architecture that its tensors are of; None where that is not known.

    Returns:
        The sentence; None where the string is absent, unknown or right.
    """
    if told is None or found is None or found in FAMILIES.get(told, (found,)):
        return None
    return f"the file calls itself {told!r} (general.architecture), but its tensors are those of {found}: they decide"
