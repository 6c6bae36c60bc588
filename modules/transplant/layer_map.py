"""Where in a network a file stores what: blocks by kinds of layer, each with its format. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"(.+?)\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LayerMap:
    """The weights of one row of blocks.

    Attributes:
        stem: what the names of its blocks begin with, for example "layers" or "double_blocks".
        blocks: block numbers, ascending.
        kinds: names of the weights within a block, in file order, for example "attention.qkv".
        formats: format or dtype by block number and kind; a weight that a block lacks has no entry.
    """

    stem: str
    blocks: tuple[int, ...]
    kinds: tuple[str, ...]
    formats: Mapping[tuple[int, str], str]

    def as_json(self) -> dict[str, Any]:
        """For programs: a row of formats for each kind, None where a block lacks it."""
        rows = {kind: [self.formats.get((block, kind)) for block in self.blocks] for kind in self.kinds}
        return {"stem": self.stem, "blocks": list(self.blocks), "formats": rows}


def layer_maps(formats: Mapping[str, str]) -> list[LayerMap]:
    """Maps of every row of blocks.

    Args:
        formats: format or dtype of each weight by its name, names with a block number in them and others.

    Returns:
        A map for each stem that has several blocks with several weights each, those with most weights first. Biases
        are left out.
    """
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name, stored in formats.items():
        match = _BLOCK.fullmatch(name)
        if match and not name.endswith(".bias"):
            found.setdefault(match[1], {})[int(match[2]), match[3].removesuffix(".weight")] = stored
    maps = [_map(stem, entries) for stem, entries in found.items()]
    return sorted(
        (one for one in maps if len(one.blocks) > 1 and len(one.kinds) > 1), key=lambda one: -len(one.formats)
    )


def _map(stem: str, entries: Mapping[tuple[int, str], str]) -> LayerMap:
    blocks, kinds = _distinct(block for block, _ in entries), tuple(_distinct(kind for _, kind in entries))
    return LayerMap(stem, tuple(sorted(blocks)), kinds, entries)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
