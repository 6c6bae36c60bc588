"""How quantized layers are stored: one file a format, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping

from transplant.formats.base import Format


def formats() -> Mapping[str, Format]:
    """Every format by name. Imported late: formats compute with torch, recognising them does not need it."""
    from transplant.formats import (
        asym_w4a8_int8,
        awq_w4a16,
        convrot_w4a4,
        float8,
        gguf,
        int8_tensorwise,
        mxfp8,
        nvfp4,
    )

    known = (
        int8_tensorwise.FORMAT,
        float8.E4M3,
        float8.E5M2,
        nvfp4.FORMAT,
        mxfp8.FORMAT,
        convrot_w4a4.FORMAT,
        asym_w4a8_int8.FORMAT,
        awq_w4a16.FORMAT,
        gguf.FORMAT,
    )
    return {layer_format.name: layer_format for layer_format in known}
