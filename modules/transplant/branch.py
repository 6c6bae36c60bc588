"""A part of the network that some files hold and diffusers' class has not: left out where it does nothing, else run.

What it does is read off its weights, never guessed: this is the one place where planning reads weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from transplant.architectures.spec import TransformerSpec
from transplant.checkpoint.header import TensorInfo
from transplant.checkpoint.reader import TensorReader, open_reader
from transplant.formats.base import QuantizedLayer
from transplant.quantized import LayerError, decode_rows
from transplant.recipe import RowRange
from transplant.targets import Draft

_ROWS = 512
"""Rows that are looked at together: some megabytes."""


_OFFSETS = frozenset({"weight_zeros", "weight_correction", "weight_codebook"})
"""Roles of tensors of formats in which a code of zero is not a value of zero."""


class State(Enum):
    """What a file's branch does."""

    ABSENT = "absent"
    DORMANT = "dormant"
    LIVE = "live"


@dataclass(frozen=True)
class Branch:
    """The branch as a file holds it.

    Attributes:
        state: what it does.
        names: own names of its weights in the file.
        gate: stored name of the weight that decided it, "" where there is none.
        title: what it is called.
    """

    state: State
    names: tuple[str, ...] = ()
    gate: str = ""
    title: str = "branch"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Own names of the weights that are not loaded."""
        return self.names if self.state is State.DORMANT else ()

    def __str__(self) -> str:
        if self.state is State.DORMANT:
            return f"dormant: {self.gate} is all zeros, it is left out"
        return "live: the model runs with it" if self.state is State.LIVE else "absent"


def find_branch(draft: Draft, spec: TransformerSpec, names: Sequence[str]) -> tuple[Branch | None, Draft]:
    """What the branch of a file does.

    Args:
        draft: the file.
        spec: its architecture.
        names: own names of its tensors.

    Returns:
        The branch, None for an architecture that has none; and the draft, without the layers that are left out.

    Raises:
        UnreadableFile: the weight that decides it cannot be read.
    """
    if spec.branch is None:
        return None, draft
    held = tuple(name for name in names if name in spec.branch.weights)
    if not held:
        return Branch(State.ABSENT, title=spec.branch.title), draft
    gates = [draft.keys.stored[name] for name in held if name in spec.branch.gate]
    dormant = len(gates) == 1 and _is_zero(draft, draft.header.tensors[gates[0]])
    state = State.DORMANT if dormant else State.LIVE
    branch = Branch(state, held, gates[0] if gates else "", spec.branch.title)
    return branch, replace(draft, layers=_without(draft, branch))


def class_for(spec: TransformerSpec, branch: Branch | None, of_base: str) -> str:
    """Name of the class that a file needs, over a base model whose transformer is an `of_base`."""
    if spec.branch is None:
        return of_base
    if branch and branch.state is State.LIVE:
        return spec.branch.cls
    return spec.cls if of_base == spec.branch.cls else of_base


def _without(draft: Draft, branch: Branch) -> Mapping[str, QuantizedLayer]:
    """The draft's quantized layers without those of a branch that is left out."""
    gone = {draft.keys.stored[name] for name in branch.left_out}
    return {name: layer for name, layer in draft.layers.items() if layer.tensors["weight"].name not in gone}


def _is_zero(draft: Draft, info: TensorInfo) -> bool:
    """Whether every value of a weight is zero; ends at the first that is not."""
    rows = info.shape[0] if info.shape else 1
    layers = draft.layers_by_weight
    if info.name in layers:
        rows = draft.checked(layers[info.name])[0]
    with open_reader(draft.header, draft.use_mmap) as reader:
        return not any(
            bool(torch.count_nonzero(_values(draft, info, reader, start, min(start + _ROWS, rows))))
            for start in range(0, rows, _ROWS)
        )


def _values(draft: Draft, info: TensorInfo, reader: TensorReader, start: int, stop: int) -> torch.Tensor:
    layers = draft.layers_by_weight
    if info.name not in layers:
        return (reader.read(info, start, stop) if info.shape else reader.read(info)).float()
    layer = layers[info.name]
    try:
        return decode_rows(RowRange(info.name, start, stop), layers, reader.read, torch.float32, draft.compute)
    except LayerError as error:  # a scale of zero, which the quantizers write for a weight of zeros, is one reason
        codes = reader.read(info).view(torch.uint8)
        if codes.any() or not _OFFSETS.isdisjoint(layer.tensors):
            raise draft.refusal(error) from error
        return codes
