"""Traced converters: what a recipe makes of real tensors is what the converter itself makes of them."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_models import MANIFESTS, manifest
from transplant.checkpoint.naming import normalise
from transplant.recipe import (
    CONVERTER_ERRORS,
    Converter,
    Made,
    Replay,
    RowRange,
    Rows,
    Tensors,
    as_named,
    evaluate,
    ranges_of,
    trace,
)

Real = Mapping[str, torch.Tensor]


def numbered(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Tensors of these shapes in which no value occurs twice."""
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        tensors[name] = torch.arange(start, stop).reshape(tuple(shape)).to(dtype)
        start = stop
    return tensors


def declared(tensors: Real) -> Tensors:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def reader(tensors: Real) -> Callable[[RowRange], torch.Tensor]:
    """Reads rows as the file's readers do: into memory of their own."""

    def read(part: RowRange) -> torch.Tensor:
        tensor = tensors[part.source]
        if tensor.ndim == 0:
            assert (part.start, part.stop) == (0, 1)
            return tensor.clone()
        assert 0 <= part.start <= part.stop <= len(tensor), part
        return tensor[part.start : part.stop].clone()

    return read


def assert_made(made: Mapping[str, Made], direct: Real, tensors: Real) -> None:
    """Every target is there, with shape, dtype and values of what the converter made of the real tensors."""
    assert list(made) == list(direct)
    for name, item in made.items():
        found = evaluate(item.recipe, reader(tensors))
        assert item.shape == tuple(direct[name].shape) == tuple(found.shape), name
        assert item.dtype == direct[name].dtype == found.dtype, name
        assert torch.equal(found, direct[name]), name


def check(converter: Converter, tensors: Real, config: Mapping[str, Any] | None = None) -> dict[str, Made]:
    """Trace a converter, and hold each recipe against the converter itself."""
    made = trace(converter, declared(tensors), config or {})
    assert_made(made, converter(checkpoint=dict(tensors), config=dict(config or {})), tensors)
    return made


def one(function: Callable[..., Any], **tensors: torch.Tensor) -> Made:
    """The recipe of a converter that makes one target, after it was checked."""
    return check(lambda checkpoint, config: {"out": function(**checkpoint)}, tensors)["out"]


def rows_of(function: Callable[..., Any], **tensors: torch.Tensor) -> list[tuple[str, int, int]]:
    recipe = one(function, **tensors).recipe
    assert isinstance(recipe, Rows)
    return [(part.source, part.start, part.stop) for part in recipe.ranges]


A = numbered({"a": (6, 4)})["a"]
B = A[:4] + 100


# --- the converters of diffusers on the headers of real files ---------------------------------------------------------

FLOATS = {"F64", "F32", "F16", "BF16"}
LDM_PREFIX = "model.diffusion_model."


