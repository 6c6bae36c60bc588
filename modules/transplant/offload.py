"""Offloading, diffusers' own: models rest in RAM and come to the device while they compute."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

log = logging.getLogger("transplant")

Mode = Literal["none", "model", "group"]

RAM = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """Where models rest while they do not compute.

    Attributes:
        mode: "none": on their device. "model": in RAM, each comes whole when it is needed and leaves for the next
            one (`enable_model_cpu_offload`). "group": in RAM, each layer comes for its own forward
            (`enable_group_offload`, leaf level).
        stream: let the next layers come while one computes, for "group" on CUDA; takes pinned RAM.
    """

    mode: Mode = "none"
    stream: bool = False


def refusal_on(device: torch.device) -> str:
    """Why offloading does nothing on a device; "" where it acts.

    The environment variable TRANSPLANT_OFFLOAD_ON_CPU=1 lets it act on the CPU, where nothing is gained, for tests.
    """
    if device.type in ("cuda", "xpu") or os.environ.get("TRANSPLANT_OFFLOAD_ON_CPU") == "1":
        return ""
    return f"needs CUDA or XPU, the models run on {device.type}"


def enable(pipeline: Any, offload: Offload, device: torch.device) -> None:
    """Offload every model of a pipeline. Again after one was replaced: those that are offloaded already stay so.

    Args:
        pipeline: a diffusers pipeline whose models lie in RAM.
        offload: how.
        device: where they compute.
    """
    if offload.mode == "none":
        return
    if offload.mode == "model" and getattr(pipeline, "model_cpu_offload_seq", None):
        pipeline.enable_model_cpu_offload(device=device)
        return
    if offload.mode == "model":
        log.info("%s cannot be offloaded model by model: it is offloaded by groups", type(pipeline).__name__)
    for model in _models(pipeline):
        _enable_group(model, offload.stream and device.type == "cuda", device)


def disable(pipeline: Any) -> None:
    """Take the hooks off every model of a pipeline and leave the models in RAM; nothing where there are none."""
    from diffusers.hooks import HookRegistry

    if getattr(pipeline, "_all_hooks", None):
        pipeline.remove_all_hooks()
        for model in _models(pipeline):
            model.to(RAM)
    for model in _models(pipeline):
        if _is_grouped(model):
            registry = HookRegistry.check_if_exists_or_initialize(model)
            for name in _GROUP_HOOKS:
                registry.remove_hook(name, recurse=True)


def free(pipeline: Any) -> None:
    """After a call that did not come to its end: let no model stay on the device."""
    if hasattr(pipeline, "maybe_free_model_hooks"):
        pipeline.maybe_free_model_hooks()


_GROUP_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""Names by which diffusers registers them (diffusers/hooks/group_offloading.py)."""


def _enable_group(model: torch.nn.Module, stream: bool, device: torch.device) -> None:
    from diffusers.hooks import apply_group_offloading

    if _is_grouped(model):
        return
    if not getattr(model, "_supports_group_offloading", True):
        log.info("%s cannot be offloaded by groups: it stays on %s", type(model).__name__, device)
        model.to(device)
        return
    apply_group_offloading(
        model, onload_device=device, offload_device=RAM, offload_type="leaf_level", use_stream=stream
    )


def _is_grouped(model: torch.nn.Module) -> bool:
    registries: list[Any] = [getattr(module, "_diffusers_hook", None) for module in model.modules()]
    return any(registry is not None and registry.get_hook(_GROUP_HOOKS[0]) is not None for registry in registries)


def _models(pipeline: Any) -> Iterable[torch.nn.Module]:
    return [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
