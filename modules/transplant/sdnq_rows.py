"""SDNQ's quantization of a weight, some rows at a time: the same codes in a fraction of time and memory.

SDNQ goes over the fp32 values of a whole weight again and again, each time in memory that the system must first clear
(`sdnq/quant_utils.py`, quantize_weight). Each row has scales of its own, so that some rows can be done at a time, whose
values stay in the processor's cache. Threads of Python's own would wait for each other between the steps: two of them
take longer than one.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from transplant.own_memory import own_memory
from transplant.sdnq_arithmetic import are_usual, is_known, quantized
from transplant.sdnq_package import part

Tensors = dict[str, "torch.Tensor | None"]

AT_ONCE = 1 << 18
"""Values that are quantized at a time: 1 MB of fp32, enough for torch to divide each step among its threads."""

_WHOLE_BYTES = 32
"""Values of which codes of any number of bits fill whole bytes and words."""


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
    dequantizer, expected = on_meta(tuple(weight.shape), arguments)
    by_rows = _ByRows(weight.detach(), dequantizer, expected, arguments)
    by_rows.fill()
    shaped = {
        key: _shaped(key, by_rows.tensors[key], tensor, dequantizer)
        for key, tensor in expected.items()
        if tensor is not None
    }
    return dequantizer, {**dict.fromkeys(expected), **shaped}


def on_meta(shape: tuple[int, ...], arguments: Mapping[str, Any]) -> tuple[Any, Tensors]:
    """The dequantizer and the tensors, on meta, that SDNQ makes of a Linear's weight [N, K]; without those of SVD."""
    alike = frozenset((key, value) for key, value in arguments.items() if key != "param_name")  # SDNQ does not read it
    dequantizer, tensors = _on_meta(shape, alike)
    return copy.copy(dequantizer), dict(tensors)


@functools.lru_cache(maxsize=256)
def _on_meta(shape: tuple[int, ...], arguments: frozenset[tuple[str, Any]]) -> tuple[Any, Tensors]:
    """Asked once for all layers of a kind: on meta each of SDNQ's steps takes longer than on a small weight."""
    weight = torch.empty(shape, dtype=torch.float32, device="meta")
    return part("quantizer").sdnq_quantize_layer_weight(weight, **dict(arguments))


def values_at_once(shape: tuple[int, ...], device: torch.device, arguments: Mapping[str, Any]) -> int:
    """How many values of a weight [N, K] are quantized together: all, where something is computed of several rows.

    Rotations are computed of one row, but by a product of matrices, whose last bit depends on how many rows it has.
    A GPU has no use for small parts.
    """
    together = ("use_svd", "use_codebook", "use_hadamard", "use_stochastic_rounding", "scale_dtype", "zero_point_dtype")
    one_scale = arguments.get("group_size") == -2
    whole = device.type != "cpu" or one_scale or any(arguments.get(key) for key in together)
    rows, columns = shape
    return rows * columns if whole else min(rows, _rows_at_once(columns)) * columns


def _rows_at_once(columns: int) -> int:
    least = _WHOLE_BYTES // math.gcd(columns, _WHOLE_BYTES)
    return max(AT_ONCE // columns // least, 1) * least


class _ByRows:
    """A weight's tensors, row-major, filled some rows at a time. SDNQ is told for a part what it decided for all."""

    def __init__(self, weight: torch.Tensor, dequantizer: Any, expected: Tensors, arguments: Mapping[str, Any]) -> None:
        scale = expected["scale"]
        assert scale is not None
        self._weight, self._weights_dtype = weight, dequantizer.weights_dtype
        self._group_size, self._scale_dtype = dequantizer.group_size, scale.dtype
        self._decided = {**arguments, "group_size": dequantizer.group_size, "use_quantized_matmul": False,
                         "dequantize_fp32": scale.dtype == torch.float32}  # fmt: skip
        wanted = {key: tensor for key, tensor in expected.items() if tensor is not None}
        self.tensors = {key: own_memory(tensor.nbytes).view(tensor.dtype) for key, tensor in wanted.items()}

    def fill(self) -> None:
        """By our arithmetic what is SDNQ's by it, as is seen in one part, and the rest by SDNQ's own."""
        step = _rows_at_once(self._weight.shape[1])
        parts = [slice(start, start + step) for start in range(0, len(self._weight), step)]
        if is_known(self._weights_dtype):
            self._fill(parts, self._ours)
            unusual = self._unusual(step)
            seen = next((some for at, some in enumerate(parts) if at not in unusual), None)
            if seen is None or self._equals_sdnqs(seen):
                parts = [parts[at] for at in sorted(unusual)]
        self._fill(parts, self._sdnqs)

    def _fill(self, parts: Sequence[slice], quantize: Callable[[slice], Mapping[str, torch.Tensor]]) -> None:
        for rows in parts:
            made = quantize(rows)
            for key, filled in self._rows(rows).items():
                filled.copy_(made[key].reshape(-1))

    def _rows(self, rows: slice) -> dict[str, torch.Tensor]:
        """The tensors' parts that belong to these rows."""
        count = len(self._weight)
        return {
            key: tensor[rows.start * len(tensor) // count : min(rows.stop, count) * len(tensor) // count]
            for key, tensor in self.tensors.items()
        }

    def _ours(self, rows: slice) -> dict[str, torch.Tensor]:
        return quantized(self._weight[rows], self._weights_dtype, self._group_size, self._scale_dtype)

    def _sdnqs(self, rows: slice) -> dict[str, torch.Tensor]:
        sdnq_quantize_layer_weight = part("quantizer").sdnq_quantize_layer_weight
        return sdnq_quantize_layer_weight(self._weight[rows].to(torch.float32), **self._decided)[1]

    def _unusual(self, step: int) -> set[int]:
        """Which parts of `step` rows have a group that is not usual."""
        usual = are_usual(self.tensors["scale"], self.tensors.get("zero_point"))
        groups = usual.logical_not_().nonzero().flatten()
        return set((groups * len(self._weight) // len(usual) // step).tolist())

    def _equals_sdnqs(self, rows: slice) -> bool:
        """Whether what these rows have is, to the bit, what the SDNQ in use makes of them."""
        made = self._sdnqs(rows)
        return all(torch.equal(_as_bytes(tensor), _as_bytes(made[key])) for key, tensor in self._rows(rows).items())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


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
