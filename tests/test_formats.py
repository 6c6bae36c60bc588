"""Every format: our codes are worth what comfy-kitchen's eager code says, bit for bit.

Each in every container and at real widths: test_format_matrix.py. Exact in fp32 for all; in bf16 wherever the
reference itself rounds once (docs/formats.md says where not).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kitchen import Written, float8, int8
from transplant.formats.base import FormatError, join
from transplant.sdnq_bridge import Compute, decoded, quantized_layer

SHAPES = ((96, 160), (1, 64), (30, 48), (7, 18), (256, 256))
SMALL = ((96, 256), (1, 256), (256, 256), (31, 512))


def weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Random weights with rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(shape[0], 1, generator=generator) * 4 + 0.1
    return torch.randn(shape, generator=generator) * rows * 0.05


def layer_of(written: Written, dtype: torch.dtype, compute: Compute | None = None) -> torch.nn.Module:
    """An SDNQ Linear with the layer's codes, and a bias."""
    n, k = written.shape
    module = torch.nn.Linear(k, n, dtype=dtype)
    return quantized_layer(module, written.codes(), dtype, compute or Compute())


def assert_exact(written: Written, dtype: torch.dtype) -> None:
    """Weight and forward equal the reference, bit for bit."""
    expected = written.value(dtype)
    got = decoded(written.codes(), written.shape, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    layer = layer_of(written, dtype)
    x = torch.randn(5, written.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("per_row", [True, False])
def test_int8(shape: tuple[int, int], per_row: bool, dtype: torch.dtype) -> None:
    written = int8(weight(shape), per_row=per_row)
    assert_exact(written, dtype)
    assert written.codes().form.group_size == (-1 if per_row or shape[0] == 1 else -2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("shape", [s for s in SMALL if s[0] > 1], ids=str)
def test_int8_convrot(shape: tuple[int, int], size: int, dtype: torch.dtype) -> None:
    assert_exact(int8(weight(shape), convrot=size), dtype)


@pytest.mark.parametrize("size", [16, 256])
def test_int8_convrot_of_one_row(size: int) -> None:
    """N = 1: another order of sums, the last bit of fp32 may differ; bf16 does not see it."""
    written = int8(weight((1, 256)), convrot=size)
    got, expected = decoded(written.codes(), (1, 256), torch.float32), written.value(torch.float32)
    assert torch.linalg.norm(got - expected) <= 1e-6 * torch.linalg.norm(expected)
    rounded, reference = decoded(written.codes(), (1, 256), torch.bfloat16), written.value(torch.bfloat16)
    assert (rounded != reference).sum() <= 2


@pytest.mark.parametrize("spelling", [(), (1,), (1, 1), "n", "n1"], ids=str)
@pytest.mark.parametrize("shape", [(96, 160), (160, 160)], ids=str)
def test_scale_spellings(shape: tuple[int, int], spelling: object) -> None:
    """B10: scalar and per-row forms; [N] means rows, also where the weight is square."""
    written = int8(weight(shape), per_row=spelling in ("n", "n1"))
    n = shape[0]
    wanted = (n,) if spelling == "n" else (n, 1) if spelling == "n1" else spelling
    scale = written.tensors["weight_scale"].reshape(wanted)  # type: ignore[arg-type]
    respelled = replace(written, tensors={**written.tensors, "weight_scale": scale})
    assert torch.equal(decoded(respelled.codes(), shape, torch.float32), written.value(torch.float32))


@pytest.mark.parametrize("spelling", [(2,), (160,), (1, 160), (96, 2), (96, 1, 1)], ids=str)
def test_other_scale_shapes_are_refused(spelling: tuple[int, ...]) -> None:
    written = int8(weight((96, 160)))
    wrong = replace(written, tensors={**written.tensors, "weight_scale": torch.ones(spelling)})
    with pytest.raises(FormatError, match="weight_scale has shape"):
        wrong.codes()
    with pytest.raises(FormatError, match="weight_scale has shape"):
        wrong.codes(meta=True)


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "inf"), (0.0, "zero"), (-1.0, "neg")]
)
def test_scales_that_cannot_be(value: float, word: str) -> None:
    written = int8(weight((96, 160)))
    scale = written.tensors["weight_scale"].clone()
    scale[17] = value
    with pytest.raises(FormatError, match=word):
        replace(written, tensors={**written.tensors, "weight_scale": scale}).codes()


