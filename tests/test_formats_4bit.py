"""The 4- and 6-bit formats: worth what comfy-kitchen's eager code says, bit for bit, at their stored width.

convrot_w4a4 and asym_w4a8_int8 are exact in every dtype; awq_w4a16 in fp32, and nearer to the exact value than the
reference in bf16 and fp16, where the reference rounds twice.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class
from comfy_kitchen.tensor.w4a8_packed import default_w4a8_codebook
from hypothesis import given, settings
from hypothesis import strategies as st

from kitchen import SAFETENSORS, Written, write
from test_formats import assert_exact, layer_of, weight
from transplant.checkpoint.header import TensorInfo
from transplant.formats import formats
from transplant.formats.asym_w4a8_int8 import Packing, decode
from transplant.formats.base import FormatError, Portable, QuantizedLayer, Rows, check_layer, join
from transplant.quantized import LayerError, logical_shape
from transplant.sdnq_bridge import Compute, decoded

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Make = Callable[..., Written]


def w4a4(values: torch.Tensor, convrot: int = 64, **entries: Any) -> Written:
    """convrot_w4a4."""
    marker = {"format": "convrot_w4a4", "convrot_groupsize": convrot, **entries}
    return write(values, "TensorCoreConvRotW4A4Layout", marker, convrot_groupsize=convrot)


def w4a8(values: torch.Tensor, convrot: int = 16, group: int = 16, **options: Any) -> Written:
    """asym_w4a8_int8; options as comfy-kitchen's: codebook, bits, scale_dtype, symmetric."""
    marker = {"format": "asym_w4a8_int8", "group_size": group, "convrot_groupsize": convrot, "convrot": True}
    options.setdefault("codebook_tensor", default_w4a8_codebook())  # fitting one takes seconds
    return write(values, "AsymW4A8Int8Layout", marker, group_size=group, convrot_groupsize=convrot, **options)


def awq(values: torch.Tensor, group: int = 32, dtype: torch.dtype = torch.bfloat16) -> Written:
    """awq_w4a16. comfy-kitchen only reads it, so the codes are made here."""
    n, k = values.shape
    grouped = values.view(n, k // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-5).to(dtype)
    zeros = (low + 8 * scale.float()).to(dtype)
    codes = ((grouped - zeros.float().unsqueeze(-1)) / scale.float().unsqueeze(-1) + 8).round().clamp(0, 15)
    return of_codes(
        "TensorCoreAWQW4A16Layout", packed_nibbles(codes.view(n, k)), {"format": "awq_w4a16", "group_size": group},
        (n, k), scale=scale.t().contiguous(), zeros=zeros.t().contiguous(), group_size=group,
    )  # fmt: skip


def of_codes(
    layout: str, codes: torch.Tensor, marker: Mapping[str, Any], shape: tuple[int, int], **params: Any
) -> Written:
    """A layer of given codes, without quantizing anything."""
    told = get_layout_class(layout).Params(orig_dtype=torch.float32, orig_shape=shape, **params)
    quantized = QuantizedTensor(codes, layout, told)
    tensors = {name.removeprefix("."): tensor for name, tensor in quantized.state_dict(".weight").items()}
    return Written(tensors, marker, quantized)


def packed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] as [N, K / 2] int8, even column in the low nibble."""
    whole = codes.to(torch.int32) & 15
    return (whole[:, ::2] | whole[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def random_w4a4(shape: tuple[int, int], convrot: int) -> Written:
    """Every nibble, -8 included, which comfy-kitchen reads but does not write."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8, generator=generator)
    marker = {"format": "convrot_w4a4", "convrot_groupsize": convrot}
    scale = torch.rand(shape[0], generator=generator) + 0.01
    return of_codes("TensorCoreConvRotW4A4Layout", codes, marker, shape, scale=scale, convrot_groupsize=convrot)


