"""FP8 storage: weights rest in float8_e4m3fn, and each layer computes in the model's own dtype.

The same layers and the same numbers as diffusers' `enable_layerwise_casting`, except that the stored
tensor itself is put back after a forward, also after one that fails, instead of being cast again.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from transplant.adapters import let_adapters_compute_in
from transplant.compute_dtype import record_compute_dtype
from transplant.dtype_readers import dtype_readers, is_under
from transplant.errors import TransplantError

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

log = logging.getLogger("transplant")

STORAGE = torch.float8_e4m3fn
LARGEST = torch.finfo(STORAGE).max
"""448: what is larger would become NaN, so such a tensor stays as it is."""

FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_CAUTIOUS = (
    "embed", "time", "caption", r"^(img|txt|text)_in$", r"^\w*proj_(in|out)$", "final", "^out_layer", "norm",
    "modulation",
)  # fmt: skip
"""For a class that declares nothing and has no spec: every embedder and every final layer stays."""


@dataclass(frozen=True)
class Support:
    """Whether FP8 storage does anything, and if not, why."""

    possible: bool
    reason: str


def support_on(device: torch.device) -> Support:
    """Whether a device can hold weights in fp8.

    Torch casts float8 on CUDA and XPU. On the CPU nothing would be gained; the environment variable
    TRANSPLANT_FP8_ON_CPU=1 runs it there all the same, for tests.
    """
    if device.type in ("cuda", "xpu") or os.environ.get("TRANSPLANT_FP8_ON_CPU") == "1":
        return Support(True, "weights are held in float8_e4m3fn")
    return Support(False, f"needs CUDA or XPU, the models run on {device.type}")


def skip_patterns(cls: type, of_spec: Iterable[str]) -> tuple[str, ...]:
    """Patterns of module names that stay in the compute dtype.

    Args:
        cls: the model's class, which may declare some.
        of_spec: those of its architecture.

    Returns:
        diffusers' defaults, the class's own, its fp32 modules, the architecture's; cautious ones where
        neither class nor architecture names any.
    """
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    own = [*_declared(cls), *of_spec] or list(_CAUTIOUS)
    fp32: Any = getattr(cls, "_keep_in_fp32_modules", None) or []
    return tuple(dict.fromkeys([*DEFAULT_SKIP_MODULES_PATTERN, *own, *([fp32] if isinstance(fp32, str) else fp32)]))


def is_unknown(cls: type, of_spec: Iterable[str]) -> bool:
    """Whether neither a class nor its architecture says what must stay, so that the cautious patterns apply."""
    return not [*_declared(cls), *of_spec]


def unknown_text(cls: type) -> str:
    """What the user should know of FP8 storage for such a class."""
    return f"nothing is known of FP8 storage for a {cls.__name__}: every embedder and last layer stays as it is"


def _declared(cls: type) -> list[str]:
    return list(getattr(cls, "_skip_layerwise_casting_patterns", None) or [])


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether a library has quantized a model: its weights are left as they are."""
    return bool(getattr(model, "is_quantized", False)) or getattr(model, "hf_quantizer", None) is not None


