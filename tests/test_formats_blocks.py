"""nvfp4 and mxfp8: block scales in cuBLAS's tiles, padding, nibbles, against comfy-kitchen's eager code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from kitchen import SAFETENSORS, Written, write
from transplant.checkpoint.header import TensorInfo
from transplant.formats import formats
from transplant.formats.base import Codes, FormatError, Portable, QuantizedLayer, Rows, check_layer, join
from transplant.formats.block_scales import swizzled_shape, unswizzled
from transplant.formats.nvfp4 import swap_nibbles
from transplant.sdnq_bridge import Compute, decoded, quantized_layer

SHAPES = ((96, 160), (30, 48), (30, 40), (1, 32), (7, 18), (130, 768), (256, 256))
BLOCK = {"nvfp4": 16, "mxfp8": 32}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Random weights, rows of very different size, the first row's first blocks all zero."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(shape[0], 1, generator=generator) * 4 + 0.1
    values = torch.randn(shape, generator=generator) * rows * 0.05
    if shape[0] > 1:
        values[0, :32] = 0
    return values


def nvfp4(values: torch.Tensor, **marker: Any) -> Written:
    """nvfp4 with one scale for the tensor and one for 16 columns."""
    return write(values, "TensorCoreNVFP4Layout", {"format": "nvfp4", **marker})


def mxfp8(values: torch.Tensor, **marker: Any) -> Written:
    """mxfp8 with a power of two for 32 columns."""
    return write(values, "TensorCoreMXFP8Layout", {"format": "mxfp8", **marker})


WRITERS = pytest.mark.parametrize("make", [nvfp4, mxfp8])


def with_tensors(written: Written, **tensors: torch.Tensor) -> Written:
    """The layer with other tensors in the file."""
    return replace(written, tensors={**written.tensors, **tensors})


def exact(written: Written) -> torch.Tensor:
    """The stored weight in fp64, by the formats' definitions, without padding."""
    n, k = written.shape
    codes, scales = written.tensors["weight"], written.tensors["weight_scale"]
    if written.marker["format"] == "nvfp4":
        values = E2M1[torch.stack([codes >> 4, codes & 15], -1).flatten(1).long()]
        plain = from_blocked(scales.double(), len(codes), values.shape[1] // 16)
        return (values * plain.repeat_interleave(16, 1) * written.tensors["weight_scale_2"].double())[:n, :k]
    exponents = from_blocked(scales.view(torch.uint8), len(codes), codes.shape[1] // 32).double() - 127
    return (codes.double() * torch.exp2(exponents).repeat_interleave(32, 1))[:n, :k]


def layer_of(codes: Codes, shape: tuple[int, int], dtype: torch.dtype, compute: Compute | None = None) -> Any:
    """An SDNQ Linear with these codes, and a bias."""
    module = torch.nn.Linear(shape[1], shape[0], dtype=dtype)
    return quantized_layer(module, codes, dtype, compute or Compute())


def assert_exact(written: Written, dtype: torch.dtype, *, portable: bool = False) -> None:
    """Weight and forward equal the reference, bit for bit."""
    expected, codes = written.value(dtype), written.codes(portable=portable)
    got = decoded(codes, written.shape, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, expected)
    layer = layer_of(codes, written.shape, dtype)
    x = torch.randn(5, written.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, layer.bias))


def nbytes(codes: Codes) -> int:
    """Bytes of everything that grows with the layer."""
    return codes.weight.nbytes + codes.scale.nbytes


# -- the layout of block scales --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 21), st.sampled_from([torch.uint8, torch.float8_e4m3fn]))
def test_unswizzled_is_the_kitchens_inverse(rows: int, columns: int, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    stored = to_blocked(codes, flatten=False)
    assert tuple(stored.shape) == swizzled_shape(rows, columns)
    got = unswizzled(stored.view(dtype), rows, columns)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), codes)
    assert torch.equal(got.view(torch.uint8), from_blocked(stored, rows, columns))
    meta = unswizzled(stored.view(dtype).to("meta"), rows, columns)
    assert (meta.shape, meta.dtype, meta.is_meta) == (got.shape, dtype, True)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_unswizzled_by_the_index_formula(data: st.DataObject) -> None:
    """Tiles row-major; inside one, (r, c) lies at byte r % 32 * 16 + r // 32 * 4 + c."""
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 20))
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    tall, wide = swizzled_shape(rows, columns)
    stored = torch.zeros(tall * wide, dtype=torch.uint8)
    tile = r // 128 * (wide // 4) + c // 4
    stored[tile * 512 + r % 128 % 32 * 16 + r % 128 // 32 * 4 + c % 4] = 77
    got = unswizzled(stored.reshape(tall, wide), rows, columns)
    assert got[r, c] == 77
    assert got.sum() == 77


def test_nibbles_change_places() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert swap_nibbles(every).tolist() == [(byte & 15) << 4 | byte >> 4 for byte in range(256)]
    assert torch.equal(swap_nibbles(swap_nibbles(every)), every)


def test_every_nibble_is_decoded_by_the_e2m1_table() -> None:
    """Sixteen distinct codes in column order: the even column is in the high nibble of the file."""
    written = nvfp4(torch.ones(16, 16))
    codes = torch.tensor([[2 * i << 4 | 2 * i + 1 for i in range(8)]], dtype=torch.uint8).repeat(16, 1)
    one = torch.full((128, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    written = with_tensors(written, weight=codes, weight_scale=one, weight_scale_2=torch.tensor(1.0))
    assert decoded(written.codes(), (16, 16), torch.float64)[3].tolist() == E2M1.tolist()


# -- against the reference --------------------------------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32(make: Any, shape: tuple[int, int]) -> None:
    written = make(weight(shape))
    assert_exact(written, torch.float32)
    if make is mxfp8:
        assert torch.equal(exact(written).float(), written.value(torch.float32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp8_in_16_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_exact(mxfp8(weight(shape)), dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp8_portable(shape: tuple[int, int], dtype: torch.dtype) -> None:
    written = mxfp8(weight(shape))
    codes = written.codes(portable=True)
    assert (codes.form.scale_dtype, codes.scale.dtype, codes.scale_2) == (None, torch.bfloat16, None)
    assert_exact(written, dtype, portable=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4_in_bf16_is_rounded_once(shape: tuple[int, int]) -> None:
    """The reference rounds scale, product of scales and weight; ours is within half a step of the exact value."""
    written = nvfp4(weight(shape))
    value, got = exact(written), decoded(written.codes(), shape, torch.bfloat16).double()
    step = torch.finfo(torch.bfloat16).eps * value.abs().log2().floor().exp2()
    assert ((got - value).abs() <= step * (0.5 + 1e-4)).all()
    assert (got - value).norm() <= (written.value(torch.bfloat16).double() - value).norm()


@pytest.mark.parametrize("shape", [(5, 33), (33, 1), (4, 7)], ids=str)
def test_mxfp8_of_odd_columns(shape: tuple[int, int]) -> None:
    assert_exact(mxfp8(weight(shape)), torch.float32)


def test_nvfp4_of_odd_columns_is_refused() -> None:
    with pytest.raises(FormatError, match="17 columns"):
        nvfp4(weight((8, 17))).codes()


@WRITERS
@pytest.mark.parametrize("shape", [(130, 72), (31, 512)], ids=str)
def test_any_bytes(make: Any, shape: tuple[int, int]) -> None:
    """Not only what a quantizer writes: every finite code under every scale, negative zero and subnormals too."""
    written = noise_like(make(weight((16, 16))), shape)
    assert_exact(written, torch.float32)
    if make is mxfp8:
        assert_exact(written, torch.bfloat16)
        assert_exact(written, torch.float32, portable=True)
        assert_exact(written, torch.bfloat16, portable=True)


def noise_like(written: Written, shape: tuple[int, int]) -> Written:
    """A layer of that format and shape with random bytes, padding included; the reference holds the same."""
    (n, k), block = shape, BLOCK[str(written.marker["format"])]
    rows, columns = -(-n // block) * block, -(-k // block) * block
    generator = torch.Generator().manual_seed(5)

    def noise(shape: tuple[int, int], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    blocks = swizzled_shape(n, columns // block)
    if block == 16:
        codes, scale = noise((rows, columns // 2), 0, 256), noise(blocks, 0, 0x7F).view(torch.float8_e4m3fn)
        changes = {"block_scale": scale, "scale": torch.tensor(0.0123)}
        tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": changes["scale"]}
    else:
        codes, scale = noise((rows, columns), 0, 0xFF), noise(blocks, 70, 160).view(torch.float8_e8m0fnu)
        codes[codes == 0x7F] = 0
        changes, tensors = {"scale": scale}, {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale}
    params = replace(written.reference._params, orig_shape=shape, **changes)
    reference = type(written.reference)(tensors["weight"], written.reference._layout_cls, params)
    return replace(written, tensors=tensors, reference=reference)


# -- spellings, sizes, rows -------------------------------------------------------------------------------------------


@WRITERS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_stored_as_bytes_are_reinterpreted(make: Any, shape: tuple[int, int]) -> None:
    written = make(weight(shape))
    respelled = with_tensors(written, weight_scale=written.tensors["weight_scale"].view(torch.uint8))
    if make is nvfp4:
        respelled = with_tensors(respelled, weight_scale_2=written.tensors["weight_scale_2"].reshape(1))
    one, other = written.codes(), respelled.codes()
    assert one.form == other.form
    assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
    assert torch.equal(one.scale.view(torch.uint8), other.scale.view(torch.uint8))
    assert torch.equal(one.scale_2, other.scale_2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "portable", "size"), [(nvfp4, False, 0.5625), (mxfp8, False, 1.03125), (mxfp8, True, 1.0625)]
)
@pytest.mark.parametrize("shape", [(96, 160), (256, 256), (30, 96)], ids=str)
def test_bytes_a_weight(make: Any, portable: bool, size: float, shape: tuple[int, int]) -> None:
    """One byte a block; cut rows keep no more than themselves in memory."""
    written = make(weight(shape))
    codes = written.codes(portable=portable)
    assert nbytes(codes) == size * shape[0] * shape[1]
    cut = written.codes(8, 24, portable=portable)
    assert nbytes(cut) == size * 16 * shape[1]
    assert cut.scale.untyped_storage().nbytes() == cut.scale.nbytes
    assert codes.scale_2 is None or codes.scale_2.numel() == 1


def test_bytes_a_weight_where_columns_are_no_whole_blocks() -> None:
    """Groups of gcd(block, K): repeated scales, no padding."""
    four, eight = nvfp4(weight((30, 40))), mxfp8(weight((30, 40)))
    assert four.codes().form.group_size == eight.codes().form.group_size == 8
    assert nbytes(four.codes()) == (0.5 + 1 / 8) * 1200
    assert nbytes(eight.codes()) == (1 + 1 / 8) * 1200


def test_mxfp8_codes_stay_where_they_are() -> None:
    """Codes without padding are a view of what was read, so a mapped file stays mapped."""
    written = mxfp8(weight((64, 96)))
    assert written.codes().weight.data_ptr() == written.tensors["weight"].data_ptr()


@WRITERS
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_meta_codes_have_the_real_size(make: Any, shape: tuple[int, int], portable: bool) -> None:
    written = make(weight(shape))
    stop = max(shape[0] // 2, 1)
    planned, real = written.codes(0, stop, meta=True, portable=portable), written.codes(0, stop, portable=portable)
    assert planned.form == real.form
    for name in ("weight", "scale", "scale_2", "zero_point", "input_scale"):
        one, other = getattr(planned, name), getattr(real, name)
        assert (one is None) == (other is None)
        assert one is None or (one.shape, one.dtype, one.is_meta) == (other.shape, other.dtype, True)
        assert one is None or one.stride() == other.stride()


@WRITERS
@pytest.mark.parametrize("columns", [128, 40])
def test_rows_and_joins(make: Any, columns: int) -> None:
    """Cut across a tile's border and joined in another order: what dequantizing first would give."""
    one, two = make(weight((200, columns), 1)), make(weight((48, columns), 2) * 3)
    joined = join([two.codes(8, 24), one.codes(0, 10), one.codes(120, 200), two.codes(24, 48)])
    first, second = one.value(torch.float32), two.value(torch.float32)
    expected = torch.cat([second[8:24], first[:10], first[120:200], second[24:]])
    shape = (130, columns)
    assert torch.equal(decoded(joined, shape, torch.float32), expected)
    assert torch.equal(layer_of(joined, shape, torch.float32).dequantize().weight, expected)
    assert joined.scale_2 is not None
    assert tuple(joined.scale_2.shape) == ((130, 1, 1) if make is nvfp4 else (1,))


@WRITERS
def test_a_layer_cut_and_joined_keeps_one_scale(make: Any) -> None:
    written = make(weight((96, 64)))
    joined, whole = join([written.codes(0, 32), written.codes(32, 64), written.codes(64, 96)]), written.codes()
    assert torch.equal(joined.scale_2, whole.scale_2)  # type: ignore[arg-type]
    assert torch.equal(joined.weight.view(torch.uint8), whole.weight.view(torch.uint8))
    assert torch.equal(joined.scale.view(torch.uint8), whole.scale.view(torch.uint8))


def test_pre_quant_scale_multiplies_the_input() -> None:
    """AWQ: x * scale in the input's dtype, never in the weight; it survives cutting and joining."""
    written = nvfp4(weight((64, 96)))
    scale = torch.rand(96, generator=torch.Generator().manual_seed(2)).bfloat16() + 0.5
    awq = with_tensors(written, pre_quant_scale=scale, input_scale=torch.tensor(7.0))
    parts = [awq.codes(0, 16), awq.codes(16, 64)]
    assert torch.equal(decoded(join(parts), (64, 96), torch.float32), written.value(torch.float32))
    assert join([awq.codes(0, 16, meta=True), awq.codes(16, 64, meta=True)]).input_scale is not None
    with pytest.raises(FormatError, match="only some"):
        join([awq.codes(0, 16), written.codes(16, 64)])
    for dtype in (torch.float32, torch.bfloat16):
        layer = layer_of(join(parts), (64, 96), dtype)
        x = torch.randn(3, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
        value = decoded(written.codes(), (64, 96), dtype)
        with torch.no_grad():
            assert torch.equal(layer(x), torch.nn.functional.linear(x * scale.to(dtype), value, layer.bias))


@WRITERS
def test_quantized_matmul(make: Any) -> None:
    """SDNQ makes codes for its matmul anew from ours: near the exact product for many tokens."""
    written = make(weight((64, 256)))
    layer = layer_of(written.codes(), (64, 256), torch.float32, Compute(quantized_matmul="int8"))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, written.value(torch.float32), layer.bias)
        assert 0 < (layer(x) - expected).norm() / expected.norm() < 0.02


# -- what is refused --------------------------------------------------------------------------------------------------


@WRITERS
def test_orig_shape_is_the_shape(make: Any) -> None:
    written = make(weight((30, 40)), orig_shape=[30, 40])
    layer_format = formats()[str(written.marker["format"])]
    assert layer_format.logical_shape(written.layer()) == (30, 40)
    assert_exact(written, torch.float32)
    without = make(weight((30, 40)))
    assert layer_format.logical_shape(without.layer()) == ((32, 48) if make is nvfp4 else (32, 64))


@WRITERS
@pytest.mark.parametrize(
    "declared",
    [[30, 66], [33, 40], [40, 30], [30], [30, 40, 1], [30.0, 40], [True, 40], [-2, 40], "30x40", {}, 0, [[]]],
)
def test_contradicting_orig_shapes(make: Any, declared: object) -> None:
    with pytest.raises(FormatError, match="orig_shape"):
        make(weight((30, 40)), orig_shape=declared).codes(meta=True)


@WRITERS
def test_a_declared_shape_that_is_not_the_modules(make: Any) -> None:
    """Both pad to the same size, so only the declaration tells them apart."""
    with pytest.raises(FormatError, match="29 x 40 values, not 30 x 40"):
        make(weight((30, 40)), orig_shape=[29, 40]).codes()


@WRITERS
@pytest.mark.parametrize("shape", [(65, 40), (33, 40), (30, 100), (30, 16), (0, 40)], ids=str)
def test_modules_of_another_size(make: Any, shape: tuple[int, int]) -> None:
    written = make(weight((30, 40)))
    layer, layer_format = written.layer(), formats()[str(written.marker["format"])]
    with pytest.raises(FormatError, match=f"not {shape[0]} x {shape[1]}"):
        layer_format.adopt(layer, lambda role, start=0, stop=None: written.tensors[role], Rows(0, 1, shape), Portable())


@WRITERS
@pytest.mark.parametrize("size", [8, 64, 128, 0, True, "16", None, [16]])
def test_other_group_sizes(make: Any, size: object) -> None:
    with pytest.raises(FormatError, match="group_size"):
        make(weight((32, 64)), group_size=size).codes(meta=True)


@WRITERS
def test_entries_that_change_nothing(make: Any) -> None:
    marker = {"convrot": False, "convrot_groupsize": 256, "full_precision_matrix_mult": True, "comment": "x"}
    assert_exact(make(weight((32, 64)), group_size=BLOCK[make.__name__], **marker), torch.float32)


@WRITERS
def test_rotation_is_refused(make: Any) -> None:
    with pytest.raises(FormatError, match="convrot"):
        make(weight((32, 64)), convrot=True, convrot_groupsize=64).codes()


@WRITERS
@pytest.mark.parametrize("shape", [(96, 4), (128, 5), (128, 8), (256, 4), (512,), (1, 128, 4), (), (4, 128)], ids=str)
def test_other_shapes_of_block_scales(make: Any, shape: tuple[int, ...]) -> None:
    """Plain [N, K / block] is told from tiles by its shape, where that differs."""
    written = make(weight((96, 4 * BLOCK[make.__name__])))
    stored = written.tensors["weight_scale"]
    assert tuple(stored.shape) == (128, 4)
    wrong = with_tensors(written, weight_scale=torch.ones(shape).to(stored.dtype))
    for meta in (False, True):
        with pytest.raises(FormatError, match="weight_scale has shape"):
            wrong.codes(meta=meta)


@WRITERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e5m2])
def test_other_dtypes_of_block_scales(make: Any, dtype: torch.dtype) -> None:
    written = make(weight((32, 64)))
    wrong = with_tensors(written, weight_scale=torch.ones(128, 4).to(dtype))
    with pytest.raises(FormatError, match="weight_scale is stored as"):
        wrong.codes(meta=True)


@pytest.mark.parametrize(("make", "byte"), [(nvfp4, 0x7F), (nvfp4, 0xFF), (nvfp4, 0x81), (mxfp8, 0xFF)])
def test_block_scales_that_cannot_be(make: Any, byte: int) -> None:
    written = make(weight((40, 64)))
    stored = written.tensors["weight_scale"]
    for position, refused in (((0, 0), True), ((127, 3), False)):  # the second is padding: row 127 of 40
        scale = stored.view(torch.uint8).clone()
        scale[position] = byte
        wrong = with_tensors(written, weight_scale=scale.view(stored.dtype))
        if refused:
            with pytest.raises(FormatError, match="weight_scale holds"):
                wrong.codes()
        else:
            assert torch.equal(decoded(wrong.codes(), (40, 64), torch.float32), written.value(torch.float32))


@WRITERS
def test_blocks_of_zeros(make: Any) -> None:
    written = make(torch.cat([torch.zeros(32, 64), weight((32, 64))]))
    assert (written.tensors["weight_scale"].view(torch.uint8) == 0).any()
    assert_exact(written, torch.float32)


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "inf"), (0.0, "zero"), (-1.0, "negative")]
)
@pytest.mark.parametrize("role", ["weight_scale_2", "pre_quant_scale"])
def test_nvfp4_scales_that_cannot_be(role: str, value: float, word: str) -> None:
    written = nvfp4(weight((32, 64)))
    scale = torch.tensor(value) if role == "weight_scale_2" else torch.ones(64).index_fill(0, torch.tensor(3), value)
    with pytest.raises(FormatError, match=f"{role} holds .*{word}"):
        with_tensors(written, **{role: scale}).codes()


@pytest.mark.parametrize("role", ["weight_scale_2", "pre_quant_scale"])
@pytest.mark.parametrize("shape", [(2,), (1, 1), (63,), (1, 64), (0,)], ids=str)
def test_nvfp4_scales_of_other_shapes(role: str, shape: tuple[int, ...]) -> None:
    wrong = with_tensors(nvfp4(weight((32, 64))), **{role: torch.ones(shape)})
    for meta in (False, True):
        with pytest.raises(FormatError, match=f"its {role} is"):
            wrong.codes(meta=meta)


@pytest.mark.parametrize("role", ["weight_scale_2", "pre_quant_scale"])
def test_nvfp4_scales_of_other_dtypes(role: str) -> None:
    shape = () if role == "weight_scale_2" else (64,)
    wrong = with_tensors(nvfp4(weight((32, 64))), **{role: torch.ones(shape, dtype=torch.int32)})
    with pytest.raises(FormatError, match=role):
        wrong.codes()


@WRITERS
def test_tensors_that_are_missing_or_of_no_use(make: Any) -> None:
    written = make(weight((32, 64)))
    with pytest.raises(FormatError, match="lacks weight_scale"):
        replace(written, tensors={"weight": written.tensors["weight"]}).codes()
    with pytest.raises(FormatError, match="no use for its weight_zeros"):
        with_tensors(written, weight_zeros=torch.ones(1)).codes()
    with pytest.raises(FormatError, match="stored as I8"):
        with_tensors(written, weight=written.tensors["weight"].view(torch.int8)).codes()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
SIZES = st.sampled_from([0, 1, 2, 4, 7, 8, 16, 20, 30, 32, 40, 64, 128, 256])
DTYPES = st.sampled_from([torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32])
KEYS = st.sampled_from(["orig_shape", "group_size", "convrot", "convrot_groupsize", "params", "num_experts"])
PAIR = st.lists(st.integers(-1, 70), min_size=2, max_size=2)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_but_a_format_error(data: st.DataObject) -> None:
    """Random declarations, shapes, dtypes and bytes: refused, or codes of the promised shape. On meta the same."""
    name = data.draw(st.sampled_from(["nvfp4", "mxfp8"]))
    block = BLOCK[name]
    n, k = data.draw(st.tuples(SIZES, SIZES))
    rows, columns = -(-n // block) * block, -(-k // block) * block
    like = torch.zeros(0, dtype=torch.uint8)
    good: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight": ((rows, columns // 2), torch.uint8) if block == 16 else ((rows, columns), torch.float8_e4m3fn),
        "weight_scale": (swizzled_shape(rows, columns // block), torch.uint8),
        "weight_scale_2": ((), torch.float32),
    }
    optional = ["pre_quant_scale"]
    if name == "mxfp8":
        del good["weight_scale_2"]
        optional = []
    for role in data.draw(st.sets(st.sampled_from([*good, *optional]), max_size=2)):
        good[role] = tuple(data.draw(st.lists(SIZES, max_size=3))), data.draw(DTYPES)
    high = data.draw(st.sampled_from([100, 256]))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {
        role: like.new_empty(*shape, dtype.itemsize).random_(0, high, generator=seed).view(dtype).reshape(shape)
        for role, (shape, dtype) in good.items()
    }
    marker = {"format": name, **data.draw(st.dictionaries(KEYS, JSON | PAIR, max_size=2))}
    shape = data.draw(st.sampled_from([(n, k), (rows, columns)]) | st.tuples(SIZES, SIZES))
    outcomes = [outcome(name, marker, tensors, shape, meta) for meta in (True, False)]
    assert isinstance(outcomes[1], str) or outcomes[0] == outcomes[1]


def outcome(
    name: str, marker: dict[str, Any], tensors: dict[str, torch.Tensor], shape: tuple[int, int], meta: bool
) -> object:
    """The refusal, or shapes of the codes."""
    infos = {role: TensorInfo(role, SAFETENSORS[t.dtype], tuple(t.shape), 0, t.nbytes) for role, t in tensors.items()}
    layer, layer_format = QuantizedLayer("layer", name, marker, "markers", infos), formats()[name]

    def read(role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = tensors[role].to("meta") if meta else tensors[role]
        return tensor[start:stop] if tensor.ndim else tensor

    try:
        check_layer(layer, layer_format)
        layer_format.logical_shape(layer)
        codes = layer_format.adopt(layer, read, Rows(0, shape[0], shape), Portable())
    except FormatError as error:
        return str(error)
    n, k = shape
    group = codes.form.group_size
    assert tuple(codes.scale.shape) == (n, k // group, 1)
    assert codes.weight.nbytes == (n * k // 2 if name == "nvfp4" else n * k)
    return (codes.form, codes.weight.shape, codes.scale.shape)


# -- other settings of SDNQ, which reads them when it is imported -----------------------------------------------------


def in_another_process(check: str, **environment: str) -> None:
    """Run one of the checks below with SDNQ's settings of its own."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "modules")])
    run = subprocess.run(
        [sys.executable, "-c", f"import test_formats_blocks; test_formats_blocks.{check}()"],
        env={**os.environ, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]


def dequantized(written: Written, dtype: torch.dtype, *, portable: bool = False) -> torch.Tensor:
    """The weight as a layer's forward makes it: compiled where SDNQ compiles."""
    layer = layer_of(written.codes(portable=portable), written.shape, dtype)
    return layer.sdnq_dequantizer(layer.weight, layer.scale, scale_2=layer.scale_2)


def check_compiled() -> None:
    """Compiled dequantization equals eager, bit for bit."""
    from sdnq.common import use_torch_compile

    assert use_torch_compile
    for make, portable in ((nvfp4, False), (mxfp8, False), (mxfp8, True)):
        written = make(weight((33, 64)))
        eager = decoded(written.codes(portable=portable), written.shape, torch.bfloat16)
        assert torch.equal(dequantized(written, torch.bfloat16, portable=portable), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 3


def check_without_e4m3_conversion() -> None:
    """What SDNQ does on a GPU before sm_89: the portable form is right."""
    from sdnq.kernel_wrappers import is_fp8_compile_supported

    assert not is_fp8_compile_supported
    for dtype in (torch.float32, torch.bfloat16):
        written = mxfp8(weight((33, 64)))
        assert torch.equal(dequantized(written, dtype, portable=True), written.value(dtype))
        written = nvfp4(weight((33, 64)))
        assert torch.equal(dequantized(written, dtype, portable=True), decoded(written.codes(), written.shape, dtype))


def test_compiled_equals_eager() -> None:
    in_another_process("check_compiled", SDNQ_USE_TORCH_COMPILE="1")


def test_mxfp8_portable_without_e4m3_conversion() -> None:
    in_another_process("check_without_e4m3_conversion", SDNQ_USE_TORCH_COMPILE="0", SDNQ_ALLOW_FP8_COMPILE="0")
