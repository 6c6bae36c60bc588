"""Judge a file against a base model. Only headers, quantization markers and small scales are read.

`plan` either returns a LoadPlan that `build` can carry out, or raises OverrideArchMismatch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transplant.architectures import spec_serving
from transplant.architectures.detect import Detection, identify, refuse_other_kinds
from transplant.architectures.gguf_names import contradiction
from transplant.architectures.spec import DIFFUSERS_LAYOUT, Converter, Keys, Layout, TransformerSpec
from transplant.base_model import BaseModel, Component, read_base, saved_quantization
from transplant.branch import Branch, class_for, find_branch
from transplant.checkpoint.gguf import BLOCK_TYPES
from transplant.checkpoint.header import GGUF, Header, read_header
from transplant.checkpoint.naming import NamedKeys, normalise, split_siblings
from transplant.checkpoint.reader import TORCH_DTYPES, mmap_by_default
from transplant.errors import ConverterFailed, SavedQuantizedFolder, WrongArchitecture, sample
from transplant.formats.containers import read_quantization
from transplant.fp8_storage import FP8, is_unknown, support_on, unknown_text
from transplant.load_plan import ComponentPlan, LoadPlan
from transplant.quantized import LayerError
from transplant.recipe import CONVERTER_ERRORS, Made, as_named, trace
from transplant.sdnq_bridge import Compute
from transplant.skeleton import (
    DIFFUSERS,
    foreign_class,
    make_default_spec,
    resolve_class,
    resolve_converter,
    shapes_only,
)
from transplant.small_scales import check_small_scales
from transplant.targets import Draft, plan_component

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


def plan(
    file: Path | str,
    base: BaseModel | Path | str,
    *,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    compute: Compute | None = None,
    spec: TransformerSpec | None = None,
) -> LoadPlan:
    """Judge a file against a base model, from its header and what describes its quantized layers.

    Args:
        file: a safetensors or GGUF file that holds a transformer, alone or in a bundle.
        base: a diffusers pipeline folder, or the id of a repository in the local hub cache.
        component: the pipeline component to replace; the architecture's own by default.
        dtype: compute dtype; by default the one that most of the file's floating-point values have.
        device: where the weights go.
        use_mmap: map the file (default everywhere but on Windows) or read it.
        config_kwargs: entries that replace those of the base's config.
        compute: how quantized layers compute; by default they are dequantized.
        spec: the base model's architecture, by default the known one; a host's may have other siblings.

    Returns:
        The plan, which `build` can carry out.

    Raises:
        OverrideArchMismatch: the file cannot replace this base's transformer; says why and what to do.
        BaseModelError: the base model cannot be used.
    """
    base = base if isinstance(base, BaseModel) else read_base(base)
    header = _header(Path(file))
    keys = normalise(header.path, header.tensors)
    spec = spec or spec_for(base, component)
    detection = _detected(header, keys, spec)
    quantization = read_quantization(header, keys)
    draft = Draft(
        header, keys, quantization.layers, quantization.sidecars, dtype or dominant_dtype(header, keys),
        torch.device(device), mmap_by_default() if use_mmap is None else use_mmap, compute or Compute(),
    )  # fmt: skip
    component = component or spec.component
    base_config = base.config(component if component != spec.component else spec.subfolder)
    changes = {**_inferred(draft, spec, base_config), **(config_kwargs or {})}
    tensors = [name for name in keys.stored if name not in quantization.sidecars]
    own, siblings = split_siblings(tensors, [sibling.inline_prefix for sibling in spec.siblings])
    branch, draft = find_branch(draft, spec, own)
    junk = {name for name in own if spec.drops(name) or (branch and name in branch.left_out)}
    network = _network(spec, branch, base.component(component), {**base_config, **changes})
    names = [name for name in own if name not in junk]
    transformer, layout = _plan_transformer(draft, spec, detection, component, network, names)
    return LoadPlan(
        header, base, spec, layout, detection.why, keys.prefix, keys.companions,
        tuple(keys.stored[name] for name in own if name in junk), draft.layers_by_weight, quantization.source,
        transformer, _plan_siblings(draft, spec, base, siblings), changes,
        draft.dtype, draft.device, draft.use_mmap, draft.compute,
        (*_misplaced(detection, component), *_of_loading(draft, transformer, spec), *_of_gguf(draft, detection)),
        branch, detection.variant,
    )  # fmt: skip


def _check_scales(draft: Draft) -> None:
    """Raises UnsupportedQuantization where scales that are small enough to look at cannot be."""
    try:
        check_small_scales(draft.header, draft.layers if draft.header.container != GGUF else {})
    except LayerError as error:
        raise draft.refusal(error) from error


def _header(file: Path) -> Header:
    """What is in the file. Raises SavedQuantizedFolder where it is such a folder."""
    if (method := saved_quantization(file)) is not None:
        raise SavedQuantizedFolder(file, method)
    return read_header(file)


def spec_for(base: BaseModel, component: str | None = None) -> TransformerSpec:
    """The architecture of a base model's transformer.

    Raises:
        BaseModelError: the pipeline has no such component, or none that is a transformer or UNet.
    """
    name = component or next((c for c in ("transformer", "unet") if c in base.components), "transformer")
    held = base.component(name)
    known = None
    if foreign_class(held.cls, held.library) is None:
        known = spec_serving(held.cls, base.pipeline)
    return known or make_default_spec(held.cls, name, held.library)


def _network(spec: TransformerSpec, branch: Branch | None, held: Component, config: Mapping[str, Any]) -> ModelMixin:
    """The network that a file fills, without weights, in the place of what the base model holds."""
    cls = class_for(spec, branch, held.cls)
    return shapes_only(resolve_class(cls, held.library if cls == held.cls else DIFFUSERS), config)


def dominant_dtype(header: Header, keys: NamedKeys) -> torch.dtype:
    """The floating-point dtype that most of the transformer's bytes have; bf16 where that is fp8.

    bf16 also where there are GGUF blocks: beside them fp32 is the custom for norms and biases, and tells nothing.
    """
    sizes: dict[str, int] = {}
    for stored in keys.stored.values():
        info = header.tensors[stored]
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    if not BLOCK_TYPES.keys().isdisjoint(sizes):
        return torch.bfloat16
    floats = {dtype: size for dtype, size in sizes.items() if dtype in ("BF16", "F16", "F32")}
    return TORCH_DTYPES[max(floats, key=lambda dtype: floats[dtype])] if floats else torch.bfloat16


def _detected(header: Header, keys: NamedKeys, spec: TransformerSpec) -> Detection:
    """What the file is; raises where that is not the base's architecture."""
    detection = identify(keys, metadata=header.metadata).seen_as(spec)
    refuse_other_kinds(header.path, detection)
    undecided = not _tells(spec) or (detection.spec is None and detection.resembles(spec))
    if detection.architecture != spec.name and not undecided:  # undecided: judged by the network's own names, later
        raise _wrong_architecture(header, keys, detection, spec)
    return detection


