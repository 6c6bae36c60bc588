"""Depth and width of a network read off a file's shapes, for `infer_config`.

Rows (dimension 0) only: a packed quantized weight has its full count of rows, but not of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transplant.architectures.spec import Config, Shape

Shapes = Mapping[str, Shape]


def block_count(shapes: Shapes, *prefixes: str) -> int | None:
    """The number of blocks under one of `prefixes`, counted by the highest index.

    Blocks missing in between count, so that the plan can name them. Indices far beyond the number of blocks, or
    beyond any network's, are no depth but a broken or hostile file: None, as where there is no block.
    """
    indices: set[int] = set()
    for name in shapes:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        index = name[len(prefix) :].partition(".")[0] if prefix else ""
        if index.isascii() and index.isdigit() and len(index) < 4:
            indices.add(int(index))
    count = max(indices) + 1 if indices else 0
    return count if 0 < count <= 2 * len(indices) else None


def rows(shapes: Shapes, *names: str) -> int | None:
    """The size of dimension 0 of the first of `names` that the file holds, or None where it is no network's."""
    size = next((shapes[name][0] for name in names if shapes.get(name)), 0)
    return size if 0 < size < 1_000_000 else None


def heads(config: Config, width: int | None, default_head_dim: int = 128) -> int | None:
    """The number of attention heads that make up `width`, or None where they do not."""
    head_dim = config.get("attention_head_dim", default_head_dim)
    return width // head_dim if width and width % head_dim == 0 else None


def holds(shapes: Shapes, *names: str) -> bool:
    """Whether the file holds one of `names`."""
    return any(name in shapes for name in names)


def changed(config: Config, **found: Any) -> dict[str, Any]:
    """The entries of `found` that are known (not None) and differ from the config's."""
    return {key: value for key, value in found.items() if value is not None and config.get(key) != value}