def random_w4a8(shape: tuple[int, int], bits: int, convrot: int, group: int) -> Written:
    """Every code, every finite e4m3 scale that is not negative: values at the int8 grid's ends, too."""
    n, k = shape
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(-128, 128, (n, k * bits // 8), dtype=torch.int8, generator=generator)
    relative = torch.randint(0, 127, (n, k // group), dtype=torch.uint8, generator=generator)
    codebook = torch.randn(16, generator=generator) if bits == 4 else None
    marker = {"format": "asym_w4a8_int8", "group_size": group, "convrot_groupsize": convrot}
    return of_codes(
        "AsymW4A8Int8Layout", codes, marker, shape, scale=relative.view(torch.float8_e4m3fn),
        s_channel=torch.rand(n, generator=generator) + 0.01, codebook=codebook, group_size=group,
        convrot_groupsize=convrot,
    )  # fmt: skip


def table(values: torch.Tensor) -> Written:
    """asym_w4a8_int8 in groups wide enough for a table."""
    return w4a8(values, 64, 64)


def six(values: torch.Tensor) -> Written:
    """asym_w4a8_int8 with 6 bits."""
    return w4a8(values, bits=6)


MAKERS = pytest.mark.parametrize("make", [w4a4, w4a8, six, table, awq], ids=["w4a4", "w4a8", "w6a8", "table", "awq"])


def assert_but_for_the_last_bit(written: Written) -> None:
    """Few rows, and rotations of 4: torch sums in another order for SDNQ's matrix, which lies otherwise in memory."""
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-3)):
        got, expected = decoded(written.codes(), written.shape, dtype), written.value(dtype)
        assert torch.linalg.norm((got - expected).double()) <= bound * torch.linalg.norm(expected.double())


def nbytes(written: Written, **options: Any) -> int:
    """What the codes of a layer hold."""
    codes = written.codes(**options)
    held = (codes.weight, codes.scale, codes.scale_2, codes.zero_point, codes.input_scale)
    return sum(tensor.nbytes for tensor in held if tensor is not None)


# convrot_w4a4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "convrot"), [((30, 64), 64), ((30, 64), 16), ((256, 256), 256), ((130, 768), 256)], ids=str
)
def test_w4a4(shape: tuple[int, int], convrot: int, dtype: torch.dtype) -> None:
    assert_exact(w4a4(weight(shape), convrot), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 160), (7, 32)], ids=str)