def _tells(spec: TransformerSpec) -> bool:
    """Whether names tell this architecture."""
    return any(layout.keys != Keys() for layout in spec.layouts)


def _wrong_architecture(
    header: Header, keys: NamedKeys, detection: Detection, spec: TransformerSpec
) -> WrongArchitecture:
    if detection.spec is not None:
        return WrongArchitecture(header.path, spec.name, detection.spec.name, detection.why)
    near = detection.nearest
    hint = f"nearest is {near}; " if near else ""
    expected = sample(spec.layouts[-1].keys.all_of, 3)
    why = f"{hint}its keys are like {sample(list(keys.stored.values()), 3)}, expected are like {expected}"
    return WrongArchitecture(header.path, spec.name, None, why)


def _inferred(draft: Draft, spec: TransformerSpec, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the file's shapes say of the config."""
    shapes = {name: draft.header.tensors[stored].shape for name, stored in draft.keys.stored.items()}
    return spec.infer_config(config, shapes) if spec.infer_config else {}


def _plan_transformer(
    draft: Draft,
    spec: TransformerSpec,
    detection: Detection,
    component: str,
    network: ModelMixin,
    names: Sequence[str],
) -> tuple[ComponentPlan, str]:
    fits = detection.architecture == spec.name and detection.layout
    layout = fits or _layout_by_names(draft, spec, detection, names, network)
    made = _make(draft, names, layout.converter, dict(network.config))
    planned = plan_component(draft, spec, component, network, made, names)
    _check_scales(draft)
    return planned, layout.name


def _layout_by_names(
    draft: Draft, spec: TransformerSpec, detection: Detection, names: Sequence[str], network: ModelMixin
) -> Layout:
    """Where telling keys do not decide: the layout whose names cover most of the model's, its own first."""
    targets, best, most = set(network.state_dict()), spec.layouts[0], -1
    for layout in spec.layouts:
        if most < len(targets):
            covered = len(targets.intersection(_names_made(draft, names, layout, dict(network.config))))
            best, most = (layout, covered) if covered > most else (best, most)
    if 2 * most >= len(targets):
        return best
    if detection.spec is not None or _tells(spec):
        raise _wrong_architecture(draft.header, draft.keys, detection, spec)
    return next((layout for layout in spec.layouts if layout.name != DIFFUSERS_LAYOUT), best)


def _names_made(draft: Draft, names: Sequence[str], layout: Layout, config: Mapping[str, Any]) -> Collection[str]:
    """The names that a file has in a layout; none where the layout's converter does not understand it."""
    try:
        return _make(draft, names, layout.converter, config).keys()
    except ConverterFailed:
        return ()


def _plan_siblings(
    draft: Draft, spec: TransformerSpec, base: BaseModel, siblings: Mapping[str, Sequence[str]]
) -> tuple[ComponentPlan, ...]:
    parts: list[ComponentPlan] = []
    for sibling in spec.siblings:
        names = siblings.get(sibling.inline_prefix)
        if not names:
            continue
        config = base.config(sibling.subfolder)
        made = _make(draft, names, sibling.converter, config, sibling.inline_prefix)
        held = base.components.get(sibling.component)
        network = shapes_only(resolve_class(sibling.cls, held.library if held else DIFFUSERS), config)
        parts.append(plan_component(draft, spec, sibling.component, network, made, names, sibling=True))
    return tuple(parts)


def _make(
    draft: Draft, names: Sequence[str], converter: Converter | None, config: Mapping[str, Any], inline_prefix: str = ""
) -> dict[str, Made]:
    """Recipes in own names, by target name."""
    tensors = draft.tensors(names)
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


def _of_loading(draft: Draft, transformer: ComponentPlan, spec: TransformerSpec) -> tuple[str, ...]:
    return (*_warnings(transformer), *_not_quantized(draft, transformer), *_ignored(draft, transformer.cls, spec))


def _ignored(draft: Draft, cls: type, spec: TransformerSpec) -> tuple[str, ...]:
    """Why FP8 storage or quantization on load that was asked for does nothing, or is done with caution."""
    told: list[str] = []
    if draft.compute.quantize and draft.layers:
        told.append("quantization on load changes nothing: the weights are already quantized and stay as they are")
    if draft.compute.fp8_storage and (draft.layers or draft.quantizes):
        told.append("FP8 storage has no effect: the weights are already quantized and stay as they are")
    elif draft.compute.fp8_storage and not (support := support_on(draft.runs_on)).possible:
        told.append(f"FP8 storage has no effect: it {support.reason}")
    elif draft.compute.fp8_storage and is_unknown(cls, spec.fp8_skip_patterns):
        told.append(unknown_text(cls))
    return tuple(told)


def _not_quantized(draft: Draft, transformer: ComponentPlan) -> tuple[str, ...]:
    """That quantization on load was asked for and finds no layer."""
    if draft.compute.quantize is None or draft.layers or any(target.form for target in transformer.targets):
        return ()
    return ("quantization on load changes nothing: every layer is too small for SDNQ, or on its skip lists",)


def _warnings(transformer: ComponentPlan) -> tuple[str, ...]:
    raw = sum(target.stored.startswith("F8") and target.dtype not in FP8 for target in transformer.targets)
    decoded = sum(target.decoded for target in transformer.targets)
    told: list[str] = []
    if raw:
        told.append(f"{raw} tensors are stored in fp8 without scales: their values are taken as they are")
    if decoded:
        told.append(f"{decoded} quantized weights are decoded to the compute dtype, their place needs it")
    return tuple(told)


def _misplaced(detection: Detection, component: str) -> tuple[str, ...]:
    """What the header says against the place that the file is put in. The place decides all the same."""
    variant = detection.variant
    if variant is None or variant.component in (None, component):
        return ()
    return (f"its header says that it is the {variant.name} one, made for {variant.component}, not for {component}",)


def _of_gguf(draft: Draft, detection: Detection) -> tuple[str, ...]:
    header = draft.header
    if header.container != GGUF:
        return ()
    told: list[str] = []
    if header.path.suffix.lower() != ".gguf":
        told.append(f"it is a GGUF file, its suffix {header.path.suffix!r} notwithstanding, and is loaded as one")
    if against := contradiction((header.metadata or {}).get("general.architecture"), detection.architecture):
        told.append(against)
    if draft.compute.quantized_matmul and draft.layers:
        told.append("quantized matmul does not apply to GGUF layers: they multiply in the compute dtype")
    return tuple(told)
