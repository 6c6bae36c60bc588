"""LoRA and its kin, through diffusers and PEFT, on layers that store their weights narrower than they compute.

An adapter works beside such a weight, in the compute dtype, and leaves no trace when it is unloaded. What would
have to read the weight or change it is refused: the stored codes are not the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from transplant.errors import AdapterRefused, sample

if TYPE_CHECKING:
    from diffusers.loaders.peft import PeftAdapterMixin as _Base
else:
    _Base = object

_MAGNITUDES = ("lora_magnitude_vector", "dora_scale")
_NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def let_adapters_compute_in(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Tell PEFT (0.19 or newer) the dtype of a layer's adapters, which would else be that of its stored weight."""
    told: Any = layer
    told.compute_dtype = dtype


class AdapterGuard(_Base):
    """Mixed into the class of a model that has such layers; loads adapters as diffusers does, or refuses them."""

    def load_lora_adapter(self, pretrained_model_name_or_path_or_dict: Any, *args: Any, **kwargs: Any) -> None:
        """See diffusers' PeftAdapterMixin. Raises AdapterRefused; no adapter is left behind then."""
        given = pretrained_model_name_or_path_or_dict
        if isinstance(given, dict) and any(mark in str(key) for key in given for mark in _MAGNITUDES):
            raise AdapterRefused(*_DORA)
        before = _names(self)
        super().load_lora_adapter(given, *args, **kwargs)
        self._check_adapters(before)

    def add_adapter(self, adapter_config: Any, adapter_name: str = "default") -> None:
        """See diffusers' PeftAdapterMixin. Raises AdapterRefused; no adapter is left behind then."""
        start = getattr(adapter_config, "init_lora_weights", True)
        if isinstance(start, str) and start != "gaussian":
            raise AdapterRefused(f"it begins with values computed from the weights ({start})", "use another beginning")
        if getattr(adapter_config, "use_dora", False):
            raise AdapterRefused(*_DORA)
        before = _names(self)
        super().add_adapter(adapter_config, adapter_name)
        self._check_adapters(before)

    def fuse_lora(self, *args: Any, **kwargs: Any) -> None:
        """See diffusers' PeftAdapterMixin. Raises AdapterRefused before anything is changed."""
        narrow = [name for name, _ in _narrow_layers(self)] if _names(self) else []
        if narrow:
            raise AdapterRefused(
                f"fusing would round the weights of {len(narrow)} layers anew, for example {sample(narrow, 1)}",
                "leave it beside the weights, where it is exact, or load a plain bf16 file without FP8 storage",
            )
        super().fuse_lora(*args, **kwargs)

    def _check_adapters(self, before: set[str]) -> None:
        """Take back what was added where it cannot be right."""
        added = _names(self) - before
        reasons = [reason for name, layer in _narrow_layers(self) if (reason := _objection(name, layer, added))]
        if reasons:
            self.delete_adapters(sorted(added))
            raise AdapterRefused(*reasons[0])


_DORA = (
    "DoRA needs the norms of the weights themselves",
    "use a plain LoRA, or load a bf16 file with neither FP8 storage nor quantization",
)


def _names(model: object) -> set[str]:
    """The adapters that a model has."""
    return set(getattr(model, "peft_config", {}))


def _narrow_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """PEFT's layers around those that store their weights narrower than they compute."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module.get_base_layer(), "compute_dtype"):
            yield name, module


def _objection(name: str, layer: Any, added: set[str]) -> tuple[str, str] | None:
    """Why an adapter of one layer cannot be right, and the way out."""
    if not added.isdisjoint(getattr(layer, "lora_variant", ())):
        return _DORA
    if any(parameter.dtype in _NARROW for parameter in _adapter_parameters(layer)):
        return f"this PEFT stores the adapter of {name} in float8", "install PEFT 0.19 or newer"
    base = layer.get_base_layer()
    is_linear = isinstance(base, torch.nn.Linear)
    if is_linear and not hasattr(layer, "lora_A") and base.weight.shape != (base.out_features, base.in_features):
        return f"it needs the shape of the weight of {name}, which is stored otherwise", "use a plain LoRA"
    return None


def _adapter_parameters(layer: Any) -> Iterator[torch.Tensor]:
    return (p for name, p in layer.named_parameters() if not name.startswith("base_layer."))
