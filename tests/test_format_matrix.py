"""Every format × every way to declare it × every kind of shape, through a file: worth what comfy-kitchen says.

One layer a file, written by comfy-kitchen. Weight and forward equal its eager code bit for bit in fp32, and in bf16
wherever the reference rounds once. Where it does not, ours is the exact value rounded once. The exceptions are data:
`rounds_once` and `rotated` below.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor

from kitchen import Written, float8, float8_by_rows, int8
from test_formats import weight
from test_formats_4bit import awq, random_w4a4, random_w4a8, w4a4, w4a8
from test_formats_blocks import mxfp8, noise_like, nvfp4
from test_quantized_files import as_header, marker
from tiny_models import save
from transplant.checkpoint.header import read_header
from transplant.checkpoint.naming import normalise
from transplant.checkpoint.reader import open_reader
from transplant.formats.base import Codes, Portable
from transplant.formats.containers import Quantization, read_quantization
from transplant.quantized import codes_of
from transplant.recipe import RowRange, Rows, evaluate
from transplant.sdnq_bridge import Compute, decoded, quantized_layer

Shape = tuple[int, int]

PREFIX, NAME = "model.diffusion_model.", "blocks.0.proj"
SHAPES: dict[str, Shape] = {
    "odd": (7, 33),
    "odd rows": (7, 32),
    "padded": (30, 40),
    "padded to a tile": (130, 768),
    "one row": (1, 256),
    "square": (256, 256),
}
REAL: tuple[Shape, ...] = ((3840, 3840), (10240, 3840))


@dataclass(frozen=True)
class Kind:
    """A format with the parameters that matter.

    Attributes:
        of_values: quantizes values with comfy-kitchen.
        real: a layer of a real width; random codes where comfy-kitchen would need a minute to quantize it.
        columns: K is a multiple of it.
        least: the smallest K.
        rounds_once: in bf16 the reference rounds scale and product, or product and sum, ours only the result.
        rotated: one row is summed in another order.
        fp8: may be declared by a scale alone.
    """

    of_values: Callable[[torch.Tensor], Written]
    real: Callable[[Shape], Written]
    columns: int = 1
    least: int = 1
    rounds_once: bool = False
    rotated: bool = False
    fp8: bool = False


def rotation(values: torch.Tensor) -> int:
    """The usual size where it divides, else 16."""
    return 256 if values.shape[1] % 256 == 0 else 16


def group(values: torch.Tensor) -> int:
    """awq's usual group size where it divides, else 8."""
    return 64 if values.shape[1] % 64 == 0 else 8


def quantized(of_values: Callable[[torch.Tensor], Written]) -> dict[str, Any]:
    """A kind whose real widths are quantized too."""
    return {"of_values": of_values, "real": lambda shape: of_values(weight(shape))}


def noisy(of_values: Callable[[torch.Tensor], Written]) -> dict[str, Any]:
    """A kind whose real widths are random bytes."""
    return {"of_values": of_values, "real": lambda shape: noise_like(of_values(torch.ones(16, 16)), shape)}


KINDS: dict[str, Kind] = {
    "int8 a row": Kind(**quantized(int8)),
    "int8 one scale": Kind(**quantized(lambda values: int8(values, per_row=False))),
    "int8 convrot": Kind(
        **quantized(lambda values: int8(values, convrot=rotation(values))), columns=16, rotated=True,
    ),
    "float8_e4m3fn": Kind(**quantized(float8), rounds_once=True, fp8=True),
    "float8_e4m3fn a row": Kind(**quantized(float8_by_rows), rounds_once=True, fp8=True),
    "float8_e5m2": Kind(
        **quantized(lambda values: float8(values, torch.float8_e5m2)), rounds_once=True, fp8=True
    ),
    "nvfp4": Kind(**noisy(nvfp4), columns=2, rounds_once=True),
    "mxfp8": Kind(**noisy(mxfp8)),
    "convrot_w4a4": Kind(
        lambda values: w4a4(values, rotation(values)) if values.shape[1] % 64 == 0 else
        random_w4a4((values.shape[0], values.shape[1]), 16),
        lambda shape: random_w4a4(shape, 256), columns=16, rotated=True,
    ),
    "asym_w4a8_int8, 4 bits": Kind(
        lambda values: w4a8(values, rotation(values)), lambda shape: random_w4a8(shape, 4, 256, 16),
        columns=16, rotated=True,
    ),
    "asym_w4a8_int8, 6 bits": Kind(
        lambda values: w4a8(values, rotation(values), bits=6), lambda shape: random_w4a8(shape, 6, 256, 16),
        columns=32, rotated=True,
    ),
    "asym_w4a8_int8, table": Kind(
        lambda values: w4a8(values, rotation(values), 64), lambda shape: random_w4a8(shape, 4, 256, 128),
        columns=64, least=128, rotated=True,
    ),
    "awq_w4a16": Kind(**quantized(lambda values: awq(values, group(values))), columns=8, rounds_once=True),
}  # fmt: skip
DEFAULTS = {"convrot": False, "convrot_groupsize": 256, "group_size": {"asym_w4a8_int8": 16, "awq_w4a16": 64}}


