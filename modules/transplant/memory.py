"""How much memory there is, and how much this process takes."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch


def available_bytes(device: torch.device) -> int:
    """Memory that a load may still take on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def anonymous_bytes() -> int:
    """Memory of its own that this process holds: without the pages of mapped files.

    Elsewhere than on Linux the whole resident size, which includes them.
    """
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