def transformer_of(name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of the transformer's tensors in a manifest, by own name."""
    tensors = manifest(name).tensors
    return {own: tensors[stored] for own, stored in normalise(MANIFESTS / name, tensors).stored.items()}


def converter_of(name: str) -> tuple[Converter, dict[str, Any]]:
    """diffusers' converter for a manifest, and the config that it may read."""
    described = manifest(name).diffusers
    converter = SINGLE_FILE_LOADABLE_CLASSES[described["class"]]["checkpoint_mapping_fn"]
    parameters = inspect.signature(getattr(diffusers, described["class"]).__init__).parameters
    defaults = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}
    if described["class"] != "UNet2DConditionModel":
        return converter, {**defaults, **described["config"]}

    def of_own_names(checkpoint: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        return converter(checkpoint={LDM_PREFIX + key: tensor for key, tensor in checkpoint.items()}, config=config)

    return of_own_names, {**defaults, **described["config"]}


def float_manifests() -> list[str]:
    names = sorted(path.name.removesuffix(".json.gz") for path in MANIFESTS.glob("*.json.gz"))
    return [
        name
        for name in names
        if manifest(name).diffusers.get("class") in SINGLE_FILE_LOADABLE_CLASSES
        and {dtype for dtype, _ in transformer_of(name).values()} <= FLOATS
    ]


FLOAT_MANIFESTS = float_manifests()


def first_blocks(name: str, count: int = 4) -> dict[str, tuple[int, ...]]:
    """Shapes of a few blocks; dimension 0, which some converters know by heart, as it is, the others at most 2."""
    shapes: dict[str, tuple[int, ...]] = {}
    for own, (_, shape) in transformer_of(name).items():
        block = re.search(r"\.(\d+)\.", own)
        if block is None or int(block[1]) < count or "input_blocks" in own or "output_blocks" in own:
            shapes[own] = (*shape[:1], *(min(length, 2) for length in shape[1:]))
    return shapes


def test_the_manifests_cover_the_converters() -> None:
    converters = {manifest(name).diffusers["class"] for name in FLOAT_MANIFESTS}
    assert converters >= {
        "CosmosTransformer3DModel", "FluxTransformer2DModel", "Flux2Transformer2DModel", "Krea2Transformer2DModel",
        "Lumina2Transformer2DModel", "QwenImageTransformer2DModel", "UNet2DConditionModel", "WanTransformer3DModel",
        "ZImageTransformer2DModel",
    }  # fmt: skip


@pytest.mark.parametrize("name", FLOAT_MANIFESTS)
def test_recipes_make_what_the_converter_makes(name: str) -> None:
    converter, config = converter_of(name)
    made = check(converter, numbered(first_blocks(name)), config)
    assert len(made) > 40


@pytest.mark.parametrize("name", FLOAT_MANIFESTS)
def test_every_target_of_a_real_file_is_rows(name: str) -> None:
    """Of real files only Krea 2 needs more than rows: it folds 28 vectors."""
    converter, config = converter_of(name)
    sources = {own: (shape, torch.bfloat16) for own, (_, shape) in transformer_of(name).items()}
    made = trace(converter, sources, config)
    assert len(made) > 100
    others = [item.recipe for item in made.values() if isinstance(item.recipe, Replay)]
    assert len(others) == (28 if name.startswith("krea2") else 0)
    assert all(recipe.op.overloadpacket in (torch.ops.aten.view, torch.ops.aten.reshape) for recipe in others)
    for target, item in made.items():
        if isinstance(item.recipe, Rows):
            rows = sum(part.stop - part.start for part in item.recipe.ranges)
            assert rows == (item.shape[0] if item.shape else 1), target
        for part in ranges_of(item.recipe):
            shape = sources[part.source][0]
            assert 0 <= part.start < part.stop <= (shape[0] if shape else 1), target


def test_z_image_splits_its_fused_attention_in_the_order_q_k_v() -> None:
    converter, config = converter_of("z_image_turbo_comfy_bf16")
    made = trace(converter, {"layers.0.attention.qkv.weight": ((30, 4), torch.float32)}, config)
    ranges = {name: item.recipe.ranges for name, item in made.items() if isinstance(item.recipe, Rows)}
    source = "layers.0.attention.qkv.weight"
    assert ranges == {
        f"layers.0.attention.to_{part}.weight": (RowRange(source, 10 * n, 10 * n + 10),) for n, part in enumerate("qkv")
    }


def test_flux_splits_attention_and_mlp_and_swaps_shift_and_scale() -> None:
    converter, config = converter_of("flux1_dev_bfl_bf16")
    sources = {own: (shape, torch.bfloat16) for own, (_, shape) in transformer_of("flux1_dev_bfl_bf16").items()}
    made = trace(converter, sources, config)

    def rows(name: str) -> tuple[RowRange, ...]:
        recipe = made[name].recipe
        assert isinstance(recipe, Rows)
        return recipe.ranges

    fused, block = "single_blocks.7.linear1.weight", "single_transformer_blocks.7"
    parts = {"attn.to_q": (0, 3072), "attn.to_k": (3072, 6144), "attn.to_v": (6144, 9216), "proj_mlp": (9216, 21504)}
    for part, (start, stop) in parts.items():
        assert rows(f"{block}.{part}.weight") == (RowRange(fused, start, stop),)
    source = "final_layer.adaLN_modulation.1.weight"
    assert rows("norm_out.linear.weight") == (RowRange(source, 3072, 6144), RowRange(source, 0, 3072))


# --- operations that are rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a: a, [("a", 0, 6)]),
        (lambda a: a[1:4], [("a", 1, 4)]),
        (lambda a: a[-2:], [("a", 4, 6)]),
        (lambda a: a[-5:-2], [("a", 1, 4)]),
        (lambda a: a[:-1], [("a", 0, 5)]),
        (lambda a: a[-99:99], [("a", 0, 6)]),
        (lambda a: a[2:3, :], [("a", 2, 3)]),
        (lambda a: a[2:3, ..., 0:4], [("a", 2, 3)]),
        (lambda a: a[1:5][1:3], [("a", 2, 4)]),
        (lambda a: a[1:5:1], [("a", 1, 5)]),
        (lambda a: a[3:3], [("a", 0, 0)]),
        (lambda a: a[4:2], [("a", 0, 0)]),
        (lambda a: a[7:], [("a", 0, 0)]),
        (lambda a: a[2:2][0:0], [("a", 0, 0)]),
        (lambda a: a.chunk(3)[1], [("a", 2, 4)]),
        (lambda a: a.chunk(4, dim=-2)[2], [("a", 4, 6)]),
        (lambda a: a.split(4)[1], [("a", 4, 6)]),
        (lambda a: a.split([1, 2, 3])[2], [("a", 3, 6)]),
        (lambda a: torch.split(a, [5, 1], dim=0)[0], [("a", 0, 5)]),
        (lambda a: a.tensor_split(4)[3], [("a", 5, 6)]),
        (lambda a: a.tensor_split((2, 5))[1], [("a", 2, 5)]),
        (lambda a: a.narrow(0, 2, 3), [("a", 2, 5)]),
        (lambda a: a.narrow(-2, -3, 2), [("a", 3, 5)]),
        (lambda a: torch.cat([a[4:], a[:4]]), [("a", 4, 6), ("a", 0, 4)]),
        (lambda a: torch.cat(a.chunk(3)), [("a", 0, 6)]),
        (lambda a: torch.cat([a[0:2], a[2:3], a[5:6]]), [("a", 0, 3), ("a", 5, 6)]),
        (lambda a: torch.cat([a[2:4], a[0:2]]), [("a", 2, 4), ("a", 0, 2)]),
        (lambda a: torch.cat([a, a]), [("a", 0, 6), ("a", 0, 6)]),
        (lambda a: torch.cat([a[3:3], a[:2]], dim=0), [("a", 0, 0), ("a", 0, 2)]),
        (lambda a: torch.cat([a[4:], a[:4]])[1:4], [("a", 5, 6), ("a", 0, 2)]),
        (lambda a: torch.cat([a[4:], a[:4]]).chunk(2)[1], [("a", 1, 4)]),
        (lambda a: torch.concat([a[:1]], dim=-2), [("a", 0, 1)]),
        (lambda a: a.clone(), [("a", 0, 6)]),
        (lambda a: a[1:3].contiguous().detach(), [("a", 1, 3)]),
        (lambda a: a.reshape(6, 4).view(6, -1), [("a", 0, 6)]),
        (lambda a: a.to(torch.float64), [("a", 0, 6)]),
        (lambda a: a.data[3:], [("a", 3, 6)]),
    ],
)
def test_these_are_rows(function: Callable[..., torch.Tensor], expected: list[tuple[str, int, int]]) -> None:
    found = rows_of(function, a=A)
    assert [part for part in found if part[1] < part[2]] == [part for part in expected if part[1] < part[2]]


