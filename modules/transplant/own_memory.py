"""Memory of its own for a large tensor, which goes back to the system when it is freed."""

from __future__ import annotations

import mmap
import sys

import torch

_ON_THE_HEAP = 1 << 20
"""Bytes below which a tensor lies on the heap; above, it has pages of its own."""


def own_memory(nbytes: int) -> torch.Tensor:
    """Bytes that nobody has written to yet, as uint8 [nbytes].

    From glibc's heap they would not go back: once a large block was freed, blocks up to 32 MB come from there, and what
    is freed between weights that stay is lost. A model of 6 GB, read and cast to fp8, took 1 GB more. Pages of 2 MB
    (madvise) take longer, not shorter: the system has to move others to make room for them.
    """
    if nbytes < _ON_THE_HEAP or sys.platform == "win32":
        return torch.empty(nbytes, dtype=torch.uint8)
    own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(own, dtype=torch.uint8)
