"""What the core needs of a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from transplant.checkpoint.reader import mmap_by_default
from transplant.sdnq_bridge import Compute, QuantizeOnLoad


@dataclass(frozen=True)
class LoadSettings:
    """How models are loaded.

    Attributes:
        device: where they run.
        dtype: their compute dtype.
        use_mmap: whether weights may stay views of their file.
        compute: how quantized layers compute.
    """

    device: torch.device
    dtype: torch.dtype
    use_mmap: bool
    compute: Compute = field(default_factory=Compute)


class Host(Protocol):
    """A program that holds one pipeline and lets its user choose transformers."""

    def load_settings(self) -> LoadSettings:
        """How the next load is to be done."""
        ...

    def report(self, text: str, fraction: float | None) -> None:
        """Show what is being done and how far it is (0 to 1, None where that is not known)."""
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

    def report(self, text: str, fraction: float | None) -> None:
        """See Host."""

    def cancelled(self) -> bool:
        """See Host."""
        return False


def compute_from(get: Callable[[str], Any]) -> Compute:
    """How layers compute, from the options.

    Args:
        get: gives the value of an option by key.
    """
    mode = get("sdnq_quantize_weights_mode")
    wanted = QuantizeOnLoad(
        mode, get("sdnq_quantize_weights_group_size"), get("sdnq_use_svd"), get("sdnq_svd_rank")
    )  # fmt: skip
    return Compute(
        quantized_matmul=get("sdnq_quantized_matmul_mode") if get("sdnq_use_quantized_matmul") else "",
        compiled=get("sdnq_dequantize_compile"),
        dequantize_fp32=get("sdnq_dequantize_fp32"),
        fp8_storage=get("fp8_storage"),
        quantize=None if mode == "none" else wanted,
    )


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
