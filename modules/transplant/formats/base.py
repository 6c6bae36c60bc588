"""What every format answers: which tensors belong together, what shape they stand for, how they become SDNQ codes.

A format's functions run twice: on meta tensors while planning, which checks every shape before a byte
is read and tells the size, and on the real tensors while building.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from transplant.checkpoint.header import TensorInfo

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class FormatError(Exception):
    """A layer that cannot be adopted; the message says why. The caller adds file and layer."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer as the file declares it.

    Attributes:
        name: own name, without `.weight`.
        format: name of its format.
        params: the declaration's entries, those nested under `params` included.
        declared_by: "header", "markers", "legacy", "scales" or "gguf".
        tensors: what the file stores for it by role (`weight`, `weight_scale`, ...).
        full_precision_matmul: whether the file asks that it is not computed in low precision.
    """

    name: str
    format: str
    params: Mapping[str, Any]
    declared_by: str
    tensors: Mapping[str, TensorInfo]
    full_precision_matmul: bool = False

    def number(self, key: str, default: int) -> int:
        """An integer entry of the declaration. Raises FormatError where it is something else."""
        value = self.params.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"its {key} is {value!r}, not a positive number")
        return value


@dataclass(frozen=True)
class Form:
    """How a weight is held. Rows of equal form can be joined.

    Attributes:
        weights_dtype: SDNQ's name of the codes' dtype, or the name of the GGML type.
        group_size: columns that share a scale; -1 a row, -2 the whole tensor.
        hadamard: size of the Hadamard rotation along the columns, 0 for none.
        fp32_rotation: rotate in fp32 and round once, as ComfyUI does for this format.
        scale_dtype: SDNQ's name of the scales' dtype where these are codes too.
        codebook: whether the codes are indices into a table per group.
        matmul_dtype: dtype of SDNQ's quantized matmul.
        holder: whose layers hold it, a key of holders.py.
    """

    weights_dtype: str
    group_size: int = -1
    hadamard: int = 0
    fp32_rotation: bool = False
    scale_dtype: str | None = None
    codebook: bool = False
    matmul_dtype: str = "int8"
    holder: str = "sdnq"

    @property
    def nibbles(self) -> bool:
        """Whether two codes share a byte; SDNQ holds them as a flat vector."""
        return self.weights_dtype in ("int4", "uint4", "float4_e2m1fn")


@dataclass(frozen=True)
class Codes:
    """Rows of a quantized weight.

    Attributes:
        form: how they are held.
        weight: [n, K] or [n, K / group_size, group_size]; 4-bit codes packed as [n, K / 2] bytes, even
            column in the low nibble; GGML blocks as [n, bytes a row].
        scale: [1, 1], [n, 1] or [n, K / group_size, 1 or table size]; [0] where the codes bring their own (GGML).
        scale_2: scale of the scales, [1] or [n, 1, 1]; None where there is none.
        zero_point: like scale; None for symmetric formats.
        input_scale: [K], multiplies the layer's input; None where there is none.
    """

    form: Form
    weight: torch.Tensor
    scale: torch.Tensor
    scale_2: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Portable:
    """What a GPU without conversions of fp8 (CUDA before sm_89), or an older SDNQ, needs held otherwise.

    Attributes:
        codes: e4m3 codes as bytes that SDNQ decodes itself: compiled kernels cannot load e4m3 there.
        scales: e8m0 block scales as bf16: SDNQ casts codes to the scales' dtype there, compiled or not.
        plain: one floating-point scale a group, multiplied out, and no table of values: all that older SDNQ has.
    """

    codes: bool = False
    scales: bool = False
    plain: bool = False


class Read(Protocol):
    """Reads the tensor of one role: rows `start` to `stop`, or all of it."""

    def __call__(self, role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """See the class."""
        ...


@dataclass(frozen=True)
class Rows:
    """Which rows of a layer are wanted, and the layer's logical shape.

    Attributes:
        start: first row.
        stop: row after the last.
        shape: (N, K) of the whole layer, without padding.
    """

    start: int
    stop: int
    shape: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: as in the declaration's `format`.
        weight_dtypes: safetensors dtypes that its codes may be stored in.
        needs: roles that must be there beside the weight.
        may_have: roles that may be there and are used.
        ignores: roles that only concern activations and are dropped.
        logical_shape: (N, K) as far as the file says it, N and K padded where `padded` is; any shape where
            layers that are no matrices can be decoded.
        padded: rows and columns that stored tensors are padded to; 1 for none.
        adopt: makes codes of some rows. Raises FormatError.
        in_rows: whether every row of a layer has bytes of its own; a layer of which that is not so is adopted
            whole, and decoded.
        positive: roles of scales that `adopt` refuses where they are not finite and positive, and that are so small
            that a plan can look at them.
    """

    name: str
    weight_dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    logical_shape: Callable[[QuantizedLayer], Shape]
    adopt: Callable[[QuantizedLayer, Read, Rows, Portable], Codes]
    may_have: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    padded: tuple[int, int] = (1, 1)
    in_rows: Callable[[QuantizedLayer], bool] = lambda layer: True
    positive: tuple[str, ...] = ()


