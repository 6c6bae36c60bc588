"""What each target tensor is made of. Converters are traced on meta tensors, never run on weights.

A key converter is called once with tensors that carry only shapes, under a TorchDispatchMode that
records what it does. Renames, splits, joins and slices along dimension 0 become row ranges, which
apply to a quantized layer as they do to a float one; anything else is kept as the recorded
operation and replayed on the real tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]
Converter = Callable[..., dict[str, Any]]

CONVERTER_ERRORS = (LookupError, ValueError, TypeError, RuntimeError, AttributeError, AssertionError, ArithmeticError)
"""What a converter raises on keys or shapes that it does not know."""


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of dimension 0 of a stored tensor; a scalar is one row."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True)
class Rows:
    """A target made of row ranges, one after the other."""

    ranges: tuple[RowRange, ...]


@dataclass(frozen=True)
class Replay:
    """A target made by an operation that is more than rows: run again on the real tensors.

    Attributes:
        op: the recorded operation.
        args: its arguments; tensors among them are recipes.
        kwargs: its keyword arguments.
        output: which of several outputs; None where there is one.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: int | None


Recipe = Rows | Replay


@dataclass(frozen=True)
class Made:
    """A target as a converter makes it.

    Attributes:
        recipe: what it is made of.
        shape: its shape.
        dtype: its dtype while still as stored.
    """

    recipe: Recipe
    shape: Shape
    dtype: torch.dtype


Tensors = Mapping[str, tuple[Shape, torch.dtype]]
"""Name → logical shape and stored dtype."""


def as_named(tensors: Tensors) -> dict[str, Made]:
    """The recipes of a file whose names are the model's own: each tensor is itself."""
    return {name: Made(_whole(name, shape), shape, dtype) for name, (shape, dtype) in tensors.items()}


def trace(converter: Converter, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Made]:
    """Record what a converter makes of tensors of these shapes.

    Args:
        converter: a key converter as in diffusers' single-file table.
        tensors: what the file holds. No memory is allocated for it.
        config: the model's config, which some converters read.

    Returns:
        Target name → recipe, shape and dtype.

    Raises:
        One of CONVERTER_ERRORS, as the converter raised it.
    """
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()}
    tracer = _Tracer(sources)
    with torch.no_grad(), tracer:
        converted = converter(checkpoint=dict(sources), config=dict(config))
    return {
        name: Made(tracer.recipe_of(tensor), tuple(tensor.shape), tensor.dtype) for name, tensor in converted.items()
    }


def ranges_of(recipe: Recipe) -> Iterator[RowRange]:
    """Every row range that a recipe reads, in order."""
    if isinstance(recipe, Rows):
        yield from recipe.ranges
        return
    for part in _leaves((recipe.args, tuple(recipe.kwargs.values()))):
        yield from ranges_of(part)