def test_rows_of_two_sources() -> None:
    assert rows_of(lambda a, b: torch.cat([a[4:], b, a[:1]]), a=A, b=B) == [("a", 4, 6), ("b", 0, 4), ("a", 0, 1)]
    assert rows_of(lambda a, b: torch.cat([a, b])[5:7], a=A, b=B) == [("a", 5, 6), ("b", 0, 1)]
    assert rows_of(lambda a, b: torch.cat([a[:2], b[2:]]), a=A, b=B) == [("a", 0, 2), ("b", 2, 4)]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3, 4, 5)])
def test_rows_of_every_rank(shape: tuple[int, ...]) -> None:
    tensor = numbered({"a": shape})["a"]
    assert rows_of(lambda a: a, a=tensor) == [("a", 0, shape[0] if shape else 1)]
    assert rows_of(lambda a: a.clone(), a=tensor) == [("a", 0, shape[0] if shape else 1)]
    if shape:
        rows_of(lambda a: a[1:], a=tensor)
        rows_of(lambda a: torch.cat([a, a]), a=tensor)


def test_a_source_without_rows() -> None:
    empty = torch.zeros(0, 4, dtype=A.dtype)
    assert rows_of(lambda a, e: torch.cat([e, a[:2]])[:1], a=A, e=empty) == [("a", 0, 1)]
    rows_of(lambda e: torch.cat([e[0:0], e]), e=empty)


