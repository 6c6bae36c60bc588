"""SDNQ's quantization of a weight, some rows at a time: the same codes in a fraction of time and memory.

SDNQ goes over the fp32 values of a whole weight again and again, each time in memory that the system must first clear
(`sdnq/quant_utils.py`, quantize_weight). Each row has scales of its own, so that some rows can be done at a time, whose
values stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from transplant.sdnq_package import part

Tensors = dict[str, "torch.Tensor | None"]

AT_ONCE = 1 << 18
"""Values that are quantized at a time: 1 MB in fp32."""

_WHOLE_BYTES = 32
"""Rows of which codes of any number of bits fill whole bytes and words."""


def quantize_weight(weight: torch.Tensor, arguments: Mapping[str, Any]) -> tuple[Any, Tensors]:
    """What sdnq_quantize_layer_weight makes of a Linear's weight.

    Args:
        weight: [N, K] of a floating-point dtype; in its own memory or a view of a file.
        arguments: of sdnq_quantize_layer_weight.

    Returns:
        SDNQ's dequantizer, and the layer's tensors by attribute; None where unused.
    """
    sdnq_quantize_layer_weight = part("quantizer").sdnq_quantize_layer_weight
    if values_at_once(tuple(weight.shape), weight.device, arguments) == weight.numel():
        return sdnq_quantize_layer_weight(weight.to(torch.float32), **arguments)
    dequantizer, expected = sdnq_quantize_layer_weight(weight.new_empty(weight.shape, device="meta"), **arguments)
    return dequantizer, _by_rows(weight, dequantizer, expected, arguments)


def values_at_once(shape: tuple[int, ...], device: torch.device, arguments: Mapping[str, Any]) -> int:
    """How many values of a weight [N, K] are quantized together: all, where something is computed of several rows.

    Rotations are computed of one row, but by a product of matrices, whose last bit depends on how many rows it has.
    A GPU has no use for small parts.
    """
    together = ("use_svd", "use_codebook", "use_hadamard", "use_stochastic_rounding", "scale_dtype", "zero_point_dtype")
    one_scale = arguments.get("group_size") == -2
    whole = device.type != "cpu" or one_scale or any(arguments.get(key) for key in together)
    return shape[0] * shape[1] if whole else min(shape[0], _rows_at_once(shape[1])) * shape[1]


def _rows_at_once(columns: int) -> int:
    return max(AT_ONCE // columns // _WHOLE_BYTES, 1) * _WHOLE_BYTES


def _by_rows(weight: torch.Tensor, dequantizer: Any, expected: Tensors, arguments: Mapping[str, Any]) -> Tensors:
    """The tensors, filled some rows at a time. What SDNQ decides by the whole weight is told to it for the parts."""
    sdnq_quantize_layer_weight = part("quantizer").sdnq_quantize_layer_weight
    rows, columns = weight.shape
    scale = expected["scale"]
    assert scale is not None
    decided = {**arguments, "group_size": dequantizer.group_size, "use_quantized_matmul": False,
               "dequantize_fp32": scale.dtype == torch.float32}  # fmt: skip
    wanted = {key: tensor for key, tensor in expected.items() if tensor is not None}
    flat = {key: torch.empty(tensor.numel(), dtype=tensor.dtype) for key, tensor in wanted.items()}
    step = _rows_at_once(columns)
    for start in range(0, rows, step):
        _, made = sdnq_quantize_layer_weight(weight[start : start + step].to(torch.float32), **decided)
        for key, filled in flat.items():
            values = made[key].reshape(-1)
            first = start * len(filled) // rows
            filled[first : first + len(values)] = values
    return {**dict.fromkeys(expected), **{key: _shaped(key, flat[key], wanted[key], dequantizer) for key in flat}}


def _shaped(key: str, values: torch.Tensor, expected: torch.Tensor, dequantizer: Any) -> torch.Tensor:
    """Row-major values in the shape that is expected; codes as SDNQ's matmul reads them where they are for it."""
    if not is_transposed(dequantizer):
        return values.view(expected.shape)
    columns_first = values.view(expected.shape[::-1]).t()
    if key == "weight":
        return prepared_for_matmul(columns_first, dequantizer.quantized_matmul_dtype)
    return columns_first.contiguous()


def prepared_for_matmul(codes: torch.Tensor, matmul_dtype: str) -> torch.Tensor:
    """Codes [K, N] in the memory order that SDNQ's matmul reads."""
    return part("quant_utils").prepare_weight_for_matmul(codes, matmul_dtype=matmul_dtype)


def is_transposed(dequantizer: Any) -> bool:
    """Whether SDNQ holds a layer's codes as its matmul reads them: [K, N]."""
    return bool(
        dequantizer.use_quantized_matmul and not dequantizer.re_quantize_for_matmul and not dequantizer.is_packed
    )
