"""A dequantizer of SDNQ's that rotates in fp32. A file of its own, imported late, so that its layers can be pickled."""

from __future__ import annotations

from typing import Any

import torch

from transplant.sdnq_package import part

_SDNQDequantizer: Any = part("dequantizer").SDNQDequantizer


class Fp32RotationDequantizer(_SDNQDequantizer):
    """Rotates in fp32 and rounds once, as ComfyUI does; stock SDNQ rotates in the result's dtype."""

    rotates_in_fp32 = True

    def __call__(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """See SDNQDequantizer."""
        return super().__call__(*args, dtype=torch.float32, **kwargs).to(dtype or self.result_dtype)