def castable_layers(network: torch.nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the Linear and Conv layers whose weights may rest in fp8.

    A pattern that matches a module's name takes out everything under it. Layers of quantizers are not
    plain Linears and are left alone, as are layers whose stored dtype the network's code reads.
    """
    compiled = [re.compile(pattern) for pattern in patterns]
    readers = dtype_readers(network)
    skipped: set[str] = set()
    found: list[str] = []
    for name, module in network.named_modules():
        parent = name.rpartition(".")[0]
        if parent in skipped or (name and any(pattern.search(name) for pattern in compiled)):
            skipped.add(name)
        elif type(module) in _LAYERS and not is_under(name, readers) and not _is_adapter(name):
            found.append(name)
    return tuple(found)


def _is_adapter(name: str) -> bool:
    """Whether a module is a part of one of PEFT's adapters, which are small and stay as they are."""
    return any(part.startswith(("lora_", "lokr_", "hada_")) for part in name.split("."))


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in fp8; the tensor itself where it is in fp8 already or holds more than fp8 can."""
    if tensor.dtype in FP8 or not tensor.numel():
        return tensor
    least, most = torch.aminmax(tensor)
    return tensor if max(-float(least), float(most)) > LARGEST else tensor.to(STORAGE)


def store_in_fp8(model: ModelMixin, of_spec: Iterable[str], name: str) -> int:
    """Put a loaded model's weights into fp8, layer by layer. Twice is once.

    Args:
        model: a model that computes in one dtype.
        of_spec: skip patterns of its architecture.
        name: what it is called in the log.

    Returns:
        How many layers rest in fp8.

    Raises:
        TransplantError: its weights are in the hands of an offloading hook; nothing was changed.
    """
    if is_quantized(model):
        log.info("%s: FP8 storage has no effect, its weights are already quantized", name)
        return 0
    of_spec = tuple(of_spec)
    _check_not_offloaded(model, name)
    if is_unknown(type(model), of_spec):
        log.warning("%s: %s", name, unknown_text(type(model)))
    dtype = model.dtype
    for layer in castable_layers(model, skip_patterns(type(model), of_spec)):
        for parameter in model.get_submodule(layer).parameters(recurse=False):
            parameter.data = stored(parameter.data)
    return hook_fp8_layers(model, dtype, name)


def _check_not_offloaded(model: torch.nn.Module, name: str) -> None:
    """Offloading keeps copies of the weights that it would bring back: the cast must come before it."""
    hooks: list[Any] = [getattr(module, "_diffusers_hook", None) for module in model.modules()]
    grouped = any(hook is not None and hook.get_hook("group_offloading") is not None for hook in hooks)
    if grouped or any(parameter.is_meta for parameter in model.parameters()):
        raise TransplantError(f"{name}: its weights are offloaded already; switch FP8 storage on before offloading")


def triton_reads_e4m3(capabilities: Iterable[tuple[int, int]]) -> bool:
    """Whether torch.compile can cast float8_e4m3fn on CUDA devices of these compute capabilities: from 8.9 on."""
    return all(capability >= (8, 9) for capability in capabilities)


def _widened(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


@functools.cache
def _cast_for_here() -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    """The cast up, kept out of torch.compile where Triton cannot do it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if triton_reads_e4m3(torch.cuda.get_device_capability(index) for index in range(count)):
        return _widened
    opaque: Any = torch.compiler.disable(_widened)
    return opaque


def hook_fp8_layers(model: ModelMixin, dtype: torch.dtype, name: str) -> int:
    """Let every plain layer whose parameters rest in fp8 compute in `dtype`, and log what was done.

    Returns:
        How many layers rest in fp8.
    """
    plain = [module for name, module in model.named_modules() if type(module) in _LAYERS and not _is_adapter(name)]
    held = [module for module in plain if any(p.dtype in FP8 for p in module.parameters(recurse=False))]
    for module in held:
        _hook(module, dtype)
        let_adapters_compute_in(module, dtype)
    if held:
        record_compute_dtype(model, dtype)
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    log.info(
        "FP8 storage for %s: storage %s, compute %s, parameters %.0f MB, %d layers cast, %d skipped",
        name, STORAGE, dtype, megabytes, len(held), len(plain) - len(held),
    )  # fmt: skip
    return len(held)


def _hook(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Register the hook under the name by which diffusers finds a model's compute dtype; twice is once."""
    from diffusers.hooks import HookRegistry, ModelHook

    cast = _cast_for_here()

    class Fp8StorageHook(ModelHook):
        """Computes with the weights cast up, and puts the stored tensors back whatever happens."""

        compute_dtype = dtype
        fn_ref: Any

        def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            at_rest = [(p, p.data) for p in module.parameters(recurse=False) if p.dtype in FP8]
            try:
                for parameter, data in at_rest:
                    parameter.data = cast(data, self.compute_dtype)
                return self.fn_ref.original_forward(*args, **kwargs)
            finally:
                for parameter, data in at_rest:
                    parameter.data = data

    registry = HookRegistry.check_if_exists_or_initialize(module)
    if registry.get_hook("layerwise_casting") is None:
        registry.register_hook(Fp8StorageHook(), "layerwise_casting")
