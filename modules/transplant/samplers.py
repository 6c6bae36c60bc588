"""Samplers by the names that SD.Next's users know, and the diffusers scheduler behind each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_SAMPLER = "Default"
"""The base model's own scheduler."""


@dataclass(frozen=True)
class Sampler:
    """A scheduler of diffusers and how it is set.

    Attributes:
        name: as shown, and as a picture's metadata have it.
        cls: class name in diffusers.
        is_flow: whether it is for models of flow matching; else for models that predict noise or velocity.
        config: what differs from the base model's own scheduler config.
    """

    name: str
    cls: str
    is_flow: bool
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


_FLOW: Mapping[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}

# Flow matching pipelines give their own sigmas, which few schedulers take.
_ALL = (
    Sampler("Euler FlowMatch", "FlowMatchEulerDiscreteScheduler", True),
    Sampler("LCM FlowMatch", "FlowMatchLCMScheduler", True),
    Sampler("UniPC FlowMatch", "UniPCMultistepScheduler", True, _FLOW),
    Sampler("Euler", "EulerDiscreteScheduler", False),
    Sampler("Euler a", "EulerAncestralDiscreteScheduler", False),
    Sampler("DPM++ 2M", "DPMSolverMultistepScheduler", False),
    Sampler("DPM++ 2M Karras", "DPMSolverMultistepScheduler", False, {"use_karras_sigmas": True}),
    Sampler("UniPC", "UniPCMultistepScheduler", False),
    Sampler("DEIS", "DEISMultistepScheduler", False),
    Sampler("Heun", "HeunDiscreteScheduler", False),
    Sampler("DDIM", "DDIMScheduler", False),
    Sampler("LCM", "LCMScheduler", False),
)

SAMPLERS = {sampler.name: sampler for sampler in _ALL}
"""Every sampler by its name."""


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler is for models of flow matching."""
    config = scheduler.config
    return "FlowMatch" in type(scheduler).__name__ or bool(config.get("use_flow_sigmas", False))


def sampler_names(scheduler: Any) -> list[str]:
    """The samplers that a pipeline with this scheduler can use, the base model's own first."""
    wanted = is_flow(scheduler)
    return [DEFAULT_SAMPLER, *(name for name, sampler in SAMPLERS.items() if sampler.is_flow == wanted)]


def make_scheduler(name: str, own: Any) -> Any:
    """The scheduler behind a sampler, set as the base model's own.

    Args:
        name: one of `sampler_names(own)`.
        own: the base model's scheduler.

    Raises:
        ValueError: there is no such sampler for this model.
    """
    if name in ("", DEFAULT_SAMPLER):
        return own
    sampler = SAMPLERS.get(name)
    if sampler is None or sampler.is_flow != is_flow(own):
        raise ValueError(f"there is no sampler {name!r} for this model: choose from {', '.join(sampler_names(own))}")
    import diffusers

    config = {**own.config, **sampler.config}
    if sampler.is_flow and "shift" in own.config:
        config["flow_shift"] = own.config["shift"]  # the same number by another name
    return getattr(diffusers, sampler.cls).from_config(config)
