"""Carry a plan out: one loop over the targets in file order, one layer of extra memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transplant.checkpoint.header import Header
from transplant.checkpoint.reader import TensorReader, open_reader
from transplant.errors import LoadCancelled, TransplantError, sample
from transplant.plan import ComponentPlan, LoadPlan, TargetTensor
from transplant.recipe import RowRange, evaluate
from transplant.skeleton import empty_network

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


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
    """
    start = time.perf_counter()
    total, done = plan.resident_bytes, 0
    models: dict[str, ModelMixin] = {}
    with open_reader(plan.header, plan.use_mmap) as reader:
        for part in plan.parts:
            network = empty_network(part.cls, part.config)
            modules = dict(network.named_modules())
            for target in part.targets:
                if cancelled is not None and cancelled():
                    raise LoadCancelled(f"{plan.header.path.name}: the load was cancelled")
                _set_tensor(modules, target.name, _materialise(target, plan.header, reader, plan.device))
                done += target.nbytes
                if progress is not None:
                    progress(Progress(done, total, target.name))
            models[part.component] = _finish(network, part, plan)
    transformer = models.pop(plan.transformer.component)
    return Built(transformer, models, time.perf_counter() - start)


def _materialise(target: TargetTensor, header: Header, reader: TensorReader, device: torch.device) -> torch.Tensor:
    if target.recipe is None:
        return torch.zeros(target.shape, dtype=target.dtype, device=device)

    def read(part: RowRange) -> torch.Tensor:
        return reader.read(header.tensors[part.source], part.start, part.stop)

    tensor = evaluate(target.recipe, read)
    # The narrower of the two dtypes travels: cast before the transfer where it shrinks, after where it grows.
    if target.dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(target.dtype)
    return tensor.to(device).to(target.dtype)


def _set_tensor(modules: Mapping[str, torch.nn.Module], name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = modules[path]
    old: torch.Tensor | None = getattr(module, leaf)
    if isinstance(old, torch.nn.Parameter):
        setattr(module, leaf, torch.nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, leaf, tensor)  # a registered buffer: torch keeps it one


def _finish(network: ModelMixin, part: ComponentPlan, plan: LoadPlan) -> ModelMixin:
    """Put buffers on the device, and check that nothing was left without values."""
    for module in network.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(plan.device))
    tensors: list[tuple[str, Any]] = [*network.named_parameters(), *network.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise TransplantError(
            f"{plan.header.path.name}: {part.cls.__name__} was left without {sample(empty)}. Please report this"
        )
    network.register_to_config(_name_or_path=str(plan.header.path))
    return network.eval()