def test_w4a4_of_any_nibble(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_exact(random_w4a4(shape, 16), dtype)


@pytest.mark.parametrize(("shape", "convrot"), [((1, 64), 64), ((1, 256), 256), ((7, 64), 64), ((96, 64), 4)], ids=str)
def test_w4a4_sums_in_another_order(shape: tuple[int, int], convrot: int) -> None:
    assert_but_for_the_last_bit(w4a4(weight(shape), convrot))


def test_w4a4_rotates_by_256_where_nothing_is_said() -> None:
    written = w4a4(weight((30, 256)), 256)
    assert torch.equal(
        decoded(replace(written, marker={"format": "convrot_w4a4"}).codes(), written.shape, torch.float32),
        written.value(torch.float32),
    )
    with pytest.raises(FormatError, match="256 does not divide its 64 columns"):
        replace(w4a4(weight((30, 64))), marker={"format": "convrot_w4a4"}).codes()


@pytest.mark.parametrize("linear_dtype", ["int4", "int8"])
def test_w4a4_linear_dtype_does_not_touch_the_codes(linear_dtype: str) -> None:
    assert_exact(w4a4(weight((30, 64)), linear_dtype=linear_dtype), torch.float32)


@pytest.mark.parametrize("linear_dtype", ["fp8", "INT4", "", None, 4, ["int4"]], ids=str)
def test_w4a4_other_linear_dtypes_are_refused(linear_dtype: object) -> None:
    with pytest.raises(FormatError, match="its linear_dtype is"):
        w4a4(weight((30, 64)), linear_dtype=linear_dtype).codes()


# asym_w4a8_int8


W4A8 = {
    "plain": {},
    "uniform": {"codebook": False},
    "six": {"bits": 6},
    "six, fp32 scales": {"bits": 6, "scale_dtype": torch.float32},
    "fp32 scales": {"scale_dtype": torch.float32},
    "narrow groups": {"group": 8},
    "table": {"group": 64},
    "uniform table": {"group": 64, "codebook": False},
    "table, fp32 scales": {"group": 64, "scale_dtype": torch.float32},
}


@pytest.mark.parametrize("options", W4A8.values(), ids=W4A8)
@pytest.mark.parametrize("shape", [(30, 64), (256, 256), (130, 768)], ids=str)
def test_w4a8(shape: tuple[int, int], options: Mapping[str, Any]) -> None:
    written = w4a8(weight(shape), 256 if shape[1] % 256 == 0 else 64, **options)
    for dtype in DTYPES:
        assert_exact(written, dtype)
    indexed = options.get("group", 16) == 64 and shape[1] > 64
    assert written.codes().form.weights_dtype == ("uint4" if indexed else "int8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize(
    ("shape", "group"), [((96, 160), 16), ((7, 32), 16), ((33, 384), 128), ((5, 192), 96)], ids=str
)
def test_w4a8_of_any_code(shape: tuple[int, int], group: int, bits: int, dtype: torch.dtype) -> None:
    assert_exact(random_w4a8(shape, bits, 16, group), dtype)


@pytest.mark.parametrize("options", [{}, {"bits": 6}, {"group": 64}], ids=str)
@pytest.mark.parametrize(("shape", "convrot"), [((1, 64), 64), ((1, 256), 256), ((7, 64), 64), ((96, 256), 4)], ids=str)
def test_w4a8_sums_in_another_order(shape: tuple[int, int], convrot: int, options: Mapping[str, Any]) -> None:
    assert_but_for_the_last_bit(w4a8(weight(shape), convrot, **options))


@pytest.mark.parametrize("group", [16, 64])
def test_w4a8_scales_as_bytes(group: int) -> None:
    """e4m3 codes stored as U8 are read as codes, not as numbers."""
    written = w4a8(weight((30, 256)), group=group)
    scale = written.tensors["weight_s_rel"].view(torch.uint8)
    respelled = replace(written, tensors={**written.tensors, "weight_s_rel": scale})
    assert torch.equal(decoded(respelled.codes(), written.shape, torch.float32), written.value(torch.float32))


@pytest.mark.parametrize("options", [{}, {"bits": 6}, {"group": 64}, {"codebook": False}], ids=str)
def test_w4a8_groups_of_zeros(options: Mapping[str, Any]) -> None:
    """Their s_rel may be zero."""
    values = weight((30, 256))
    values[3:9, :128] = 0
    values[11] = 0
    assert_exact(w4a8(values, **options), torch.float32)


@pytest.mark.parametrize("group", [16, 64])
def test_w4a8_corrections_are_not_read(group: int) -> None:
    """As in ComfyUI: the value is that of the codes alone."""
    written = w4a8(weight((30, 256)), group=group, symmetric=False)
    assert "weight_correction" in written.tensors
    params = replace(written.reference._params, correction=None)
    alone = QuantizedTensor(written.reference._qdata, written.reference._layout_cls, params)
    assert_exact(replace(written, reference=alone), torch.float32)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (32, "64 bytes a row, which is neither 4 nor 6 bits for the 256 columns of 8 groups of its group_size 32"),
        (8, "for the 64 columns of 8 groups of its group_size 8"),
        (7, "for the 56 columns of 8 groups of its group_size 7"),
        (10**30, "neither 4 nor 6 bits"),
        (0, "not a positive number"),
        ("16", "not a positive number"),
    ],
    ids=str,
)
def test_w4a8_group_sizes_that_do_not_fit(group: object, message: str) -> None:
    written = w4a8(weight((30, 128)))
    with pytest.raises(FormatError, match=message):
        replace(written, marker={**written.marker, "group_size": group}).codes(meta=True)


@pytest.mark.parametrize(
    ("width", "groups", "group", "message"),
    [
        (24, 2, 24, "its group_size 24 is none that 4-bit codes come in"),
        (24, 16, 3, "its group_size 3 is none that 4-bit codes come in"),
        (48, 8, 8, "its group_size 8 is none that 6-bit codes come in"),
        (12, 6, 4, "its 4-bit codes have 24 columns, which is no multiple of 16"),
        (36, 3, 16, "its 6-bit codes have 48 columns, which is no multiple of 32"),
        (0, 0, 16, "neither 4 nor 6 bits"),
    ],
)
def test_w4a8_packings_that_are_none(width: int, groups: int, group: int, message: str) -> None:
    """What comfy-kitchen refuses is refused by name."""
    marker = {"group_size": group, "convrot_groupsize": 4}
    with pytest.raises(FormatError, match=message):
        planned("asym_w4a8_int8", marker, shapes("asym_w4a8_int8", (5, width), (5, groups)))


