"""Hold what a file makes against what a network needs: every tensor of both is accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from transplant.architectures.spec import TransformerSpec
from transplant.checkpoint.gguf import LOADABLE
from transplant.checkpoint.header import GGUF, Header
from transplant.checkpoint.naming import NamedKeys
from transplant.checkpoint.reader import TORCH_DTYPES
from transplant.dtype_readers import dtype_readers, is_under
from transplant.errors import (
    InputMismatch,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
    UnknownDtype,
    UnsupportedQuantization,
    WrongArchitecture,
    sample,
)
from transplant.formats.base import Codes, QuantizedLayer
from transplant.fp8_storage import FP8, STORAGE, castable_layers, skip_patterns, support_on
from transplant.load_plan import ComponentPlan, TargetTensor
from transplant.quantized import LayerError, codes_of, fits, is_rows_of_layers, logical_shape, read_meta
from transplant.recipe import Made, Recipe, Replay, Rows, ranges_of
from transplant.sdnq_bridge import Compute, InFlight, QuantizeOnLoad, portable_on
from transplant.skeleton import fp32_modules

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """What every step of planning one file shares.

    Attributes:
        header: the file's header.
        keys: its names, normalised.
        layers: its quantized layers by own name.
        sidecars: own names of the tensors that belong to them.
        dtype: compute dtype.
        device: where the weights go.
        use_mmap: whether the file is mapped.
        compute: how quantized layers compute.
    """

    header: Header
    keys: NamedKeys
    layers: Mapping[str, QuantizedLayer]
    sidecars: frozenset[str]
    dtype: torch.dtype
    device: torch.device
    use_mmap: bool
    compute: Compute

    @property
    def runs_on(self) -> torch.device:
        """Where the layers compute."""
        return self.compute.runs_on or self.device

    @property
    def rests_in_fp8(self) -> bool:
        """Whether plain weights are to rest in fp8: wanted, possible, and the file is not quantized already."""
        return self.compute.fp8_storage and not self.layers and support_on(self.runs_on).possible

    @property
    def quantizes(self) -> QuantizeOnLoad | None:
        """How float weights are quantized while they load; None where the file is quantized already."""
        return None if self.layers else self.compute.quantize

    @property
    def layers_by_weight(self) -> dict[str, QuantizedLayer]:
        """The quantized layers by the stored name of their weight."""
        return {layer.tensors["weight"].name: layer for layer in self.layers.values()}

    def tensors(self, names: Sequence[str]) -> dict[str, tuple[Shape, torch.dtype]]:
        """Logical shape and dtype by own name; a quantized weight counts as one of the compute dtype.

        Raises:
            UnknownDtype: torch cannot hold it.
            UnsupportedQuantization: a quantized layer that no format here can adopt.
        """
        found: dict[str, tuple[Shape, torch.dtype]] = {}
        layers = self.layers_by_weight
        for name in names:
            info = self.header.tensors[self.keys.stored[name]]
            layer = layers.get(info.name)
            if layer is not None:
                found[name] = (self.checked(layer), self.dtype)
            elif info.dtype not in TORCH_DTYPES:
                known = (*LOADABLE, "BF16", "F16", "F32") if self.header.container == GGUF else ()
                raise UnknownDtype(self.header.path, info.name, info.dtype, known)
            else:
                found[name] = (info.shape, TORCH_DTYPES[info.dtype])
        return found

    def checked(self, layer: QuantizedLayer) -> Shape:
        """The logical shape of a layer. Raises UnsupportedQuantization."""
        try:
            return logical_shape(layer)
        except LayerError as error:
            raise self.refusal(error) from error

    def refusal(self, error: LayerError) -> UnsupportedQuantization:
        """The refusal of a layer."""
        return refusal(self.header, error, len(self.layers))


def refusal(header: Header, error: LayerError, count: int) -> UnsupportedQuantization:
    """The refusal of a layer, as a refusal of its file with `count` quantized layers."""
    what = [f"{error.layer.name} in {error.layer.format}"]
    return UnsupportedQuantization(
        header.path, what, f"{error.reason}; the file has {count} quantized layers",
        "Use another version of the file, in another quantization or in bf16",
    )  # fmt: skip


def plan_component(
    draft: Draft,
    spec: TransformerSpec,
    component: str,
    network: ModelMixin,
    made: Mapping[str, Made],
    names: Sequence[str],
    *,
    sibling: bool = False,
) -> ComponentPlan:
    """Plan one model.

    Args:
        draft: the file.
        spec: its architecture.
        component: the pipeline component that the model is.
        network: the model without weights.
        made: what the file makes, by target name, in own names.
        names: own names of the file's tensors that must all be used.
        sibling: whether it is a sibling, which FP8 storage and quantization leave alone.

    Raises:
        OverrideArchMismatch: shapes, missing or unexpected tensors, layers that cannot be adopted.
    """
    needed: dict[str, torch.Tensor] = network.state_dict()
    _check_overlap(draft, spec, made, needed)
    made = _with_ones_restored(draft, made, needed)
    _check_shapes(draft, spec, made, needed)
    buffers = {name for name, _ in network.named_buffers()}
    absent = [name for name in needed if name not in made]
    zeros = [name for name in absent if spec.is_zero_where_missing(name)]
    left_alone = [name for name in absent if name in buffers and name.startswith(spec.acceptable_missing)]
    missing = [name for name in absent if name not in zeros and name not in left_alone]
    if missing:
        raise MissingTensors(draft.header.path, missing, spec.name, [name for name in made if name in needed])
    used = {part.source for name, item in made.items() if name in needed for part in ranges_of(item.recipe)}
    unexpected = [draft.keys.stored[name] for name in names if name not in used]
    if unexpected:
        raise UnexpectedTensors(draft.header.path, unexpected, spec.name)
    targets = _Targets(draft, network, skip_patterns(type(network), spec.fp8_skip_patterns), sibling)
    planned = [targets.target(name, made[name], needed[name]) for name in needed if name in made]
    planned += [targets.zeros(name, needed[name]) for name in zeros]
    planned.sort(key=lambda target: target.offset)
    brings_buffers = any(target.name in buffers for target in planned)
    config = dict(network.config)
    return ComponentPlan(component, type(network), config, tuple(planned), tuple(left_alone), brings_buffers)


def _check_overlap(
    draft: Draft, spec: TransformerSpec, made: Mapping[str, Made], needed: Mapping[str, torch.Tensor]
) -> None:
    """A file of which hardly a name fits is of another architecture, not one with missing tensors."""
    common = sum(name in needed for name in made)
    if 10 * common < len(needed):
        found = sample(list(draft.keys.stored.values()), 3)
        why = f"its keys are like {found}, expected are like {sample(list(needed), 3)}"
        raise WrongArchitecture(draft.header.path, spec.name, None, why)


def _check_shapes(
    draft: Draft, spec: TransformerSpec, made: Mapping[str, Made], needed: Mapping[str, torch.Tensor]
) -> None:
    wrong = {
        name: (tuple(needed[name].shape), item.shape)
        for name, item in made.items()
        if name in needed and not _has_shape(draft, item, tuple(needed[name].shape))
    }
    if not wrong:
        return

    def stored(name: str) -> str:
        return " + ".join(dict.fromkeys(draft.keys.stored[part.source] for part in ranges_of(made[name].recipe)))

    for taken in spec.inputs:
        expected, found = wrong.get(taken.weight, ((), ()))
        if len(expected) == len(found) > 1 and expected[1] != found[1]:
            raise InputMismatch(
                draft.header.path, taken.weight, stored(taken.weight), expected, found, len(wrong),
                taken.what, taken.giver,
            )  # fmt: skip
    name, (expected, found) = next(iter(wrong.items()))
    raise ShapeMismatch(draft.header.path, name, stored(name), expected, found, len(wrong))


def _with_ones_restored(
    draft: Draft, made: Mapping[str, Made], needed: Mapping[str, torch.Tensor]
) -> Mapping[str, Made]:
    """GGML's own tools leave out leading dimensions of size 1: a [1, 6, K] table is stored as [6, K]."""
    if draft.header.container != GGUF:
        return made
    restored: dict[str, Made] = {}
    for name, item in made.items():
        wanted = tuple(needed[name].shape) if name in needed else item.shape
        lost = len(wanted) - len(item.shape)
        if lost > 0 and wanted == (1,) * lost + item.shape:
            view = Replay(torch.ops.aten.view.default, (item.recipe, wanted), {}, None)
            item = Made(view, wanted, item.dtype)
        restored[name] = item
    return restored


