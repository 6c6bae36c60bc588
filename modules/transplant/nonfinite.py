"""Weights that hold NaN or infinity: looked for where a picture has failed, and in what is quantized while it loads.

Not in every load: a mapped file is loaded without touching its weights (docs/design.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from transplant.errors import sample
from transplant.slots import SLOTS

_AT_ONCE = 1 << 24
"""Values that are looked at together: what that takes beside the weights stays small."""


@dataclass(frozen=True)
class NonFinite:
    """A component that holds NaN or infinity.

    Attributes:
        component: its name in the pipeline.
        file: name of the file or folder that it comes from.
        weights: names of the weights that hold them, in the network's order.
    """

    component: str
    file: str
    weights: tuple[str, ...]

    def __str__(self) -> str:
        hold = "holds" if len(self.weights) == 1 else "hold"
        return f"{sample(self.weights, 3)} of {self.component} ({self.file}) {hold} NaN or infinity"


def nonfinite_weights(pipeline: Any) -> NonFinite | None:
    """The first component of a pipeline that has such weights, its transformers first; None where there is none.

    Reads every weight, and so takes as long as that.
    """
    first = [name for kind in SLOTS for name in kind.components]
    components: dict[str, Any] = {**dict.fromkeys(first), **pipeline.components}
    for name, module in components.items():
        if isinstance(module, torch.nn.Module) and (weights := tuple(_nonfinite(module))):
            source = Path(str(getattr(getattr(module, "config", None), "_name_or_path", "") or name))
            return NonFinite(name, source.name, weights)
    return None


def is_finite(weight: torch.Tensor) -> bool:
    """Whether all values are. A sum is not finite where a value is not, and is the quickest question by far.

    It is asked in the weight's own dtype, in which torch adds up without a copy; in one byte it cannot.
    """
    parts = weight.detach().flatten().split(_AT_ONCE)
    values = (part.float() if part.itemsize == 1 else part for part in parts)
    return all(bool(part.sum().isfinite()) or bool(part.isfinite().all()) for part in values)


def _nonfinite(module: torch.nn.Module) -> Iterator[str]:
    for name, weight in module.named_parameters():
        if weight.is_floating_point() and not weight.is_meta and not is_finite(weight):
            yield name
