"""A model whose `dtype` is the dtype that it computes in, whatever its weights are stored in.

diffusers reads `model.dtype` off the first floating-point parameter, which in a quantized model may be a
scale or a float8 weight; pipelines cast latents and conditioning to it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from transplant.adapters import AdapterGuard

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

Model = TypeVar("Model", bound="ModelMixin")

_ATTRIBUTE = "_transplant_compute_dtype"


def record_compute_dtype(model: Model, dtype: torch.dtype) -> Model:
    """Make `model.dtype` say `dtype`, and adapters be loaded as such a model bears them (see adapters.py).

    The model stays an instance of its own class, under the same name.
    """
    model.__class__ = _with_recorded_dtype(type(model))
    setattr(model, _ATTRIBUTE, dtype)
    return model


def compute_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype that a model computes in: what everything that is fed to it must have."""
    recorded: torch.dtype | None = getattr(model, _ATTRIBUTE, None)
    return recorded if recorded is not None else getattr(model, "dtype", torch.float32)


@functools.cache
def _with_recorded_dtype(cls: type) -> type:
    if hasattr(cls, "_transplant_recorded"):
        return cls

    def dtype(self: Any) -> torch.dtype:
        return getattr(self, _ATTRIBUTE)

    members = {"dtype": property(dtype), "_transplant_recorded": True, "__module__": cls.__module__}
    bases = (AdapterGuard, cls) if hasattr(cls, "load_lora_adapter") else (cls,)
    return type(cls.__name__, bases, {**members, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__})