def test_an_empty_vector_may_be_joined_to_anything() -> None:
    """torch.cat leaves it out, whatever the others' rank; its rows are not those of the result."""
    empty = torch.zeros(0, dtype=A.dtype)
    one(lambda a, e: torch.cat([e, a])[2:], a=A, e=empty)
    one(lambda a, e: torch.cat([e, a])[:0], a=A, e=empty)
    one(lambda a, e: torch.cat([e, a, a], dim=1), a=A, e=empty)


# --- operations that are not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a[::2],
        lambda a: a[1:5:3],
        lambda a: a[:, :2],
        lambda a: a[:, 1:],
        lambda a: a[0],
        lambda a: a.select(1, 2),
        lambda a: a.chunk(2, dim=1)[0],
        lambda a: a.chunk(2, dim=-1)[1],
        lambda a: a.split(3, dim=1)[1],
        lambda a: a.split([1, 3], dim=1)[0],
        lambda a: a.narrow(1, 1, 2),
        lambda a: torch.cat([a, a], dim=1),
        lambda a: torch.cat([a[:, :1], a[:, 3:]], dim=-1),
        lambda a: torch.cat([a[::2], a[1::2]]),
        lambda a: torch.cat([a.flip(0), a]),
        lambda a: torch.cat([a, a.float()]),
        lambda a: torch.cat([a.bfloat16(), a])[6:],
        lambda a: torch.cat([a[0, :0], a, a], dim=1),
        lambda a: torch.stack([a, a]),
        lambda a: torch.stack(a.chunk(3), dim=1),
        lambda a: a.t(),
        lambda a: a.t().contiguous()[1:],
        lambda a: a.transpose(0, 1).clone(),
        lambda a: a.reshape(4, 6),
        lambda a: a.reshape(-1)[3:9],
        lambda a: a.view(2, 3, 4)[1],
        lambda a: a.view(2, 3, 2, 2).permute(1, 0, 3, 2).reshape(6, 4),
        lambda a: a.view(3, 2, 4).transpose(0, 1).reshape(6, 4).chunk(2)[1],
        lambda a: a.unflatten(0, (2, 3)).movedim(1, 0).flatten(0, 1),
        lambda a: a.unsqueeze(0),
        lambda a: a.unsqueeze(0).squeeze(0),
        lambda a: a[:1].expand(3, 4),
        lambda a: a.repeat(2, 1),
        lambda a: a.flip(0),
        lambda a: a.roll(1, 0),
        lambda a: a.unbind(0)[2],
        lambda a: a.bfloat16(),
        lambda a: a.view(torch.int64),
        lambda a: -a,
        lambda a: a * 2 + 1,
        lambda a: a @ a.t(),
        lambda a: a.sum(0),
        lambda a: a.tril(),
    ],
)
def test_these_are_replayed(function: Callable[..., torch.Tensor]) -> None:
    assert isinstance(one(function, a=A).recipe, Replay)


def test_memory_formats_are_replayed() -> None:
    image = numbered({"a": (2, 3, 4, 5)})["a"]
    made = one(lambda a: a.clone(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1), a=image)
    assert isinstance(made.recipe, Replay)


def test_a_joined_target_of_two_dtypes_is_not_rows() -> None:
    """torch.cat casts the narrower one: its rows are no longer those of the file."""
    made = one(lambda a, b: torch.cat([a, b])[:6], a=A.float(), b=B)
    assert isinstance(made.recipe, Replay)
    assert made.dtype == torch.float64


def test_operations_with_several_outputs_are_replayed_each_for_itself() -> None:
    made = check(lambda checkpoint, config: dict(zip("pqrs", checkpoint["a"].unbind(1), strict=True)), {"a": A})
    assert [item.recipe.output for item in made.values() if isinstance(item.recipe, Replay)] == [0, 1, 2, 3]


def test_replays_of_rows_read_only_those_rows() -> None:
    made = one(lambda a: a[2:4].t() + 1, a=A)
    assert list(ranges_of(made.recipe)) == [RowRange("a", 2, 4)]


# --- targets, sources and constants -----------------------------------------------------------------------------------


