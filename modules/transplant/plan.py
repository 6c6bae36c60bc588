"""What loading a file over a base model will do, as a frozen value. Only headers are read.

`plan` either returns a LoadPlan that `build` can carry out, or raises OverrideArchMismatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transplant.architectures import SPECS
from transplant.architectures.detect import Detection, identify, refuse_other_kinds
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Converter, Keys, Layout, TransformerSpec
from transplant.base_model import BaseModel, read_base
from transplant.checkpoint.header import Header, read_header
from transplant.checkpoint.naming import NamedKeys, normalise, split_siblings
from transplant.checkpoint.reader import TORCH_DTYPES, mmap_by_default
from transplant.errors import (
    ConverterFailed,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
    UnknownDtype,
    UnsupportedQuantization,
    WrongArchitecture,
    sample,
)
from transplant.formats.containers import refuse_quantized
from transplant.recipe import CONVERTER_ERRORS, Made, Recipe, Rows, as_named, ranges_of, trace
from transplant.skeleton import make_default_spec, resolve_class, resolve_converter, shapes_only

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetTensor:
    """One parameter or buffer of the model and what it is made of.

    Attributes:
        name: name in the model's state dict.
        recipe: what it is made of, in stored names; None where it is filled with zeros.
        shape: its shape.
        stored: safetensors dtype(s) it comes from, "" where it is filled with zeros.
        dtype: dtype in the loaded model.
        nbytes: bytes in the loaded model.
        transient: bytes needed beside that while it is made.
        mapped: whether it stays a view of the file instead of taking memory of its own.
        offset: file offset of its first byte; targets are built in this order.
    """

    name: str
    recipe: Recipe | None
    shape: Shape
    stored: str
    dtype: torch.dtype
    nbytes: int
    transient: int
    mapped: bool
    offset: int


@dataclass(frozen=True)
class ComponentPlan:
    """One model that the file fills.

    Attributes:
        component: the pipeline component.
        cls: its class.
        config: the config it is made with.
        targets: its tensors, in file order.
        left_alone: buffers that the file does not hold and that keep the values of __init__.
    """

    component: str
    cls: type[ModelMixin]
    config: Mapping[str, Any]
    targets: tuple[TargetTensor, ...]
    left_alone: tuple[str, ...]


@dataclass(frozen=True)
class LoadPlan:
    """What loading a file will do.

    Attributes:
        header: the file's header.
        base: the base model.
        spec: the architecture.
        layout: how the file's keys are written.
        why: the keys that told so.
        prefix: the prefix that its keys carry.
        companions: what else it holds and is not read (kind → number of tensors).
        dropped: stored names that are known junk.
        transformer: the model that replaces the pipeline's.
        siblings: models that it brings along.
        config_changes: config entries that differ from the base's because the file says so.
        device: where the weights go.
        use_mmap: whether the file is mapped.
        warnings: what the user should know, one sentence each.
    """

    header: Header
    base: BaseModel
    spec: TransformerSpec
    layout: str
    why: str
    prefix: str
    companions: Mapping[str, int]
    dropped: tuple[str, ...]
    transformer: ComponentPlan
    siblings: tuple[ComponentPlan, ...]
    config_changes: Mapping[str, Any]
    device: torch.device
    use_mmap: bool
    warnings: tuple[str, ...]

    @property
    def parts(self) -> tuple[ComponentPlan, ...]:
        """The transformer and its siblings."""
        return (self.transformer, *self.siblings)

    @property
    def targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of all parts."""
        return tuple(target for part in self.parts for target in part.targets)

    @property
    def zero_filled(self) -> tuple[str, ...]:
        """Targets that the file leaves out and that are zero by the architecture's definition."""
        return tuple(target.name for target in self.targets if target.recipe is None)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights once loaded."""
        return sum(target.nbytes for target in self.targets)

    @property
    def mapped_bytes(self) -> int:
        """The part of resident_bytes that stays a view of the file."""
        return sum(target.nbytes for target in self.targets if target.mapped)

    @property
    def peak_bytes(self) -> int:
        """Memory of its own that the load takes at most, without the views of the file."""
        return self.resident_bytes - self.mapped_bytes + max((t.transient for t in self.targets), default=0)


def plan(
    file: Path | str,
    base: BaseModel | Path | str,
    *,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
) -> LoadPlan:
    """Judge a file against a base model, from its header alone.

    Args:
        file: a safetensors file that holds a transformer, alone or in a bundle.
        base: a diffusers pipeline folder, or the id of a repository in the local hub cache.
        component: the pipeline component to replace; the architecture's own by default.
        dtype: compute dtype; by default the one that most of the file's floating-point values have.
        device: where the weights go.
        use_mmap: map the file (default everywhere but on Windows) or read it.
        config_kwargs: entries that replace those of the base's config.

    Returns:
        The plan, which `build` can carry out.

    Raises:
        OverrideArchMismatch: the file cannot replace this base's transformer; says why and what to do.
        BaseModelError: the base model cannot be used.
    """
    base = base if isinstance(base, BaseModel) else read_base(base)
    header = read_header(file)
    keys = normalise(header.path, header.tensors)
    spec = spec_for(base, component)
    detection = identify(keys).seen_as(spec)
    refuse_other_kinds(header.path, detection)
    _check_architecture(header, keys, detection, spec)
    refuse_quantized(header, keys)
    draft = _Draft(
        header, keys, dtype or dominant_dtype(header, keys), torch.device(device),
        mmap_by_default() if use_mmap is None else use_mmap,
    )  # fmt: skip
    shapes = {name: header.tensors[stored].shape for name, stored in keys.stored.items()}
    component = component or spec.component
    base_config = base.config(component if component != spec.component else spec.subfolder)
    changes = {**(spec.infer_config(base_config, shapes) if spec.infer_config else {}), **(config_kwargs or {})}
    own, siblings = split_siblings(keys.stored, [sibling.inline_prefix for sibling in spec.siblings])
    junk = {name for name in own if spec.drops(name)}
    network = shapes_only(resolve_class(base.component(component).cls), {**base_config, **changes})
    transformer, layout = _plan_transformer(
        draft, spec, detection, component, network, [name for name in own if name not in junk]
    )
    dropped = tuple(keys.stored[name] for name in own if name in junk)
    return LoadPlan(
        header, base, spec, layout, detection.why, keys.prefix, keys.companions,
        dropped, transformer, _plan_siblings(draft, spec, base, siblings),
        changes, draft.device, draft.use_mmap, _warnings(draft, transformer),
    )  # fmt: skip


def spec_for(base: BaseModel, component: str | None = None) -> TransformerSpec:
    """The architecture of a base model's transformer.

    Raises:
        BaseModelError: the pipeline has no such component, or none that is a transformer or UNet.
    """
    name = component or next((c for c in ("transformer", "unet") if c in base.components), "transformer")
    cls = base.component(name).cls
    spec = next((spec for spec in SPECS if spec.serves(cls, base.pipeline)), None)
    return spec or make_default_spec(cls, name)


def dominant_dtype(header: Header, keys: NamedKeys) -> torch.dtype:
    """The floating-point dtype that most of the transformer's bytes have; bf16 where that is fp8."""
    sizes: dict[str, int] = {}
    for stored in keys.stored.values():
        info = header.tensors[stored]
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    floats = {dtype: size for dtype, size in sizes.items() if dtype in ("BF16", "F16", "F32")}
    return TORCH_DTYPES[max(floats, key=lambda dtype: floats[dtype])] if floats else torch.bfloat16


