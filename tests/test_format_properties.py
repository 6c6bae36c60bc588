"""What holds for every format, whatever the shapes and the cuts: rows, padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitchen import Written
from test_format_matrix import KINDS
from test_formats import weight
from test_formats_blocks import mxfp8, noise_like, nvfp4
from transplant.formats.base import Codes, join
from transplant.sdnq_bridge import decoded

ROWS, COLUMNS = 130, 128
CUTS = st.lists(st.tuples(st.booleans(), st.integers(0, ROWS - 1), st.integers(1, ROWS)), min_size=1, max_size=4)


def unrotated(codes: Codes) -> Codes:
    """Sums of a rotation depend on the number of rows in their last bit; what is summed does not."""
    return replace(codes, form=replace(codes.form, hadamard=0, fp32_rotation=False))


@functools.cache
def layers(kind: str) -> tuple[list[Written], list[torch.Tensor]]:
    """Two layers of one format with other values, and the values, not rotated."""
    made = [KINDS[kind].of_values(weight((ROWS, COLUMNS), seed)) for seed in (0, 1)]
    values = [decoded(unrotated(layer.codes()), layer.shape, torch.float32) for layer in made]
    if not KINDS[kind].rotated:
        assert all(torch.equal(value, layer.value(torch.float32)) for value, layer in zip(values, made, strict=True))
    return made, values


@settings(max_examples=80, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), cuts=CUTS)
def test_rows_cut_anywhere_and_joined(kind: str, cuts: list[tuple[bool, int, int]]) -> None:
    """Rows of two layers in any order, single rows and overlaps included: the rows of their values."""
    made, values = layers(kind)
    ranges = [(int(which), start, min(start + length, ROWS)) for which, start, length in cuts]
    joined = join([made[which].codes(start, stop) for which, start, stop in ranges])
    expected = torch.cat([values[which][start:stop] for which, start, stop in ranges])
    assert torch.equal(decoded(unrotated(joined), (len(expected), COLUMNS), torch.float32), expected)


@settings(max_examples=60, deadline=None)
@given(make=st.sampled_from([nvfp4, mxfp8]), n=st.integers(1, 140), k=st.integers(1, 70))
def test_padding_of_any_size(make: Callable[[torch.Tensor], Written], n: int, k: int) -> None:
    """Rows and columns that no block divides, with noise where the padding is: only the values inside count."""
    k += k % 2 if make is nvfp4 else 0  # it has two columns a byte
    layer = noise_like(make(torch.ones(16, 16)), (n, k))
    codes, planned = layer.codes(), layer.codes(meta=True)
    assert torch.equal(decoded(codes, (n, k), torch.float32), layer.value(torch.float32))
    assert (planned.form, planned.weight.shape, planned.scale.shape) == (
        codes.form, codes.weight.shape, codes.scale.shape,
    )  # fmt: skip
    assert codes.weight.nbytes == (n * k // 2 if make is nvfp4 else n * k)