def test_w4a8_with_six_bits_has_no_codebook() -> None:
    written = six(weight((30, 64)))
    with_one = replace(written, tensors={**written.tensors, "weight_codebook": torch.randn(16)})
    with pytest.raises(FormatError, match="its codes have 6 bits"):
        with_one.codes(meta=True)


# awq_w4a16


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "group"),
    [((96, 160), 32), ((30, 64), 64), ((7, 32), 8), ((256, 256), 64), ((130, 768), 128), ((1, 64), 16)],
    ids=str,
)  # fmt: skip
def test_awq_in_fp32(shape: tuple[int, int], group: int, stored: torch.dtype) -> None:
    assert_exact(awq(weight(shape), group, stored), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "group"), [((96, 160), 32), ((256, 256), 64), ((1, 64), 64)], ids=str)
def test_awq_is_rounded_once(shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    """Each value at least as near to the exact one as the reference's, which rounds the product first."""
    written = awq(weight(shape), group, dtype)
    codes = torch.stack([written.tensors["weight"] & 15, written.tensors["weight"] >> 4 & 15], -1).view(shape)
    scale, zeros = (
        written.tensors[role].double().t().repeat_interleave(group, 1) for role in ("weight_scale", "weight_zeros")
    )
    exact = (codes.double() - 8) * scale + zeros
    got, reference = decoded(written.codes(), shape, dtype), written.value(dtype)
    assert torch.equal(got, exact.float().to(dtype))
    assert ((got.double() - exact).abs() <= (reference.double() - exact).abs()).all()
    assert not torch.equal(got, reference)
    layer, x = layer_of(written, dtype), torch.randn(5, shape[1]).to(dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, got, layer.bias))


def test_awq_zeros_may_be_any_number() -> None:
    """Negative, zero, and so small that z - 8 s rounds, which is the last bit of 8 s."""
    written = awq(weight((30, 128)), 32)
    zeros = written.tensors["weight_zeros"].clone()
    zeros[:2] = torch.tensor([[0.0], [-3.0]])
    assert_exact(with_tensor(written, "weight_zeros", zeros), torch.float32)
    tiny = with_tensor(written, "weight_zeros", written.tensors["weight_scale"] * 2.0**-20)
    difference = (decoded(tiny.codes(), (30, 128), torch.float32) - tiny.value(torch.float32)).abs()
    assert difference.max() <= 2**-23 * 8 * written.tensors["weight_scale"].max()


def test_awq_with_one_group_a_row() -> None:
    """As SDNQ holds it, without a dimension for the groups, so that it loads again."""
    codes = awq(weight((30, 64)), 64).codes()
    assert (codes.form.group_size, codes.scale.shape) == (-1, (30, 1))


def test_awq_groups_of_one_value() -> None:
    """Their scale may be zero."""
    written = awq(weight((30, 128)), 32)
    scale = written.tensors["weight_scale"].clone()
    scale[1] = 0
    assert_exact(with_tensor(written, "weight_scale", scale), torch.float32)


def test_awq_has_groups_of_64_where_nothing_is_said() -> None:
    written = replace(awq(weight((30, 128)), 64), marker={"format": "awq_w4a16"})
    assert_exact(written, torch.float32)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (48, "its group_size 48 does not divide its 128 columns"),
        (256, "its group_size 256 does not divide its 128 columns"),
        (64, r"its weight_scale has shape \[4, 30\], its group_size asks for \[2, 30\]"),
        (-32, "not a positive number"),
        (32.0, "not a positive number"),
    ],
)
def test_awq_group_sizes_that_do_not_fit(group: object, message: str) -> None:
    written = awq(weight((30, 128)), 32)
    with pytest.raises(FormatError, match=message):
        replace(written, marker={**written.marker, "group_size": group}).codes(meta=True)


# all of them