def test_two_targets_may_share_a_source() -> None:
    made = check(
        lambda checkpoint, config: {"x": checkpoint["a"], "y": checkpoint["a"], "z": checkpoint["a"][:3]}, {"a": A}
    )
    assert made["x"] == made["y"]
    assert list(ranges_of(made["z"].recipe)) == [RowRange("a", 0, 3)]


def test_a_target_of_one_range_is_the_tensor_that_was_read() -> None:
    tensor = torch.zeros(3)
    assert evaluate(Rows((RowRange("a", 0, 3),)), lambda part: tensor) is tensor


def test_ranges_of_lists_every_range_in_order() -> None:
    made = one(lambda a, b: torch.stack([torch.cat([b, a[:2]]), a]).sum(0) * b[0, 0], a=A, b=B)
    parts = [("b", 0, 4), ("a", 0, 2), ("a", 0, 6), ("b", 0, 4)]
    assert list(ranges_of(made.recipe)) == [RowRange(*part) for part in parts]


def test_tensors_in_keyword_arguments() -> None:
    order = torch.tensor([3, 2, 1, 0])
    made = one(lambda a, v, s: torch.searchsorted(v, a, sorter=s), a=A, v=A[0].flip(0).contiguous(), s=order)
    assert [part.source for part in ranges_of(made.recipe)] == ["v", "a", "s"]


def test_a_file_that_has_the_models_own_names() -> None:
    tensors = {"w": A, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}
    made = as_named(declared(tensors))
    assert_made(made, tensors, tensors)
    assert [list(ranges_of(item.recipe)) for item in made.values()] == [
        [RowRange("w", 0, 6)], [RowRange("scalar", 0, 1)], [RowRange("empty", 0, 0)],
    ]  # fmt: skip


def test_no_memory_is_taken_for_what_is_traced() -> None:
    huge = {"a": ((1 << 20, 1 << 20), torch.bfloat16)}
    made = trace(lambda checkpoint, config: {"x": torch.cat([checkpoint["a"][5:] * 2, checkpoint["a"]])}, huge, {})
    assert made["x"].shape == ((2 << 20) - 5, 1 << 20)


def test_a_converter_gets_copies() -> None:
    def converter(checkpoint: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        assert config.pop("layers") == 2
        return {"x": checkpoint.pop("a")}

    tensors, config = {"a": ((2, 2), torch.float32)}, {"layers": 2}
    assert list(trace(converter, tensors, config)) == ["x"]
    assert (list(tensors), config) == (["a"], {"layers": 2})


@pytest.mark.parametrize(
    "function",
    [
        lambda a: torch.zeros(3),
        lambda a: torch.ones(2, 3, dtype=torch.bfloat16),
        lambda a: torch.full((2,), 7.5),
        lambda a: torch.arange(5),
        lambda a: torch.zeros(3, device=a.device, dtype=a.dtype),
        lambda a: torch.cat([a, torch.zeros(2, 4, device=a.device, dtype=a.dtype)]),
        lambda a: torch.cat([torch.ones(1, 4, device=a.device, dtype=a.dtype), a[2:]])[:3],
        lambda a: torch.zeros_like(a),
        lambda a: torch.full_like(a, 2),
        lambda a: a.new_zeros(5),
        lambda a: torch.cat([a, a.new_ones(1, 4)]),
        lambda a: torch.eye(4, device=a.device, dtype=a.dtype) @ a.t(),
    ],
)
def test_constants_are_made_again(function: Callable[..., torch.Tensor]) -> None:
    made = one(function, a=A)
    assert isinstance(made.recipe, Replay)
    assert evaluate(made.recipe, reader({"a": A})).device.type == "cpu"


# --- converters that cannot be traced ---------------------------------------------------------------------------------

FOREIGN = torch.ones(2)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: FOREIGN,
        lambda a: FOREIGN * 2,
        lambda a: 3,
        lambda a: None,
        lambda a: [a],
        lambda a: {"nested": a},
        lambda a: "a",
        lambda a: a.shape,
    ],
)
def test_what_does_not_come_from_the_file_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="does not come from the file"):
        trace(lambda checkpoint, config: {"out": function(**checkpoint)}, declared({"a": A}), {})


