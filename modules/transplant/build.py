"""Carry a plan out: one loop over the targets in file order, one layer of extra memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from transplant.checkpoint.reader import TensorReader, open_reader
from transplant.compute_dtype import record_compute_dtype
from transplant.errors import LoadCancelled, NonFiniteWeight, TransplantError, sample
from transplant.formats.base import Codes
from transplant.fp8_storage import FP8, hook_fp8_layers, stored
from transplant.holders import holder_of
from transplant.load_plan import ComponentPlan, LoadPlan, TargetTensor
from transplant.nonfinite import is_finite
from transplant.quantized import LayerError, codes_of, decode_rows
from transplant.recipe import RowRange, Rows, evaluate, ranges_of
from transplant.sdnq_bridge import IN_FLIGHT, Compute, InFlight, portable_on
from transplant.skeleton import empty_network, shapes_only
from transplant.targets import refusal

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


log = logging.getLogger("transplant")


@dataclass(frozen=True)
class Progress:
    """How far a load is.

    Attributes:
        done_bytes: bytes of weights in place.
        total_bytes: bytes of weights altogether.
        what: the tensor at hand.
    """

    done_bytes: int
    total_bytes: int
    what: str


@dataclass(frozen=True)
class Built:
    """A loaded transformer.

    Attributes:
        transformer: the model, in eval mode, on the plan's device.
        siblings: models that the file brought along, by component.
        seconds: wall time of the build.
    """

    transformer: ModelMixin
    siblings: Mapping[str, ModelMixin]
    seconds: float


def build(
    plan: LoadPlan,
    *,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Built:
    """Load what a plan describes.

    Args:
        plan: from `plan`.
        progress: called after every tensor.
        cancelled: asked before every tensor; True ends the load.

    Returns:
        The transformer and its siblings, with no tensor left on meta.

    Raises:
        LoadCancelled: `cancelled` said so. Everything that was loaded so far is freed.
        UnreadableFile: the file changed after it was planned, or the disk failed.
        OverrideArchMismatch: what only the values can tell: scales that cannot be, NaN in what is quantized.
    """
    start = time.perf_counter()
    total, done = plan.resident_bytes, 0
    models: dict[str, ModelMixin] = {}
    with open_reader(plan.header, plan.use_mmap) as reader:
        for part in plan.parts:
            network = _network_to_fill(part)
            builder = _Builder(plan, part, network, reader)
            for target in part.targets:
                if cancelled is not None and cancelled():
                    raise LoadCancelled(f"{plan.header.path.name}: the load was cancelled")
                builder.put(target)
                done += target.nbytes
                if progress is not None:
                    progress(Progress(done, total, target.name))
            models[part.component] = _finish(network, part, plan, builder.in_flight)
    transformer = models.pop(plan.transformer.component)
    return Built(transformer, models, time.perf_counter() - start)


def _network_to_fill(part: ComponentPlan) -> ModelMixin:
    """A network without weights; its buffers are computed only where the file does not bring them all.

    The position table of Stable Diffusion 3.5 takes seconds and gigabytes to compute.
    """
    if part.brings_buffers:
        network = shapes_only(part.cls, part.config)
        filled = {target.name for target in part.targets}
        if all(name in filled for name, _ in network.named_buffers()) and not _has_loose_meta_tensors(network):
            return network
    return empty_network(part.cls, part.config)


def _has_loose_meta_tensors(network: torch.nn.Module) -> bool:
    """Whether a module keeps a tensor that is neither parameter nor buffer, which nobody would fill."""
    return any(
        isinstance(value, torch.Tensor) and value.is_meta
        for module in network.modules()
        for value in vars(module).values()
    )


class _Builder:
    """Puts targets into one network."""

    def __init__(self, plan: LoadPlan, part: ComponentPlan, network: ModelMixin, reader: TensorReader) -> None:
        self._plan = plan
        self._modules: dict[str, torch.nn.Module] = dict(network.named_modules())
        self._reader = reader
        self._portable = portable_on(plan.compute, plan.device)
        in_flight = any(target.form and target.form.holder == IN_FLIGHT for target in part.targets)
        wanted = plan.compute.quantize if in_flight else None
        self.in_flight = InFlight(network, wanted, plan.dtype, plan.compute) if wanted else None

    def put(self, target: TargetTensor) -> None:
        """Make one target and put it in its place.

        Raises:
            UnsupportedQuantization: scales that cannot be.
            NonFiniteWeight: a weight that cannot be quantized.
        """
        try:
            if target.form is not None and target.form.holder == IN_FLIGHT:
                self._put_quantized(target)
            elif target.form is not None:
                self._put_codes(target)
            else:
                set_tensor(self._modules, target.name, self._values(target))
        except LayerError as error:
            raise refusal(self._plan.header, error, len(self._plan.layers)) from error

    def _put_codes(self, target: TargetTensor) -> None:
        assert isinstance(target.recipe, Rows)
        codes = codes_of(target.recipe, target.shape, self._plan.layers, self._reader.read, self._portable)
        module, compute = self._modules[target.module], layer_compute(self._plan, target)
        layer = holder_of(codes.form).quantized_layer(module, _moved(codes, self._plan.device), target.dtype, compute)
        self._replace(target.module, layer)

    def _put_quantized(self, target: TargetTensor) -> None:
        assert self.in_flight is not None
        module, weight = self._modules[target.module], self._values(target)
        if not is_finite(weight):
            raise NonFiniteWeight(self._plan.header.path, target.name)
        self._replace(target.module, self.in_flight.layer(target.name, module, weight))

    def _replace(self, path: str, layer: torch.nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._modules[parent], name, layer)
        self._modules[path] = layer

    def _values(self, target: TargetTensor) -> torch.Tensor:
        plan = self._plan
        if target.recipe is None:
            return torch.zeros(target.shape, dtype=target.dtype, device=plan.device)

        def read(part: RowRange) -> torch.Tensor:
            if part.source in plan.layers:
                return decode_rows(part, plan.layers, self._reader.read, target.dtype, plan.compute)
            return self._reader.read(plan.header.tensors[part.source], part.start, part.stop)

        tensor = evaluate(target.recipe, read)
        if target.dtype in FP8:
            return _at_rest(tensor, target, plan)
        # The narrower of the two dtypes travels: cast before the transfer where it shrinks, after where it grows.
        if target.dtype.itemsize < tensor.dtype.itemsize:
            tensor = tensor.to(target.dtype)
        return tensor.to(plan.device).to(target.dtype)


def _at_rest(tensor: torch.Tensor, target: TargetTensor, plan: LoadPlan) -> torch.Tensor:
    """A weight for FP8 storage: the values that the compute dtype would have, in fp8 where they fit."""
    if tensor.dtype in FP8:
        return tensor.to(plan.device)
    at_rest = stored(tensor.to(plan.device).to(plan.dtype))
    if at_rest.dtype not in FP8:
        log.warning("%s: %s holds more than float8 can and stays in %s", plan.header.path.name, target.name, plan.dtype)
    return at_rest


def layer_compute(plan: LoadPlan, target: TargetTensor) -> Compute:
    """How one layer computes: never in low precision where its file says so."""
    return replace(plan.compute, quantized_matmul="") if _is_full_precision(plan, target) else plan.compute


def _is_full_precision(plan: LoadPlan, target: TargetTensor) -> bool:
    """Whether the file asks that a layer is not computed in low precision."""
    sources = [part.source for part in ranges_of(target.recipe)] if target.recipe else []
    return any(plan.layers[source].full_precision_matmul for source in sources if source in plan.layers)


def _moved(codes: Codes, device: torch.device) -> Codes:
    def to(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    return replace(
        codes, weight=codes.weight.to(device), scale=codes.scale.to(device), scale_2=to(codes.scale_2),
        zero_point=to(codes.zero_point), input_scale=to(codes.input_scale),
    )  # fmt: skip


def set_tensor(modules: Mapping[str, torch.nn.Module], name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer, given the modules by name."""
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    old: torch.Tensor | None = getattr(module, leaf)
    if isinstance(old, torch.nn.Parameter):
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, leaf, tensor)  # a registered buffer: torch keeps it one


def settle(network: ModelMixin, device: torch.device, name_of_file: str) -> None:
    """Put buffers on the device, and check that nothing was left without values."""
    for module in network.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    tensors: list[tuple[str, Any]] = [*network.named_parameters(), *network.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise TransplantError(
            f"{name_of_file}: {type(network).__name__} was left without {sample(empty)}. Please report this"
        )


def _finish(network: ModelMixin, part: ComponentPlan, plan: LoadPlan, in_flight: InFlight | None) -> ModelMixin:
    """Mark the network as what it is."""
    settle(network, plan.device, plan.header.path.name)
    forms = [target.form for target in part.targets if target.form is not None]
    if in_flight:
        in_flight.finish(network)
        record_compute_dtype(network, plan.dtype)
    elif forms:
        full_precision = [target.module for target in part.targets if target.form and _is_full_precision(plan, target)]
        holder_of(forms[0]).mark_quantized(network, plan.dtype, plan.compute, full_precision)
        record_compute_dtype(network, plan.dtype)
    elif any(target.dtype in FP8 for target in part.targets):
        hook_fp8_layers(network, plan.dtype, plan.header.path.name)
    network.register_to_config(_name_or_path=str(plan.header.path))
    return network.eval()