def with_tensor(written: Written, role: str, tensor: torch.Tensor) -> Written:
    """The layer with another tensor, in the reference as well."""
    place = {"weight_scale": "scale", "weight_zeros": "zeros"}[role]
    params = replace(written.reference._params, **{place: tensor})
    reference = QuantizedTensor(written.reference._qdata, written.reference._layout_cls, params)
    return Written({**written.tensors, role: tensor}, written.marker, reference)


@MAKERS
def test_rows_and_joins(make: Make) -> None:
    """Cut by rows and joined in another order: what dequantizing first would give."""
    one, two = make(weight((64, 128), 1)), make(weight((32, 128), 2))
    joined = join([two.codes(8, 24), one.codes(0, 10), two.codes(24, 25)])
    expected = torch.cat(
        [two.value(torch.float32)[8:24], one.value(torch.float32)[:10], two.value(torch.float32)[24:25]]
    )
    shape = (27, 128)
    assert torch.equal(decoded(joined, shape, torch.float32), expected)
    for cut in ((0, 64), (63, 64), (5, 6)):
        got = decoded(one.codes(*cut), (cut[1] - cut[0], 128), torch.bfloat16)
        assert torch.allclose(got.float(), one.value(torch.float32)[slice(*cut)], rtol=0.05, atol=0.02)


def test_join_of_different_forms_is_refused() -> None:
    values = weight((8, 128))
    for other in (w4a8(values, 64), table(values), awq(values), w4a4(values, 16)):
        with pytest.raises(FormatError, match="differently"):
            join([w4a4(values).codes(), other.codes()])


@MAKERS
def test_meta_codes_have_the_real_size(make: Make) -> None:
    """What a plan predicts is what a build makes."""
    written = make(weight((96, 256)))
    planned_codes, real = written.codes(10, 60, meta=True), written.codes(10, 60)
    assert planned_codes.form == real.form
    for name in ("weight", "scale", "scale_2", "zero_point", "input_scale"):
        one, other = getattr(planned_codes, name), getattr(real, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (lambda w: w4a4(w, 256), 0.5 + 4 / 768),
        (lambda w: w4a8(w, 256), 1 + 4 / 768),
        (lambda w: w4a8(w, 256, bits=6), 1 + 4 / 768),
        (lambda w: w4a8(w, 256, 64), 0.5 + 16 / 64 + 4 / 768),
        (lambda w: w4a8(w, 256, 128), 0.5 + 16 / 128 + 4 / 768),
        (lambda w: awq(w, 64), 0.5 + 6 / 64),
    ],
    ids=["w4a4", "w4a8", "w6a8", "table 64", "table 128", "awq"],
)
def test_bytes_a_weight(written: Make, expected: float) -> None:
    layer = written(weight((130, 768)))
    assert nbytes(layer) / (130 * 768) == expected
    assert nbytes(layer, meta=True) == nbytes(layer)


@pytest.mark.parametrize(
    ("make", "limit"), [(w4a4, 0.02), (w4a8, 0.02), (six, 0.02), (table, 0.02), (awq, 0.02)],
    ids=["w4a4", "w4a8", "w6a8", "table", "awq"],
)  # fmt: skip
def test_quantized_matmul(make: Make, limit: float) -> None:
    """The layer computes with int8 activations: near to the exact product, exact for few tokens."""
    written = make(weight((64, 256)))
    layer = layer_of(written, torch.float32, Compute(quantized_matmul="auto"))
    assert layer.sdnq_dequantizer.use_quantized_matmul
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, written.value(torch.float32), layer.bias)
        error = torch.linalg.norm(layer(x) - expected) / torch.linalg.norm(expected)
        few = torch.nn.functional.linear(x[:4], written.value(torch.float32), layer.bias)
        assert torch.allclose(layer(x[:4]), few, atol=1e-4)
    assert 0 < error < limit


SCALES = [(w4a4, "weight_scale"), (w4a8, "weight_s_channel"), (w4a8, "weight_s_rel"), (awq, "weight_scale"),
          (w4a8, "weight_codebook"), (awq, "weight_zeros")]  # fmt: skip
