"""The scales of quantized layers that are small enough to be judged in the plan: one a tensor, one a row.

Their number is bounded, so that a plan reads some megabytes at most. What is left, such as block scales, is judged when
it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from transplant.checkpoint.header import Header, TensorInfo
from transplant.checkpoint.reader import TORCH_DTYPES, open_reader
from transplant.formats import formats
from transplant.formats.base import FormatError, QuantizedLayer, check_finite_and_positive
from transplant.quantized import LayerError

MOST_BYTES = 10_000_000
"""What a plan reads of scales."""


def check_small_scales(header: Header, layers: Mapping[str, QuantizedLayer]) -> None:
    """Judge the smallest scales of a file, up to MOST_BYTES.

    Args:
        header: the file.
        layers: its quantized layers, all of formats that are known.

    Raises:
        LayerError: NaN, infinite, negative or zero. Zero counts only where the layer was written: a sparse file, of
            which nothing but the header is there, has zeros everywhere.
        UnreadableFile: the file changed, or cannot be read.
    """
    wanted = sorted(_scales(layers), key=lambda scale: scale[2].nbytes)
    left = MOST_BYTES
    with open_reader(header, use_mmap=False) as reader:
        for layer, role, info in wanted:
            left -= info.nbytes
            if left < 0:
                return
            scale = reader.read(info)
            try:
                check_finite_and_positive(
                    role, scale, allow_zero=bool((scale == 0).any()) and not _written(header, layer)
                )
            except FormatError as error:
                raise LayerError(layer, str(error)) from error


def _scales(layers: Mapping[str, QuantizedLayer]) -> Iterator[tuple[QuantizedLayer, str, TensorInfo]]:
    for layer in layers.values():
        for role in formats()[layer.format].positive:
            info = layer.tensors.get(role)
            if info is not None and info.dtype in TORCH_DTYPES:
                yield layer, role, info


def _written(header: Header, layer: QuantizedLayer) -> bool:
    """Whether a layer's codes are there, not a hole that reads as zeros; True where the system cannot tell."""
    info, seek_hole = layer.tensors["weight"], getattr(os, "SEEK_HOLE", None)
    if seek_hole is None or not info.nbytes:
        return True
    part = header.part_of(info)
    start = info.start - part.position
    try:
        with part.path.open("rb", buffering=0) as file:
            return os.lseek(file.fileno(), start, seek_hole) >= start + info.nbytes
    except OSError:
        return True