@dataclass(frozen=True)
class _Draft:
    """What every step of planning one file shares."""

    header: Header
    keys: NamedKeys
    dtype: torch.dtype
    device: torch.device
    use_mmap: bool

    def stored_tensors(self, names: Sequence[str]) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype by own name. Raises UnknownDtype for what torch cannot hold."""
        tensors: dict[str, tuple[Shape, torch.dtype]] = {}
        for name in names:
            info = self.header.tensors[self.keys.stored[name]]
            if info.dtype not in TORCH_DTYPES:
                raise UnknownDtype(self.header.path, info.name, info.dtype)
            tensors[name] = (info.shape, TORCH_DTYPES[info.dtype])
        return tensors


def _check_architecture(header: Header, keys: NamedKeys, detection: Detection, spec: TransformerSpec) -> None:
    telling = any(layout.keys != Keys() for layout in spec.layouts)
    if detection.spec is spec or not telling:  # names that tell nothing are judged against the network's own, later
        return
    if detection.spec is not None:
        raise WrongArchitecture(header.path, spec.name, detection.spec.name, detection.why)
    near = detection.nearest
    hint = f"nearest is {near}; " if near else ""
    expected = sample(spec.layouts[-1].keys.all_of, 3)
    why = f"{hint}its keys are like {sample(list(keys.stored.values()), 3)}, expected are like {expected}"
    raise WrongArchitecture(header.path, spec.name, None, why)


def _plan_transformer(
    draft: _Draft,
    spec: TransformerSpec,
    detection: Detection,
    component: str,
    network: ModelMixin,
    names: Sequence[str],
) -> tuple[ComponentPlan, str]:
    fits = detection.spec is spec and detection.layout
    layout = fits or _layout_by_names(draft, spec, detection, names, set(network.state_dict()))
    made = _make(draft, names, layout.converter, dict(network.config))
    return _plan_component(draft, spec, component, network, made, names), layout.name


def _layout_by_names(
    draft: _Draft, spec: TransformerSpec, detection: Detection, names: Sequence[str], targets: set[str]
) -> Layout:
    """For an architecture without telling keys: the model's own names where most of the file's are."""
    as_stored = [layout for layout in spec.layouts if layout.name == DIFFUSERS_LAYOUT]
    others = [layout for layout in spec.layouts if layout.name != DIFFUSERS_LAYOUT]
    if 2 * sum(name in targets for name in names) >= len(names):
        return as_stored[0]
    if detection.spec is not None:
        raise WrongArchitecture(draft.header.path, spec.name, detection.spec.name, detection.why)
    return (others or as_stored)[0]


def _plan_siblings(
    draft: _Draft, spec: TransformerSpec, base: BaseModel, siblings: Mapping[str, Sequence[str]]
) -> tuple[ComponentPlan, ...]:
    parts: list[ComponentPlan] = []
    for sibling in spec.siblings:
        names = siblings.get(sibling.inline_prefix)
        if not names:
            continue
        config = base.config(sibling.subfolder)
        made = _make(draft, names, sibling.converter, config, sibling.inline_prefix)
        network = shapes_only(resolve_class(sibling.cls), config)
        parts.append(_plan_component(draft, spec, sibling.component, network, made, names))
    return tuple(parts)


def _make(
    draft: _Draft, names: Sequence[str], converter: Converter | None, config: Mapping[str, Any], inline_prefix: str = ""
) -> dict[str, Made]:
    """Recipes in own names, by target name."""
    tensors = draft.stored_tensors(names)
    if converter is None:
        return {name.removeprefix(inline_prefix): made for name, made in as_named(tensors).items()}
    function = resolve_converter(converter)

    def without_prefix(checkpoint: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        own = {name.removeprefix(inline_prefix): tensor for name, tensor in checkpoint.items()}
        return function(checkpoint=own, config=config)

    try:
        return trace(without_prefix, tensors, config)
    except CONVERTER_ERRORS as error:
        title = getattr(function, "__name__", "the converter")
        raise ConverterFailed(draft.header.path, title, f"{type(error).__name__}: {error}") from error


def _plan_component(
    draft: _Draft,
    spec: TransformerSpec,
    component: str,
    network: ModelMixin,
    made: Mapping[str, Made],
    names: Sequence[str],
) -> ComponentPlan:
    """Hold what the file makes against what the network needs; every tensor of both is accounted for."""
    path, stored = draft.header.path, draft.keys.stored
    needed: dict[str, torch.Tensor] = network.state_dict()
    _check_overlap(draft, spec, made, needed)
    _check_shapes(draft, made, needed)
    buffers = {name for name, _ in network.named_buffers()}
    absent = [name for name in needed if name not in made]
    zeros = [name for name in absent if name in spec.zero_init_missing]
    left_alone = [name for name in absent if name in buffers and name.startswith(spec.acceptable_missing)]
    missing = [name for name in absent if name not in zeros and name not in left_alone]
    if missing:
        raise MissingTensors(path, missing, spec.name)
    used = {part.source for name, item in made.items() if name in needed for part in ranges_of(item.recipe)}
    unexpected = [stored[name] for name in names if name not in used]
    if unexpected:
        raise UnexpectedTensors(path, unexpected, spec.name)
    keep = _keep_in_fp32(type(network))
    targets = [_target(draft, name, made[name], needed[name], keep) for name in needed if name in made]
    targets += [_zeros(name, needed[name], draft.dtype) for name in zeros]
    targets.sort(key=lambda target: target.offset)
    return ComponentPlan(component, type(network), dict(network.config), tuple(targets), tuple(left_alone))


def _check_overlap(
    draft: _Draft, spec: TransformerSpec, made: Mapping[str, Made], needed: Mapping[str, torch.Tensor]
) -> None:
    """A file of which hardly a name fits is of another architecture, not one with missing tensors."""
    common = sum(name in needed for name in made)
    if 10 * common < len(needed):
        found = sample(list(draft.keys.stored.values()), 3)
        why = f"its keys are like {found}, expected are like {sample(list(needed), 3)}"
        raise WrongArchitecture(draft.header.path, spec.name, None, why)


def _check_shapes(draft: _Draft, made: Mapping[str, Made], needed: Mapping[str, torch.Tensor]) -> None:
    wrong = [name for name, item in made.items() if name in needed and item.shape != tuple(needed[name].shape)]
    if wrong:
        name = wrong[0]
        sources = dict.fromkeys(draft.keys.stored[part.source] for part in ranges_of(made[name].recipe))
        expected = tuple(needed[name].shape)
        raise ShapeMismatch(draft.header.path, name, " + ".join(sources), expected, made[name].shape, len(wrong))


def _keep_in_fp32(cls: type[ModelMixin]) -> frozenset[str]:
    """Module names that a class keeps in fp32 whatever the compute dtype."""
    modules: Any = getattr(cls, "_keep_in_fp32_modules", None)
    return frozenset([modules] if isinstance(modules, str) else modules or ())


def _target(draft: _Draft, name: str, made: Made, needed: torch.Tensor, keep_in_fp32: frozenset[str]) -> TargetTensor:
    infos = [draft.header.tensors[draft.keys.stored[part.source]] for part in ranges_of(made.recipe)]
    if needed.dtype.is_floating_point and not made.dtype.is_floating_point:
        raise UnsupportedQuantization(
            draft.header.path, [f"{infos[0].name} in {infos[0].dtype}"], "a weight must hold floating-point values",
            "Use the bf16, fp16 or fp32 version of the file",
        )  # fmt: skip
    dtype = draft.dtype if needed.dtype.is_floating_point else needed.dtype
    if needed.dtype.is_floating_point and not keep_in_fp32.isdisjoint(name.split(".")):
        dtype = torch.float32
    nbytes = needed.numel() * dtype.itemsize
    stored_bytes = needed.numel() * made.dtype.itemsize
    one_range = isinstance(made.recipe, Rows) and len(made.recipe.ranges) == 1
    aligned = infos[0].start % made.dtype.itemsize == 0
    mapped = draft.use_mmap and one_range and aligned and dtype == made.dtype and draft.device.type == "cpu"
    in_place = mapped or (one_range and dtype == made.dtype and draft.device.type == "cpu")
    return TargetTensor(
        name, _in_stored_names(made.recipe, draft.keys.stored), made.shape,
        "+".join(dict.fromkeys(info.dtype for info in infos)), dtype, nbytes,
        0 if in_place else stored_bytes, mapped, min(info.start for info in infos),
    )  # fmt: skip


def _zeros(name: str, needed: torch.Tensor, dtype: torch.dtype) -> TargetTensor:
    nbytes = needed.numel() * dtype.itemsize
    return TargetTensor(name, None, tuple(needed.shape), "", dtype, nbytes, 0, False, 0)


def _in_stored_names(recipe: Recipe, stored: Mapping[str, str]) -> Recipe:
    """The recipe with the file's own names, which the reader knows."""

    def renamed(value: Any) -> Any:
        if isinstance(value, Rows):
            return Rows(tuple(replace(part, source=stored[part.source]) for part in value.ranges))
        if isinstance(value, tuple):
            return tuple(renamed(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
        return replace(value, args=renamed(value.args), kwargs=renamed(value.kwargs)) if hasattr(value, "op") else value

    return renamed(recipe)


def _warnings(draft: _Draft, transformer: ComponentPlan) -> tuple[str, ...]:
    fp8 = sum(target.stored.startswith("F8") for target in transformer.targets)
    if not fp8:
        return ()
    return (f"{fp8} tensors are stored in fp8 without scales: their values are taken as they are",)