@functools.cache
def written(kind: str, shape: Shape) -> Written:
    """A layer, made once."""
    made = KINDS[kind].of_values(weight(shape))
    assert made.shape == shape
    return made


# How it is declared


def in_markers(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A `.comfy_quant` tensor."""
    return layer.stored(NAME), {}


def in_header(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """An object in the header, under the tensors' whole name."""
    stored = layer.stored(NAME)
    return stored, as_header(stored, PREFIX)


def in_header_as_a_string(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The format's name alone, under the layer's own name without version: every other entry is the default."""
    stored = layer.stored(NAME)
    layers = json.loads(as_header(stored, "", bare_strings=True)["_quantization_metadata"])["layers"]
    return stored, {"_quantization_metadata": json.dumps({"layers": layers})}


def in_both(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The header, and a marker that says something else, which does not count."""
    stored = layer.stored(NAME)
    metadata = as_header(stored, PREFIX)
    other = "float8_e5m2" if layer.marker["format"] != "float8_e5m2" else "nvfp4"
    text = json.dumps({"format": other, "group_size": 24, "convrot": True, "convrot_groupsize": 4})
    return {**stored, f"{NAME}.comfy_quant": marker(text.encode())}, metadata


def as_legacy(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """`scale_weight`, `scale_input` and the file's `scaled_fp8` flag, whose dtype means nothing."""
    stored = {name.replace("weight_scale", "scale_weight"): t for name, t in layer.stored(NAME, marker=False).items()}
    flag = torch.empty(0, dtype=torch.float8_e4m3fn)
    return {**stored, f"{NAME}.scale_input": torch.tensor(0.5), "scaled_fp8": flag}, {}


def as_bare(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A `weight_scale` and nothing that declares it."""
    return layer.stored(NAME, marker=False), {}


def as_raw(layer: Written) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Not even a scale: the codes are values."""
    return {f"{NAME}.weight": layer.tensors["weight"]}, {}


@dataclass(frozen=True)
class Container:
    """A way to declare a layer, and what the plan calls it."""

    write: Callable[[Written], tuple[dict[str, torch.Tensor], dict[str, str]]]
    source: str


CONTAINERS: dict[str, Container] = {
    "markers": Container(in_markers, "markers"),
    "header": Container(in_header, "header"),
    "string in the header": Container(in_header_as_a_string, "header"),
    "header and other markers": Container(in_both, "header and markers"),
    "legacy": Container(as_legacy, "legacy"),
    "bare scale": Container(as_bare, "scales"),
    "raw": Container(as_raw, ""),
}


def is_said_by_its_name(layer: Written) -> bool:
    """Whether a format's name alone says all that the layer's declaration says."""
    said = dict(layer.marker)
    name = str(said.pop("format"))
    if name == "asym_w4a8_int8":
        said.pop("convrot")  # comfy-kitchen writes it, nobody reads it
    usual = {key: value[name] if isinstance(value, dict) else value for key, value in DEFAULTS.items() if key in said}
    return all(said[key] == usual[key] for key in said)


def is_possible(kind: str, container: str, shape: Shape) -> bool:
    """Whether there is such a layer, and whether it can be declared so."""
    told, k = KINDS[kind], shape[1]
    if k % told.columns or k < told.least:
        return False
    if container in ("legacy", "bare scale", "raw"):
        return told.fp8
    return container != "string in the header" or is_said_by_its_name(written(kind, shape))


CASES = [
    pytest.param(kind, container, shape, id=f"{kind}-{container}-{name}")
    for kind, container, (name, shape) in itertools.product(KINDS, CONTAINERS, SHAPES.items())
    if is_possible(kind, container, shape)
]


# What is compared


def load(layer: Written, container: str, file: Path) -> tuple[Quantization, Codes | torch.Tensor]:
    """Write a file, read its declarations, and adopt the layer; raw codes as the values that they are."""
    stored, metadata = CONTAINERS[container].write(layer)
    tensors = {name if name == "scaled_fp8" else PREFIX + name: tensor for name, tensor in stored.items()}
    header = read_header(save(file, tensors, metadata or None))
    quantization = read_quantization(header, normalise(file, header.tensors))
    weight_name = f"{PREFIX}{NAME}.weight"
    recipe = Rows((RowRange(weight_name, 0, layer.tensors["weight"].shape[0]),))
    with open_reader(header, use_mmap=False) as reader:
        if not quantization.layers:
            return quantization, evaluate(recipe, lambda part: reader.read(header.tensors[part.source]))
        layers = {weight_name: quantization.layers[NAME]}
        return quantization, codes_of(recipe, layer.shape, layers, reader.read, Portable())


def without_scale(layer: Written) -> Written:
    """What raw fp8 is worth: its codes with the scale one."""
    params = replace(layer.reference._params, scale=torch.ones(()))
    return replace(layer, reference=QuantizedTensor(layer.reference._qdata, layer.reference._layout_cls, params))


def check(kind: str, layer: Written, found: Codes | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight is worth what comfy-kitchen's eager code says; it is returned."""
    expected, n = layer.value(dtype), layer.shape[0]
    got = decoded(found, layer.shape, dtype) if isinstance(found, Codes) else found.to(dtype)
    assert got.dtype == dtype
    if KINDS[kind].rotated and n == 1:
        bound = 1e-6 if dtype == torch.float32 else 1e-3
        assert (got.double() - expected.double()).norm() <= bound * expected.double().norm()
    elif KINDS[kind].rounds_once and dtype != torch.float32 and isinstance(found, Codes):
        exact = layer.value(torch.float32)
        assert torch.equal(got, exact.to(dtype))
        assert (got - exact).norm() <= (expected - exact).norm() <= 0.01 * exact.norm()
    else:
        assert torch.equal(got, expected)
    return got


def check_forward(found: Codes | torch.Tensor, value: torch.Tensor) -> None:
    """A layer computes with that weight."""
    n, k = value.shape
    layer: torch.nn.Module = torch.nn.Linear(k, n, dtype=value.dtype)
    bias = layer.bias
    if isinstance(found, Codes):
        layer = quantized_layer(layer, found, value.dtype, Compute())
    else:
        layer.weight = torch.nn.Parameter(found.to(value.dtype), requires_grad=False)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(3)).to(value.dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), torch.nn.functional.linear(x, value, bias))


@pytest.mark.parametrize(("kind", "container", "shape"), CASES)
def test_format_in_container(kind: str, container: str, shape: Shape, tmp_path: Path) -> None:
    """fp32 and bf16."""
    layer = written(kind, shape)
    quantization, found = load(layer, container, tmp_path / "x.safetensors")
    assert quantization.source == CONTAINERS[container].source
    assert isinstance(found, Codes) == (container != "raw")
    for dtype in (torch.float32, torch.bfloat16):
        check_forward(found, check(kind, without_scale(layer) if container == "raw" else layer, found, dtype))


@pytest.mark.parametrize("shape", REAL, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_real_widths(kind: str, shape: Shape, tmp_path: Path) -> None:
    """In one container each. Of the larger one the weight alone, in bf16, or in fp32 where bf16 is not exact."""
    layer = KINDS[kind].real(shape)
    _, found = load(layer, "header", tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").unlink()
    if shape == REAL[1]:
        check(kind, layer, found, torch.float32 if KINDS[kind].rounds_once else torch.bfloat16)
        return
    for dtype in (torch.float32, torch.bfloat16):
        check_forward(found, check(kind, layer, found, dtype))


def test_nothing_is_missing() -> None:
    """Every format in every way that it can be declared, and every shape at least in most formats."""
    seen = {(case.values[0], case.values[1]) for case in CASES}
    for kind, told in KINDS.items():
        ways = set(CONTAINERS) if told.fp8 else set(CONTAINERS) - {"legacy", "bare scale", "raw"}
        if kind in ("int8 convrot", "asym_w4a8_int8, table"):
            ways -= {"string in the header"}  # its name alone means another layer
        assert {way for name, way in seen if name == kind} == ways, kind
    for name, shape in SHAPES.items():
        assert sum(is_possible(kind, "markers", shape) for kind in KINDS) >= (4 if name == "odd" else 5), name