def test_a_tensor_that_takes_the_place_of_a_dead_one_is_not_taken_for_it() -> None:
    def converter(checkpoint: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        dead = {id(checkpoint["a"] + n) for n in range(200)}
        strangers = [torch.Tensor._make_subclass(torch.Tensor, FOREIGN) for _ in range(1000)]
        return {"out": next((tensor for tensor in strangers if id(tensor) in dead), FOREIGN)}

    with pytest.raises(ValueError, match="does not come from the file"):
        trace(converter, declared({"a": A}), {})


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a * a[0, 0].item(),
        lambda a: a * float(a.max()),
        lambda a: a if a[0, 0] > 0 else -a,
        lambda a: a if torch.equal(a, a) else -a,
        lambda a: a if bool(a.isnan().any()) else -a,
        lambda a: torch.zeros(int(a[0, 0])),
        lambda a: a.tolist(),
        lambda a: a.numpy(),
        lambda a: a.nonzero(),
        lambda a: a[a > 3],
        lambda a: a.cpu(),
        lambda a: a[: a.int()[0, 0]],
    ],
)
def test_converters_that_read_values_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CONVERTER_ERRORS):
        trace(lambda checkpoint, config: {"out": function(**checkpoint)}, declared({"a": A}), {})


def written_through_a_view(a: torch.Tensor) -> torch.Tensor:
    a[:2].zero_()
    return a