def check_layer(layer: QuantizedLayer, layer_format: Format) -> None:
    """Check that a layer's tensors are those of its format.

    Raises:
        FormatError: one is missing, one has no use, or the codes' dtype contradicts the declaration.
    """
    weight = layer.tensors.get("weight")
    if weight is None:
        raise FormatError("it has no weight")
    if weight.dtype not in layer_format.weight_dtypes:
        allowed = " or ".join(layer_format.weight_dtypes)
        raise FormatError(f"it is declared as {layer.format} but stored as {weight.dtype}, not {allowed}")
    missing = [role for role in layer_format.needs if role not in layer.tensors]
    if missing:
        raise FormatError(f"it lacks {', '.join(missing)}")
    known = {"weight", *layer_format.needs, *layer_format.may_have, *layer_format.ignores}
    unused = [role for role in layer.tensors if role not in known]
    if unused:
        raise FormatError(f"a {layer.format} layer has no use for its {', '.join(unused)}")


def matrix_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """The shape of a layer's weight as it is stored: rows, and codes or bytes in a row.

    Raises:
        FormatError: it is no matrix.
    """
    shape = layer.tensors["weight"].shape
    if len(shape) != 2:
        raise FormatError(f"its weight has {len(shape)} dimensions; only matrices are supported")
    return shape[0], shape[1]


def check_finite_and_positive(name: str, scale: torch.Tensor, allow_zero: bool = False) -> None:
    """Check real scales; meta tensors pass.

    Raises:
        FormatError: NaN, infinite, negative, or zero where that is not allowed.
    """
    if scale.is_meta or scale.numel() == 0:
        return
    values = scale.float()
    if not bool(values.isfinite().all()):
        raise FormatError(f"its {name} holds NaN or infinity")
    lowest = float(values.min())
    if lowest < 0 or (lowest == 0 and not allow_zero):
        raise FormatError(f"its {name} holds {'a negative value' if lowest < 0 else 'zero'}")


def join(parts: Sequence[Codes]) -> Codes:
    """Codes of several layers one after the other.

    Scalar scales that differ are expanded to rows. Nothing is computed on the codes.

    Raises:
        FormatError: the parts are not of equal form.
    """
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    forms = {replace(part.form, group_size=max(part.form.group_size, -1)) for part in parts}
    if len(forms) > 1:
        raise FormatError("its parts are quantized differently")
    if any((part.input_scale is None) != (first.input_scale is None) for part in parts):
        raise FormatError("only some of its parts scale their input")
    if first.input_scale is not None and not all(_equal(part.input_scale, first.input_scale) for part in parts):
        raise FormatError("its parts scale their input differently")
    weight = torch.cat([part.weight for part in parts])
    scales = [part.scale for part in parts]
    form = first.form
    if form.group_size == -2 or any(part.form.group_size == -2 for part in parts):
        if all(part.form.group_size == -2 and _equal(part.scale, first.scale) for part in parts):
            return replace(first, weight=weight)
        form = replace(form, group_size=-1)
        scales = [scale.expand(len(part.weight), 1) for part, scale in zip(parts, scales, strict=True)]
    zero_point = None if first.zero_point is None else torch.cat([_given(part.zero_point) for part in parts])
    return Codes(form, weight, torch.cat(scales), _joined_scale_2(parts), zero_point, first.input_scale)


def _joined_scale_2(parts: Sequence[Codes]) -> torch.Tensor | None:
    import torch

    first = parts[0].scale_2
    if first is None:
        return None
    if first.numel() == 1 and all(_equal(part.scale_2, first) for part in parts):
        return first
    return torch.cat([_given(part.scale_2).reshape(-1, 1, 1).expand(len(part.weight), 1, 1) for part in parts])


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Equal values. Meta tensors of one shape are taken as equal: a plan may be some bytes a row short."""
    import torch

    if one is None or other is None:
        return False
    return one.shape == other.shape if one.is_meta else torch.equal(one, other)


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise FormatError("only some of its parts have this scale")
    return tensor


def multiplied_out(codes: Codes) -> Codes:
    """The codes with scale and scale of scales multiplied in fp32, as SDNQ does whenever it computes."""
    import torch

    if codes.scale_2 is None:
        return codes
    scale = codes.scale.to(torch.float32) * codes.scale_2.to(torch.float32)
    return replace(codes, form=replace(codes.form, scale_dtype=None), scale=scale, scale_2=None)


def divisor(group: int, columns: int) -> int:
    """The largest group size that divides both `group` and `columns`."""
    return math.gcd(group, columns)
