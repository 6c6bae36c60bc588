"""Recipes applied to quantized layers: which rows of which layers, on meta while planning, for real while building."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from transplant.checkpoint.header import TensorInfo
from transplant.checkpoint.reader import TORCH_DTYPES
from transplant.formats import formats
from transplant.formats.base import Codes, FormatError, Portable, QuantizedLayer, Rows, check_layer, join
from transplant.holders import holder_of
from transplant.recipe import Recipe, RowRange
from transplant.recipe import Rows as RowRecipe
from transplant.sdnq_bridge import Compute, portable_on

Shape = tuple[int, ...]
ReadTensor = Callable[[TensorInfo, int, "int | None"], torch.Tensor]
"""Reads rows of a stored tensor, on meta or for real."""


class LayerError(Exception):
    """A FormatError with the layer that it is about."""

    def __init__(self, layer: QuantizedLayer, reason: str) -> None:
        super().__init__(f"{layer.name}: {reason}")
        self.layer = layer
        self.reason = reason


def logical_shape(layer: QuantizedLayer) -> Shape:
    """Shape of a layer as far as the file tells, mostly (N, K); padded formats may be smaller in truth.

    Raises:
        LayerError: an unknown format, missing or contradicting tensors.
    """
    known = formats()
    if layer.format not in known:
        raise LayerError(layer, f"its format {layer.format!r} is not one of {', '.join(known)}")
    try:
        check_layer(layer, known[layer.format])
        return known[layer.format].logical_shape(layer)
    except FormatError as error:
        raise LayerError(layer, str(error)) from error


def fits(layer: QuantizedLayer, found: Shape, wanted: Shape) -> bool:
    """Whether a stored shape is the wanted one, padded as the layer's format pads."""
    padding = formats()[layer.format].padded
    return len(found) == len(wanted) == 2 and all(
        have in (want, -(-want // pad) * pad) for have, want, pad in zip(found, wanted, padding, strict=True)
    )


def is_rows_of_layers(recipe: Recipe | None, layers: Mapping[str, QuantizedLayer]) -> bool:
    """Whether a recipe is nothing but rows of quantized layers, each with bytes of its own."""
    if not isinstance(recipe, RowRecipe) or not all(part.source in layers for part in recipe.ranges):
        return False
    return all(_in_rows(layers[part.source]) for part in recipe.ranges)


def _in_rows(layer: QuantizedLayer) -> bool:
    return formats()[layer.format].in_rows(layer)


def codes_of(
    recipe: RowRecipe, shape: Shape, layers: Mapping[str, QuantizedLayer], read: ReadTensor, portable: Portable
) -> Codes:
    """The codes of a target.

    Args:
        recipe: rows of quantized layers, in stored names.
        shape: (N, K) of the target.
        layers: quantized layers by the stored name of their weight.
        read: reads stored tensors.
        portable: what the device needs held otherwise.

    Raises:
        LayerError: the layer cannot be adopted, or the parts cannot be joined.
    """
    whole = len(recipe.ranges) == 1
    parts = [
        _adopt(layers[part.source], _rows(layers[part.source], part, shape, whole), read, portable)
        for part in recipe.ranges
    ]
    try:
        return join(parts)
    except FormatError as error:
        raise LayerError(layers[recipe.ranges[0].source], str(error)) from error


def _rows(layer: QuantizedLayer, part: RowRange, shape: Shape, whole: bool) -> Rows:
    """The rows of a layer that a part stands for; a padded layer that is taken whole ends where the target ends."""
    stored_rows = logical_shape(layer)[0]
    if whole and (part.start, part.stop) == (0, stored_rows):
        return Rows(0, shape[0], (shape[0], shape[1]))
    return Rows(part.start, part.stop, (stored_rows, shape[1]))


def _adopt(layer: QuantizedLayer, rows: Rows, read: ReadTensor, portable: Portable) -> Codes:
    def read_role(role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        info = layer.tensors[role]
        return read(info, start, stop if info.shape else None)

    try:
        return formats()[layer.format].adopt(layer, read_role, rows, portable)
    except FormatError as error:
        raise LayerError(layer, str(error)) from error


def decode_rows(
    part: RowRange, layers: Mapping[str, QuantizedLayer], read: ReadTensor, dtype: torch.dtype, compute: Compute
) -> torch.Tensor:
    """Rows of one quantized layer as values in `dtype`, for a recipe or a place that codes cannot go through.

    Raises:
        LayerError: the layer cannot be adopted.
    """
    layer = layers[part.source]
    n, *rest = logical_shape(layer)
    k = math.prod(rest)
    start, stop = (part.start, part.stop) if _in_rows(layer) else (0, n)
    codes = _adopt(layer, Rows(start, stop, (n, k)), read, portable_on(compute, torch.device("cpu")))
    if codes.input_scale is not None:
        raise LayerError(layer, "it scales its input, and its place in the network needs plain weights")
    values = holder_of(codes.form).decoded(codes, (stop - start, k), dtype, compute)
    return values[part.start - start : part.stop - start].reshape(part.stop - part.start, *rest)


def read_meta(info: TensorInfo, start: int, stop: int | None) -> torch.Tensor:
    """A stored tensor as a meta tensor: shape and dtype without a byte."""
    tensor = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
    return tensor[start:stop] if info.shape and (start or stop is not None) else tensor
