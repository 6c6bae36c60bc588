"""Which tensors and header entries say that a layer is quantized. No torch."""

from __future__ import annotations

from collections import Counter

from transplant.checkpoint.header import Header
from transplant.checkpoint.naming import NamedKeys
from transplant.errors import UnsupportedQuantization

SIDECARS = (
    ".comfy_quant", ".weight_scale", ".scale_weight", ".input_scale", ".scale_input", ".weight_scale_2",
    ".weight_s_rel", ".weight_s_channel", ".weight_codebook", ".weight_zeros", ".weight_correction", ".pre_quant_scale",
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".qweight", ".qzeros", ".g_idx",
    ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".scale_weight_2",
)  # fmt: skip
"""Endings of the names of tensors that belong to a quantized layer beside its weight."""

_PACKED = frozenset({"U8", "I8", "F4", "F8_E8M0"})
"""Dtypes that a weight has only where it is quantized."""


def quantized_layers(header: Header, keys: NamedKeys) -> dict[str, int]:
    """Quantized layers by the dtype of their codes.

    Args:
        header: the file's header.
        keys: its names, normalised.

    Returns:
        Stored dtype → number of layers that have scales, markers or packed codes. Plain fp8 weights
        without any of these are values, not codes, and are not counted.
    """
    layers: set[str] = set()
    for name, stored in keys.stored.items():
        sidecar = next((ending for ending in SIDECARS if name.endswith(ending)), None)
        if sidecar is not None:
            layers.add(name.removesuffix(sidecar))
        elif name.endswith(".weight") and header.tensors[stored].dtype in _PACKED:
            layers.add(name.removesuffix(".weight"))
    counts: Counter[str] = Counter()
    for layer in layers:
        stored = keys.stored.get(f"{layer}.weight")
        counts[header.tensors[stored].dtype if stored else "no weight"] += 1
    return dict(counts)


def refuse_quantized(header: Header, keys: NamedKeys) -> None:
    """Raise UnsupportedQuantization where any layer is quantized."""
    formats = [f"{count} layers in {dtype}" for dtype, count in sorted(quantized_layers(header, keys).items())]
    if not formats and "_quantization_metadata" in (header.metadata or {}):
        formats = ["layers named in the header"]
    if formats:
        raise UnsupportedQuantization(
            header.path,
            formats,
            "without their scales the weights would be wrong",
            "Use the bf16, fp16 or fp32 version of the file",
        )