def evaluate(recipe: Recipe, read: Callable[[RowRange], torch.Tensor]) -> torch.Tensor:
    """Make the target tensor.

    Args:
        recipe: what it is made of.
        read: reads one row range.

    Returns:
        The tensor; the very tensor that `read` gave where the recipe is one range.
    """
    if isinstance(recipe, Rows):
        parts = [read(part) for part in recipe.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def real(value: Any) -> Any:
        if isinstance(value, (Rows, Replay)):
            return evaluate(value, read)
        if isinstance(value, (list, tuple)):
            return [real(item) for item in cast("Sequence[Any]", value)]
        return value

    result: Any = recipe.op(*(real(arg) for arg in recipe.args), **{k: real(v) for k, v in recipe.kwargs.items()})
    return result if recipe.output is None else result[recipe.output]


class _Tracer(TorchDispatchMode):
    """Keeps a recipe for every tensor that comes out of an operation, by the tensor's identity."""

    def __init__(self, sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._recipes: dict[int, Recipe] = {}
        self._alive: list[torch.Tensor] = []  # an id stays unique only while its tensor lives
        for name, tensor in sources.items():
            self._keep(tensor, _whole(name, tuple(tensor.shape)))

    def recipe_of(self, tensor: torch.Tensor) -> Recipe:
        """The recipe of a tensor that was traced. Raises ValueError for any other value."""
        recipe = self._recipes.get(id(tensor))
        if recipe is None:
            raise ValueError(f"the converter returned a {type(tensor).__name__} that does not come from the file")
        return recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or func.overloadpacket is torch.ops.aten.as_strided:
            # A write shows in every view of the same memory, and a stride reaches outside the rows: recipes cannot.
            raise ValueError(f"the converter uses {func}, which depends on memory that tensors share")
        result = func(*args, **kwargs)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        rows = self._as_rows(func, args, kwargs, outputs)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor):
                output = index if isinstance(result, (list, tuple)) else None
                self._keep(tensor, rows[index] if rows else self._as_replay(func, args, kwargs, output))
        return result

    def _keep(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        self._recipes[id(tensor)] = recipe
        self._alive.append(tensor)

    def _as_replay(self, func: Any, args: Any, kwargs: Any, output: int | None) -> Replay:
        def symbolic(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.recipe_of(value)
            if isinstance(value, (list, tuple)):
                return tuple(symbolic(item) for item in cast("Sequence[Any]", value))
            if isinstance(value, torch.device) and value.type == "meta":
                return None  # "where the source is", and real sources are not on meta
            return value

        return Replay(func, symbolic(args), {key: symbolic(value) for key, value in kwargs.items()}, output)

    def _as_rows(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Rows] | None:
        """The outputs as row ranges of the inputs, or None where the operation does more than that."""
        aten = torch.ops.aten
        named = _named_arguments(func, args, kwargs)
        if func.overloadpacket is aten.cat:
            return self._joined(named["tensors"], named["dim"], outputs[0])
        tensor = named.get("self")
        source = self._recipes.get(id(tensor))
        if tensor is None or not isinstance(source, Rows):
            return None
        if func.overloadpacket in _VALUE_PRESERVING:
            same = outputs[0].shape == tensor.shape and outputs[0].dtype == tensor.dtype
            return [source] if same and outputs[0].is_contiguous() else None
        if func.overloadpacket not in (aten.split, aten.split_with_sizes, aten.slice) or named["dim"] % tensor.ndim:
            return None
        if named.get("step", 1) != 1:
            return None
        start = min(max(_from_end(named.get("start") or 0, len(tensor)), 0), len(tensor))
        return _cut(source, start, [len(output) for output in outputs])

    def _joined(self, tensors: Sequence[torch.Tensor], dim: int, joined: torch.Tensor) -> list[Rows] | None:
        parts = [self._recipes.get(id(tensor)) for tensor in tensors]
        rows = [part for part in parts if isinstance(part, Rows)]
        cast_or_reshaped = any(tensor.dtype != joined.dtype or tensor.ndim != joined.ndim for tensor in tensors)
        if len(rows) < len(parts) or cast_or_reshaped or dim % joined.ndim:
            return None
        return [Rows(_merged([piece for part in rows for piece in part.ranges]))]


_VALUE_PRESERVING = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("alias", "detach", "clone", "lift_fresh", "view", "_unsafe_view", "_reshape_alias", "_to_copy")
)
"""Operations that keep every value in place when shape and dtype stay the same."""


def _named_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ATen call by their names in its schema, defaults included."""
    schema = func._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named.update(zip((argument.name for argument in schema), args, strict=False))
    return {**named, **kwargs}


def _from_end(index: int, length: int) -> int:
    return index + length if index < 0 else index


def _cut(source: Rows, start: int, lengths: Sequence[int]) -> list[Rows]:
    """Consecutive pieces of `lengths` rows, from row `start` of a target made of `source`."""
    pieces: list[Rows] = []
    for length in lengths:
        pieces.append(_slice_rows(source, start, start + length))
        start += length
    return pieces


def _slice_rows(source: Rows, start: int, stop: int) -> Rows:
    ranges: list[RowRange] = []
    position = 0
    for part in source.ranges:
        count = part.stop - part.start
        low, high = max(start - position, 0), min(stop - position, count)
        if low < high:
            ranges.append(RowRange(part.source, part.start + low, part.start + high))
        position += count
    first = source.ranges[0]
    return Rows(tuple(ranges) or (RowRange(first.source, first.start, first.start),))


def _whole(source: str, shape: Shape) -> Rows:
    return Rows((RowRange(source, 0, _row_count(shape)),))


def _row_count(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _leaves(value: Any) -> Iterator[Recipe]:
    if isinstance(value, (Rows, Replay)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _leaves(item)


def _merged(ranges: Sequence[RowRange]) -> tuple[RowRange, ...]:
    """Ranges with neighbours of one source that follow each other made one."""
    result: list[RowRange] = []
    for part in ranges:
        last = result[-1] if result else None
        if last and last.source == part.source and last.stop == part.start:
            result[-1] = RowRange(last.source, last.start, part.stop)
        else:
            result.append(part)
    return tuple(result)
