"""Key converters as data: regular expressions, then one of diffusers' own converters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NORM_SCALES = (r"((?:query|key)_norm|norms\.\d+)\.weight$", r"\1.scale")
"""Newer exports call the weight of an RMSNorm `weight`, as torch does; diffusers' converters know `scale`."""


@dataclass(frozen=True)
class Renaming:
    """A key converter `(checkpoint, config=..., **kwargs) -> dict` as in diffusers' single-file table.

    Attributes:
        pairs: (regular expression, replacement), applied to every name one after the other.
        then: `module:function` of the converter that gets the renamed tensors; None for no further step.
    """

    pairs: tuple[tuple[str, str], ...]
    then: str | None = None

    @property
    def __name__(self) -> str:
        """What a message calls this converter."""
        return self.then.partition(":")[2] if self.then else "the key renaming"

    def __call__(self, checkpoint: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Rename and convert. An entry that comes out as None stands for a tensor that the file lacks."""
        from transplant.skeleton import resolve_converter

        renamed = {self.rename(name): tensor for name, tensor in checkpoint.items()}
        converted = resolve_converter(self.then)(checkpoint=renamed, **kwargs) if self.then else renamed
        return {name: tensor for name, tensor in converted.items() if tensor is not None}

    def rename(self, name: str) -> str:
        """The new name of one tensor."""
        for pattern, replacement in self.pairs:
            name = re.sub(pattern, replacement, name)
        return name