@pytest.mark.parametrize("size", [1, 2, 8, 32, 128, 0, -4, True, "16"])
def test_rotations_that_sdnq_would_do_differently(size: object) -> None:
    """Only powers of 4 that divide the columns."""
    written = int8(weight((96, 256)), convrot=64)
    with pytest.raises(FormatError):
        replace(written, marker={**written.marker, "convrot_groupsize": size}).codes()


def test_rotation_that_does_not_divide() -> None:
    written = int8(weight((96, 160)), convrot=16)
    with pytest.raises(FormatError, match="256 does not divide its 160 columns"):
        replace(written, marker={**written.marker, "convrot_groupsize": 256}).codes()


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float8_in_fp32(shape: tuple[int, int], stored: torch.dtype) -> None:
    assert_exact(float8(weight(shape), stored), torch.float32)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_in_bf16_is_rounded_once(stored: torch.dtype) -> None:
    """Nearer to the exact value than the reference, which rounds the scale first."""
    written = float8(weight((256, 256)), stored)
    exact = written.tensors["weight"].double() * written.tensors["weight_scale"].double()
    got = decoded(written.codes(), (256, 256), torch.bfloat16)
    assert torch.equal(got, exact.to(torch.float32).to(torch.bfloat16))
    assert (got.double() - exact).norm() <= (written.value(torch.bfloat16).double() - exact).norm()


def test_portable_float8_codes() -> None:
    """The bytes that SDNQ decodes itself are worth the same, all finite codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).reshape(1, -1)
    written = float8(weight((1, finite.shape[1])))
    written = replace(written, tensors={**written.tensors, "weight": finite})
    plain, portable = written.codes(), written.codes(portable=True)
    assert portable.weight.dtype == torch.uint8
    shape = (1, finite.shape[1])
    assert torch.equal(decoded(portable, shape, torch.float32), decoded(plain, shape, torch.float32))


@pytest.mark.parametrize("make", [int8, float8])
def test_rows_and_joins(make: object) -> None:
    """Cut by rows and joined in another order: what dequantizing first would give."""
    one, two = make(weight((64, 128), 1)), make(weight((32, 128), 2))  # type: ignore[operator]
    joined = join([two.codes(8, 24), one.codes(0, 10), two.codes(24, 32)])
    expected = torch.cat([two.value(torch.float32)[8:24], one.value(torch.float32)[:10], two.value(torch.float32)[24:]])
    assert torch.equal(decoded(joined, tuple(expected.shape), torch.float32), expected)


def test_join_of_scalar_scales_stays_scalar_where_they_are_equal() -> None:
    """A fused layer with one scale, cut in three and joined again, costs no scale a row."""
    written = int8(weight((96, 64)), per_row=False)
    parts = [written.codes(0, 32), written.codes(32, 64), written.codes(64, 96)]
    assert join(parts).form.group_size == -2
    assert join(parts).scale.shape == (1, 1)


def test_join_of_different_formats_is_refused() -> None:
    with pytest.raises(FormatError, match="differently"):
        join([int8(weight((8, 64))).codes(), float8(weight((8, 64))).codes()])
    with pytest.raises(FormatError, match="differently"):
        join([int8(weight((8, 64)), convrot=16).codes(), int8(weight((8, 64)), convrot=64).codes()])


@pytest.mark.parametrize("make", [int8, float8])
def test_meta_codes_have_the_real_size(make: object) -> None:
    """What a plan predicts is what a build makes."""
    written = make(weight((96, 256)))  # type: ignore[operator]
    planned, real = written.codes(10, 60, meta=True), written.codes(10, 60)
    assert planned.form == real.form
    for one, other in ((planned.weight, real.weight), (planned.scale, real.scale)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("matmul", ["auto"])
@pytest.mark.parametrize("make", [int8, lambda w: int8(w, convrot=64), lambda w: int8(w, per_row=False)])
def test_quantized_matmul(make: object, matmul: str) -> None:
    """The layer computes with int8 activations: near to the exact product, exact for few tokens."""
    written = make(weight((64, 256)))  # type: ignore[operator]
    layer = layer_of(written, torch.float32, Compute(quantized_matmul=matmul))
    assert layer.sdnq_dequantizer.use_quantized_matmul
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, written.value(torch.float32), layer.bias)
        error = torch.linalg.norm(layer(x) - expected) / torch.linalg.norm(expected)
        few = torch.nn.functional.linear(x[:4], written.value(torch.float32), layer.bias)
        assert torch.allclose(layer(x[:4]), few, atol=1e-4)
    assert 0 < error < 0.02