ZERO_IS_FINE = {"weight_s_rel", "weight_codebook", "weight_zeros"}
SIGN_IS_FINE = {"weight_codebook", "weight_zeros"}


@pytest.mark.parametrize(
    ("value", "word"), [("nan", "NaN"), ("inf", "infinity"), ("-inf", "infinity"), ("0", "zero"), ("-1", "neg")]
)
@pytest.mark.parametrize(("make", "role"), SCALES, ids=[role for _, role in SCALES])
def test_scales_that_cannot_be(make: Make, role: str, value: str, word: str) -> None:
    written = make(weight((30, 128)))
    scale = written.tensors[role].float()
    scale.view(-1)[7] = float(value)
    changed = replace(written, tensors={**written.tensors, role: scale})
    fine = (word == "zero" and (role in ZERO_IS_FINE or make is awq)) or (word == "neg" and role in SIGN_IS_FINE)
    if fine:
        assert decoded(changed.codes(), (30, 128), torch.float32).isfinite().all()
        return
    with pytest.raises(FormatError, match=f"its {role} holds .*{word}"):
        changed.codes()


def test_scales_of_other_rows_are_not_looked_at() -> None:
    """A part is judged by its own rows."""
    for make, role in SCALES[:4]:
        written = make(weight((30, 128)))
        scale = written.tensors[role].float()
        scale.select(1 if make is awq else 0, 29).fill_(float("nan"))
        assert len(replace(written, tensors={**written.tensors, role: scale}).codes(0, 29).weight) == 29


@MAKERS
def test_missing_and_foreign_tensors(make: Make) -> None:
    written = make(weight((30, 128)))
    for role in formats()[str(written.marker["format"])].needs:
        rest = {name: tensor for name, tensor in written.tensors.items() if name != role}
        with pytest.raises(FormatError, match=f"it lacks {role}"):
            replace(written, tensors=rest).codes(meta=True)
    with pytest.raises(FormatError, match="has no use for its weight_scale_2"):
        replace(written, tensors={**written.tensors, "weight_scale_2": torch.ones(())}).codes(meta=True)
    replace(written, tensors={**written.tensors, "input_scale": torch.ones(())}).codes(meta=True)


@pytest.mark.parametrize("bad", [(), (31,), (1, 30), (29, 2), (30, 1, 1), (0,)], ids=str)
@pytest.mark.parametrize(
    ("make", "role"), [*SCALES[:4], (w4a8, "weight_codebook")], ids=lambda value: getattr(value, "__name__", value)
)
def test_shapes_that_are_none(make: Make, role: str, bad: tuple[int, ...]) -> None:
    written = make(weight((30, 128)))
    with pytest.raises(FormatError, match=f"its {role} has shape"):
        replace(written, tensors={**written.tensors, role: torch.ones(bad)}).codes(meta=True)


@pytest.mark.parametrize(("make", "role"), SCALES, ids=[role for _, role in SCALES])
def test_dtypes_that_are_none(make: Make, role: str) -> None:
    written = make(weight((30, 128)))
    stored = written.tensors[role].float().to(torch.float8_e5m2)
    with pytest.raises(FormatError, match=f"its {role} is stored as float8_e5m2; known are"):
        replace(written, tensors={**written.tensors, role: stored}).codes(meta=True)


@MAKERS
def test_weights_that_are_no_matrix_of_bytes(make: Make) -> None:
    written = make(weight((30, 128)))
    stored = written.tensors["weight"]
    with pytest.raises(FormatError, match="only matrices are supported"):
        logical = replace(written, tensors={**written.tensors, "weight": stored.flatten()}).layer()
        formats()[logical.format].logical_shape(logical)
    with pytest.raises(FormatError, match=f"declared as {written.marker['format']} but stored as BF16, not I8"):
        replace(written, tensors={**written.tensors, "weight": stored.bfloat16()}).codes(meta=True)


@pytest.mark.parametrize(
    "name", ["int8_blockwise", "float8_blockwise", "float8_e4m3fn_blockwise", "svdquant_w4a4", "float9_made_up"]
)
def test_formats_without_a_definition_are_refused_by_name(name: str) -> None:
    layer = QuantizedLayer("layer", name, {}, "markers", {"weight": TensorInfo("weight", "I8", (8, 8), 0, 64)})
    with pytest.raises(LayerError, match=f"{name}' is not one of int8_tensorwise, .*awq_w4a16"):
        logical_shape(layer)