def _has_shape(draft: Draft, made: Made, wanted: Shape) -> bool:
    """Whether a target has the wanted shape, padding of quantized layers aside."""
    if made.shape == wanted:
        return True
    by_weight = draft.layers_by_weight
    layers = [by_weight.get(draft.keys.stored[part.source]) for part in ranges_of(made.recipe)]
    return all(layer is not None and fits(layer, made.shape, wanted) for layer in layers) and len(layers) == 1


class _Targets:
    """Makes the targets of one network."""

    def __init__(self, draft: Draft, network: ModelMixin, fp8_skips: Sequence[str], sibling: bool) -> None:
        self._draft = draft
        self._layers = draft.layers_by_weight
        self._modules: dict[str, torch.nn.Module] = dict(network.named_modules())
        self._readers = dtype_readers(network)
        self._portable = portable_on(draft.compute, draft.device)
        wanted = None if sibling else draft.quantizes
        self._in_flight = InFlight(network, wanted, draft.dtype, draft.compute) if wanted else None
        rests = draft.rests_in_fp8 and not sibling and wanted is None
        self._fp8 = frozenset(castable_layers(network, fp8_skips)) if rests else frozenset[str]()
        self._keep_in_fp32 = fp32_modules(network)

    def zeros(self, name: str, needed: torch.Tensor) -> TargetTensor:
        """A target that the file leaves out and that is zero by definition."""
        nbytes = needed.numel() * self._draft.dtype.itemsize
        return TargetTensor(name, None, tuple(needed.shape), "", self._draft.dtype, nbytes, 0, 0, 0)

    def target(self, name: str, made: Made, needed: torch.Tensor) -> TargetTensor:
        """A target that the file makes."""
        recipe = _in_stored_names(made.recipe, self._draft.keys.stored)
        infos = [self._draft.header.tensors[part.source] for part in ranges_of(recipe)]
        layers = [self._layers[info.name] for info in infos if info.name in self._layers]
        stored = "+".join(
            dict.fromkeys(self._layers[i.name].format if i.name in self._layers else i.dtype for i in infos)
        )
        offset = min((info.start for info in infos), default=0)
        dtype = self._dtype(name, needed, made.dtype)
        plain = TargetTensor(name, recipe, tuple(needed.shape), stored, dtype, 0, 0, 0, offset)
        if layers and isinstance(recipe, Rows) and self._stays_quantized(plain):
            return self._as_codes(plain, recipe)
        if layers:
            return self._decoded(plain)
        if needed.dtype.is_floating_point and not made.dtype.is_floating_point:
            raise UnsupportedQuantization(
                self._draft.header.path, [f"{infos[0].name} in {infos[0].dtype}"],
                "a weight must hold floating-point values", "Use the bf16, fp16 or fp32 version of the file",
            )  # fmt: skip
        if self._in_flight and self._in_flight.takes(name, self._modules[plain.module]) and not self._is_read(plain):
            form, nbytes, transient = self._in_flight.planned(name, self._modules[plain.module], self._draft.device)
            read = self._as_values(plain, made.dtype, infos[0].start)
            transient += 0 if read.mapped else read.nbytes + read.transient
            return replace(plain, form=form, nbytes=nbytes, transient=transient)
        return self._as_values(plain, made.dtype, infos[0].start if infos else 0)

    def _dtype(self, name: str, needed: torch.Tensor, stored: torch.dtype) -> torch.dtype:
        if not needed.dtype.is_floating_point:
            return needed.dtype
        if name.rpartition(".")[0] in self._fp8:
            return stored if stored in FP8 else STORAGE
        return self._draft.dtype if self._keep_in_fp32.isdisjoint(name.split(".")) else torch.float32

    def _stays_quantized(self, target: TargetTensor) -> bool:
        """Only weights of Linears whose dtype nobody reads, and only where every row comes from codes."""
        return (
            is_rows_of_layers(target.recipe, self._layers)
            and target.name.endswith(".weight")
            and type(self._modules[target.module]) is torch.nn.Linear
            and not self._is_read(target)
        )

    def _is_read(self, target: TargetTensor) -> bool:
        """Whether the network's code reads the dtype of this weight."""
        return is_under(target.module, self._readers)

    def _as_codes(self, target: TargetTensor, recipe: Rows) -> TargetTensor:
        try:
            codes = codes_of(recipe, target.shape, self._layers, read_meta, self._portable)
        except LayerError as error:
            if len(recipe.ranges) > 1:
                return self._decoded(target)
            raise self._draft.refusal(error) from error
        nbytes = sum(tensor.nbytes for tensor in _tensors(codes))
        untouched = codes.weight.dtype.itemsize == 1 and len(recipe.ranges) == 1 and not codes.form.nibbles
        mapped = codes.weight.nbytes if untouched and self._in_place(codes) else 0
        return replace(target, nbytes=nbytes, mapped=mapped, transient=0 if mapped else nbytes, form=codes.form)

    def _decoded(self, target: TargetTensor) -> TargetTensor:
        nbytes = _numel(target) * target.dtype.itemsize
        return replace(target, nbytes=nbytes, transient=2 * _numel(target) * 4, decoded=True)

    def _as_values(self, target: TargetTensor, stored: torch.dtype, start: int) -> TargetTensor:
        nbytes = _numel(target) * target.dtype.itemsize
        whole = isinstance(target.recipe, Rows) and len(target.recipe.ranges) == 1
        same = whole and target.dtype == stored and self._draft.device.type == "cpu"
        mapped = same and self._draft.use_mmap and start % stored.itemsize == 0
        transient = 0 if same else _numel(target) * stored.itemsize
        return replace(target, nbytes=nbytes, mapped=nbytes if mapped else 0, transient=transient)

    def _in_place(self, codes: Codes) -> bool:
        """Whether codes can stay in the file: nothing is done to them, they are on the CPU and mapped."""
        rearranged = self._draft.compute.quantized_matmul and codes.form.holder == "sdnq"
        return self._draft.use_mmap and self._draft.device.type == "cpu" and not rearranged


def _tensors(codes: Codes) -> list[torch.Tensor]:
    every = (codes.weight, codes.scale, codes.scale_2, codes.zero_point, codes.input_scale)
    return [tensor for tensor in every if tensor is not None]


def _numel(target: TargetTensor) -> int:
    count = 1
    for size in target.shape:
        count *= size
    return count


def _in_stored_names(recipe: Recipe, stored: Mapping[str, str]) -> Recipe:
    """The recipe with the file's own names, which the reader knows."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Rows):
            return Rows(tuple(replace(part, source=stored[part.source]) for part in value.ranges))
        if isinstance(value, tuple):
            return tuple(renamed(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
        return replace(value, args=renamed(value.args), kwargs=renamed(value.kwargs)) if hasattr(value, "op") else value

    return renamed(recipe)
