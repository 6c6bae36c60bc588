"""What the core needs of a host."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from transplant.checkpoint.reader import mmap_by_default
from transplant.errors import OptionError
from transplant.offload import RAM, Offload, refusal_on
from transplant.sdnq_bridge import Compute, QuantizeOnLoad
from transplant.sdnq_names import OPTION_KEYS, check_names


@dataclass(frozen=True)
class LoadSettings:
    """How models are loaded.

    Attributes:
        device: where they run.
        dtype: their compute dtype.
        use_mmap: whether weights may stay views of their file.
        compute: how quantized layers compute.
        keep: how many transformers that were swapped out stay in RAM.
        offload: whether they rest in RAM and come to the device while they compute.
    """

    device: torch.device
    dtype: torch.dtype
    use_mmap: bool
    compute: Compute = field(default_factory=Compute)
    keep: int = 0
    offload: Offload = field(default_factory=Offload)

    @property
    def rests_on(self) -> torch.device:
        """Where models lie while they do not compute."""
        return self.device if self.offload.mode == "none" else RAM

    def offloaded(self, offload: Offload) -> LoadSettings:
        """These settings with offloading, where it does anything on the device."""
        if offload.mode == "none" or refusal_on(self.device):
            return self
        return replace(self, offload=offload, compute=replace(self.compute, runs_on=self.device))


class Host(Protocol):
    """A program that holds one pipeline and lets its user choose transformers."""

    def load_settings(self) -> LoadSettings:
        """How the next load is to be done."""
        ...

    def report(self, text: str, fraction: float | None, total_bytes: int | None = None) -> None:
        """Show what is being done and how far it is (0 to 1, None where that is not known), of how many bytes."""
        ...

    def cancelled(self) -> bool:
        """Whether the user wants the load at hand to end."""
        ...


@dataclass
class PlainHost:
    """A host without a user interface: fixed settings, progress to nobody, never cancelled."""

    settings: LoadSettings

    def load_settings(self) -> LoadSettings:
        """See Host."""
        return self.settings

    def report(self, text: str, fraction: float | None, total_bytes: int | None = None) -> None:
        """See Host."""

    def cancelled(self) -> bool:
        """See Host."""
        return False


def compute_from(get: Callable[[str], Any]) -> Compute:
    """How layers compute, from the options.

    Args:
        get: gives the value of an option by key.

    Raises:
        OptionError: SDNQ does not know a dtype or a pattern; named by its option.
    """
    mode = get("sdnq_quantize_weights_mode")
    wanted = QuantizeOnLoad(
        mode, get("sdnq_quantize_weights_group_size"), get("sdnq_use_svd"), get("sdnq_svd_rank"),
        get("sdnq_use_hadamard"), module_names(get("sdnq_modules_to_not_convert")),
        modules_by_dtype("sdnq_modules_dtype_dict", get("sdnq_modules_dtype_dict")) if mode != "none" else (),
    )  # fmt: skip
    if mode != "none":
        check_names(wanted, OPTION_KEYS, get("sdnq_dequantize_compile"))
    return Compute(
        quantized_matmul=get("sdnq_quantized_matmul_mode") if get("sdnq_use_quantized_matmul") else "",
        compiled=get("sdnq_dequantize_compile"),
        dequantize_fp32=get("sdnq_dequantize_fp32"),
        fp8_storage=get("fp8_storage"),
        quantize=None if mode == "none" else wanted,
    )


def check_modules(leave: str, others: str, compiled: bool) -> None:
    """Check the values of the options that name modules. Imports SDNQ where there is anything to ask it.

    Args:
        leave: names and patterns, separated by commas.
        others: JSON as `modules_by_dtype` takes it.
        compiled: whether SDNQ is to compile, where this is its first import.

    Raises:
        OptionError: a value cannot be used; named by its option.
    """
    names, by_dtype = module_names(leave), modules_by_dtype(OPTION_KEYS.modules_dtype_dict, others)
    if names or by_dtype:
        wanted = QuantizeOnLoad("int8", modules_to_not_convert=names, modules_dtype_dict=by_dtype)
        check_names(wanted, OPTION_KEYS, compiled)


def module_names(text: str) -> tuple[str, ...]:
    """The names in a text that separates them by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def modules_by_dtype(key: str, text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Which modules get which dtype, from JSON like {"int8": ["attention"]}; a text for a list is split at commas.

    Raises:
        OptionError: it is something else; named by `key`.
    """
    try:
        value: Any = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise OptionError(key, text, f"is not valid JSON ({error})") from error
    entries = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    if entries is None:
        raise OptionError(key, text, 'must be an object like {"int8": ["attention"]}')
    found: list[tuple[str, tuple[str, ...]]] = []
    for dtype, names in entries.items():
        listed: Any = module_names(names) if isinstance(names, str) else names
        if not isinstance(listed, (list, tuple)) or not all(isinstance(n, str) for n in cast("list[Any]", listed)):
            raise OptionError(key, text, f"the modules of {dtype!r} must be a list of names")
        found.append((dtype, tuple(cast("list[str]", listed))))
    return tuple(found)


def default_settings(
    device: str = "auto", dtype: str = "auto", use_mmap: bool | None = None, compute: Compute | None = None
) -> LoadSettings:
    """Settings from the words of the command line and the options.

    Args:
        device: "auto", or a torch device such as "cpu", "cuda", "cuda:1", "mps", "xpu".
        dtype: "auto", "bf16", "fp16" or "fp32". Auto is bf16 on an accelerator that computes in it, else fp16;
            fp32 on the CPU.
        use_mmap: None for the platform's default.
        compute: how quantized layers compute; None to dequantize them.

    Raises:
        ValueError: no such device here, or an unknown dtype.
    """
    try:
        where = torch.device(_best_device() if device == "auto" else device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device: auto, cpu, cuda, cuda:1, mps or xpu") from error
    if where.type != "cpu" and not _is_present(where):
        raise ValueError(f"there is no device {device!r} on this machine")
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype != "auto" and dtype not in names:
        raise ValueError(f"{dtype!r} is not one of auto, {', '.join(names)}")
    chosen = _best_dtype(where) if dtype == "auto" else names[dtype]
    return LoadSettings(where, chosen, mmap_by_default() if use_mmap is None else use_mmap, compute or Compute())


def _best_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _is_present(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return False
    index = cast("int | None", device.index)  # torch's stub leaves the None out
    return index is None or index < torch.accelerator.device_count()


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16