# properties


def nibble_rows(low: int, high: int) -> st.SearchStrategy[list[list[int]]]:
    """Rows of 16 or 32 codes."""
    return st.sampled_from([16, 32]).flatmap(
        lambda k: st.lists(st.lists(st.integers(low, high), min_size=k, max_size=k), min_size=1, max_size=4)
    )


def packed_by_hand(rows: list[list[int]], first_is_low: bool) -> torch.Tensor:
    """Two codes a byte, in either order."""
    packed = [[(row[c] & 15) << (0 if first_is_low else 4) | (row[c + 1] & 15) << (4 if first_is_low else 0)
               for c in range(0, len(row), 2)] for row in rows]  # fmt: skip
    return torch.tensor(packed, dtype=torch.uint8).view(torch.int8)


def in_order(rows: list[list[int]], first_is_low: bool) -> torch.Tensor:
    """The codes as read with the even column in the low nibble."""
    return torch.tensor(rows if first_is_low else [[row[c ^ 1] for c in range(len(row))] for row in rows])


@settings(deadline=None)
@given(nibble_rows(-8, 7), st.booleans())
def test_signed_nibbles(rows: list[list[int]], first_is_low: bool) -> None:
    """Two's complement as stored is SDNQ's offset binary, column by column."""
    from sdnq.packed_int import unpack_int

    shape = (len(rows), len(rows[0]))
    marker = {"format": "convrot_w4a4", "convrot_groupsize": 16}
    written = of_codes(
        "TensorCoreConvRotW4A4Layout", packed_by_hand(rows, first_is_low), marker, shape, scale=torch.ones(shape[0])
    )
    held = unpack_int(written.codes().weight.flatten(), "int4", torch.Size(shape), dtype=torch.int8)
    assert torch.equal(held.long(), in_order(rows, first_is_low))