def assigned(a: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[1] = 7
    return a


def written_under_a_view(a: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    view = a[:2]
    a.mul_(2)
    return view


def written_to_out(a: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    torch.add(a, 1, out=out)
    return out


@pytest.mark.parametrize(
    "function",
    [
        written_through_a_view, assigned, written_under_a_view, written_to_out,
        lambda a: a.clone().mul_(2),
        lambda a: a[2:].as_strided((2, 2), (4, 1), 0),
    ],
)  # fmt: skip
def test_converters_that_write_in_place_are_refused(function: Callable[..., Any]) -> None:
    """A recipe is made of values, not of memory: a write through one tensor would be lost in another."""
    with pytest.raises(ValueError, match="memory that tensors share"):
        trace(lambda checkpoint, config: {"out": function(**checkpoint)}, declared({"a": A}), {})


def test_what_a_converter_raises_comes_through() -> None:
    def converter(checkpoint: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        return {"x": checkpoint["no such key"]}

    with pytest.raises(KeyError, match="no such key"):
        trace(converter, declared({"a": A}), {})
    assert issubclass(KeyError, CONVERTER_ERRORS)
    with pytest.raises(CONVERTER_ERRORS):
        trace(lambda checkpoint, config: {"x": checkpoint["a"].view(5, 5)}, declared({"a": A}), {})
    with pytest.raises(CONVERTER_ERRORS):
        trace(lambda checkpoint, config: None, declared({"a": A}), {})  # type: ignore[arg-type,return-value]


# --- any chain of operations ------------------------------------------------------------------------------------------

Step = tuple[int, int, int, int]


def _slice(tensor: torch.Tensor, dim: int, low: int, high: int, step: int = 1) -> torch.Tensor:
    span = 2 * tensor.shape[dim] + 3
    start, stop = (value % span - tensor.shape[dim] - 1 for value in (low, high))
    return tensor[(slice(None),) * dim + (slice(start, stop, step),)]


def _sections(tensor: torch.Tensor, dim: int, at: int) -> list[int]:
    at %= tensor.shape[dim] + 1
    return [at, tensor.shape[dim] - at]


def _join(pool: Sequence[torch.Tensor], tensor: torch.Tensor, dim: int, which: int) -> torch.Tensor:
    """With another tensor that fits, in an order that varies."""

    def rest(shape: torch.Size) -> tuple[int, ...]:
        return (*shape[:dim], *shape[dim + 1 :])

    fits = [t for t in pool if t.ndim == tensor.ndim and rest(t.shape) == rest(tensor.shape)]
    other = fits[which % len(fits)]
    return torch.cat([tensor, other] if which % 2 else [other, tensor, other], dim)


BY_ROWS: list[Callable[..., Any]] = [
    lambda pool, t, dim, x, y: t.chunk(1 + x % 4, dim),
    lambda pool, t, dim, x, y: t.split(1 + x % 5, dim),
    lambda pool, t, dim, x, y: t.split(_sections(t, dim, x), dim),
    lambda pool, t, dim, x, y: t.tensor_split(1 + x % 4, dim),
    lambda pool, t, dim, x, y: _slice(t, dim, x, y),
    lambda pool, t, dim, x, y: _slice(t, dim, x, 2 * t.shape[dim] + 2),
    lambda pool, t, dim, x, y: t.narrow(dim, x % (len(t) or 1), min(1, len(t))) if dim == 0 else t,
    lambda pool, t, dim, x, y: _join(pool, t, dim, x),
    lambda pool, t, dim, x, y: t.clone(),
    lambda pool, t, dim, x, y: t.contiguous().view(t.shape),
]
"""Operations on dimension `dim`, which are rows where that is 0."""

OTHERS: list[Callable[..., Any]] = [
    lambda pool, t, dim, x, y: _slice(t, dim, x, y, 2 + x % 3),
    lambda pool, t, dim, x, y: torch.stack([t, t], x % (t.ndim + 1)),
    lambda pool, t, dim, x, y: t.reshape(-1),
    lambda pool, t, dim, x, y: t.reshape(*t.shape[:dim], t.shape[dim], 1, *t.shape[dim + 1 :]),
    lambda pool, t, dim, x, y: t.reshape(2, t.numel() // 2) if t.numel() % 2 == 0 else t,
    lambda pool, t, dim, x, y: t.flatten(0, dim),
    lambda pool, t, dim, x, y: t.permute(*reversed(range(t.ndim))),
    lambda pool, t, dim, x, y: t.transpose(dim, y % t.ndim),
    lambda pool, t, dim, x, y: t.movedim(dim, -1).contiguous(),
    lambda pool, t, dim, x, y: t.flip(dim),
    lambda pool, t, dim, x, y: t.roll(x, dim),
    lambda pool, t, dim, x, y: t.unsqueeze(dim),
    lambda pool, t, dim, x, y: t.squeeze(dim),
    lambda pool, t, dim, x, y: t.select(dim, x % t.shape[dim]) if t.shape[dim] else t,
    lambda pool, t, dim, x, y: t.unbind(dim) if t.shape[dim] else t,
    lambda pool, t, dim, x, y: t.unsqueeze(0).expand(2, *t.shape),
    lambda pool, t, dim, x, y: t.repeat(*[2 if d == dim else 1 for d in range(t.ndim)]),
    lambda pool, t, dim, x, y: t.to([torch.float32, torch.bfloat16, torch.float64][x % 3]),
    lambda pool, t, dim, x, y: t * 2 - x % 5,
    lambda pool, t, dim, x, y: torch.cat([t, torch.zeros_like(t)], dim),
    lambda pool, t, dim, x, y: torch.cat([t.new_ones(t.shape), t], dim),
]


def run(steps: Sequence[Step], operations: Sequence[Callable[..., Any]], by_rows: bool) -> Converter:
    """A converter that runs a chain of operations, each on one of the tensors so far, and returns them all."""

    def converter(checkpoint: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        pool = list(checkpoint.values())
        for which, operation, x, y in steps:
            tensor = pool[which % len(pool)]
            if tensor.ndim == 0 or tensor.numel() > 1000 or tensor.ndim > 5:
                continue
            dim = 0 if by_rows else y % tensor.ndim
            made = operations[operation % len(operations)](pool, tensor, dim, x, y)
            pool += [made] if isinstance(made, torch.Tensor) else made
        return {str(index): tensor for index, tensor in enumerate(pool)}

    return converter


STEPS = st.lists(st.tuples(*[st.integers(0, 60)] * 4), min_size=1, max_size=7)
SOURCES = {"a": (6, 4), "b": (3, 4), "v": (5,), "w": (2, 3, 4), "s": (), "none": (0, 4), "flat": (4, 0)}


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_any_chain_of_operations(steps: list[Step]) -> None:
    tensors = numbered(SOURCES, torch.float32)
    tensors["half"] = numbered({"half": (6, 4)}, torch.bfloat16)["half"]
    check(run(steps, BY_ROWS + OTHERS, by_rows=False), tensors)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_any_chain_of_operations_on_rows_is_rows(steps: list[Step]) -> None:
    made = check(run(steps, BY_ROWS, by_rows=True), numbered(SOURCES))
    for item in made.values():
        assert isinstance(item.recipe, Rows)
        for before, after in itertools.pairwise(item.recipe.ranges):
            assert not (before.source == after.source and before.stop == after.start and after.start < after.stop)