@settings(deadline=None)
@given(nibble_rows(0, 15), st.booleans())
def test_unsigned_nibbles(rows: list[list[int]], first_is_low: bool) -> None:
    """With scale 1 and zero 8, awq's values are its codes."""
    shape, ones = (len(rows), len(rows[0])), torch.ones(len(rows[0]) // 8, len(rows), dtype=torch.bfloat16)
    written = of_codes(
        "TensorCoreAWQW4A16Layout", packed_by_hand(rows, first_is_low), {"format": "awq_w4a16", "group_size": 8},
        shape, scale=ones, zeros=8 * ones, group_size=8,
    )  # fmt: skip
    assert torch.equal(decoded(written.codes(), shape, torch.float32).long(), in_order(rows, first_is_low))


@settings(deadline=None)
@given(nibble_rows(0, 15), st.booleans(), st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16))
def test_nibbles_of_a_codebook(rows: list[list[int]], first_is_low: bool, codebook: list[float]) -> None:
    levels, (n, k) = torch.tensor(codebook), (len(rows), len(rows[0]))
    data = packed_by_hand(rows, first_is_low).view(torch.uint8)
    got = decode(data, torch.full((n, k // 16), 100.0), levels, Packing(k, 4, 16))
    assert torch.equal(got, (levels[in_order(rows, first_is_low)] * 100).round().to(torch.int8))


@settings(deadline=None)
@given(nibble_rows(0, 63), st.sampled_from([0.25, 1.0, 4.0, 5.0]))
def test_six_bits(rows: list[list[int]], scale: float) -> None:
    """A plane of low nibbles, then one of the upper two bits, four columns a byte; values saturate at 127."""
    n, k = len(rows), len(rows[0])
    stored = [bytearray(k * 3 // 4) for _ in rows]
    for row, data in zip(rows, stored, strict=True):
        for c, code in enumerate(row):
            data[c // 2] |= (code & 15) << 4 * (c % 2)
            data[k // 2 + c // 4] |= (code >> 4) << 2 * (c % 4)
    data = torch.tensor([list(row) for row in stored], dtype=torch.uint8)
    got = decode(data, torch.full((n, k // 16), scale), None, Packing(k, 6, 16))
    expected = [[max(-127, min(127, round((code - 32) * scale))) for code in row] for row in rows]
    assert got.tolist() == expected


def shapes(name: str, *given_shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a format's tensors in their order; [N] for those that are not given."""
    roles = ("weight", *formats()[name].needs)
    return {role: given_shapes[i] if i < len(given_shapes) else given_shapes[0][:1] for i, role in enumerate(roles)}


def planned(
    name: str,
    marker: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> tuple[int, int]:
    """Plan a layer of these shapes, as a load plans it; its logical shape."""
    held = {"weight": torch.int8, **(dtypes or {})}
    tensors = {
        role: torch.empty(size, dtype=held.get(role, torch.float32), device="meta") for role, size in sizes.items()
    }
    infos = {
        role: TensorInfo(role, SAFETENSORS[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for role, tensor in tensors.items()
    }
    layer = QuantizedLayer("layer", name, marker, "markers", infos)
    check_layer(layer, formats()[name])
    shape = formats()[name].logical_shape(layer)

    def read(role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return tensors[role][start:stop] if tensors[role].ndim else tensors[role]

    codes = formats()[name].adopt(layer, read, Rows(0, shape[0], shape), Portable())
    assert len(codes.weight) == shape[0]
    return shape


NAMES = st.sampled_from(["convrot_w4a4", "asym_w4a8_int8", "awq_w4a16"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([4, 16, 64, 256]) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
KEYS = ("convrot_groupsize", "group_size", "linear_dtype", "convrot", "params", "num_bits")
MARKERS = st.dictionaries(st.sampled_from(KEYS), ANYTHING)
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 8, 12, 16, 24, 32, 64]), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(NAMES, MARKERS)
def test_fuzzed_markers(name: str, marker: Mapping[str, Any]) -> None:
    """Refused as FormatError, or read as the right shape."""
    scales = {"convrot_w4a4": (), "asym_w4a8_int8": ((16, 16),), "awq_w4a16": ((4, 16), (4, 16))}
    try:
        assert planned(name, marker, shapes(name, (16, 128), *scales[name])) == (16, 256)
    except FormatError as error:
        assert str(error).startswith("its ")


@settings(max_examples=300, deadline=None)
@given(NAMES, MARKERS, SIZES, SIZES, SIZES, st.sampled_from(list(SAFETENSORS)), st.booleans())
def test_fuzzed_tensors(
    name: str, marker: Mapping[str, Any], one: tuple[int, ...], two: tuple[int, ...], three: tuple[int, ...],
    dtype: torch.dtype, codebook: bool,
) -> None:  # fmt: skip
    """Any shapes and dtypes: FormatError or a plan."""
    roles = ("weight", *formats()[name].needs)
    sizes = dict(zip(roles, (one, two, three), strict=False))
    if codebook:
        sizes["weight_codebook"] = three
    try:
        planned(name, marker, sizes, {"weight_scale": dtype, "weight_s_rel": dtype, "weight_codebook": dtype})
    except FormatError as error:
        assert str(error)


# compiled


COMPILED = {"w4a4": w4a4, "w4a8": w4a8, "table": table, "awq": awq}


def differing_compiled_values() -> list[str]:
    """Names of forms whose compiled values differ from the uncompiled ones; for a process that compiles."""
    found = []
    for name, make in COMPILED.items():
        written = make(weight((32, 128)))
        layer = layer_of(written, torch.bfloat16, Compute(compiled=True))
        state = {key: getattr(layer, key) for key in ("weight", "scale", "scale_2", "zero_point")}
        if not torch.equal(layer.sdnq_dequantizer(**state), decoded(written.codes(), (32, 128), torch.bfloat16)):
            found.append(name)
    return found


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))), reason="no C++ compiler")
def test_compiled_values() -> None:
    """Compiled dequantization, which a process chooses once."""
    script = (
        "import sdnq.common, test_formats_4bit as tests; assert sdnq.common.use_torch_compile; "
        "print('differing:', tests.differing_compiled_values())"
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent / "modules")])
    environment = {**os.environ, "SDNQ_USE_TORCH_COMPILE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "differing: []" in done.stdout
