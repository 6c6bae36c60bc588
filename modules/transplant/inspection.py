"""Everything that can be told of a file before it is loaded, for the command line, the API and the Inspect tab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transplant.architectures.detect import Detection, identify
from transplant.base_model import BaseModel
from transplant.checkpoint.header import Header, read_header
from transplant.checkpoint.naming import NamedKeys, normalise
from transplant.errors import OverrideArchMismatch
from transplant.formats.containers import read_quantization
from transplant.layer_map import LayerMap, layer_maps
from transplant.view import file_json, plan_json

if TYPE_CHECKING:
    from transplant.hosts.base import LoadSettings
    from transplant.load_plan import LoadPlan
    from transplant.sdnq_bridge import Compute


@dataclass(frozen=True)
class Alternative:
    """What another setting would change.

    Attributes:
        title: the setting.
        resident_bytes: size of the weights with it; None where it changes nothing.
        reason: why it changes nothing.
    """

    title: str
    resident_bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class Inspection:
    """What is known of a file.

    Attributes:
        header: its header.
        keys: its names, normalised.
        detection: what it is.
        maps: where it stores what.
        plan: what loading it over the base model would do; None without a base model, or where it is refused.
        refusal: why it is refused.
        alternatives: what other settings would change.
        available_bytes: memory that a load may take now, on the plan's device.
    """

    header: Header
    keys: NamedKeys
    detection: Detection
    maps: tuple[LayerMap, ...]
    plan: LoadPlan | None = None
    refusal: OverrideArchMismatch | None = None
    alternatives: tuple[Alternative, ...] = ()
    available_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs; sizes in bytes."""
        told = file_json(self.header, self.keys, self.detection)
        told["layer_maps"] = [one.as_json() for one in self.maps]
        if self.plan is not None:
            told |= plan_json(self.plan)
            told["alternatives"] = [vars(one) for one in self.alternatives]
            told["available_bytes"] = self.available_bytes
        if self.refusal is not None:
            told |= {"verdict": "refused", "reason": type(self.refusal).__name__, "message": str(self.refusal)}
            told |= {"problem": self.refusal.problem, "remedy": self.refusal.remedy}
        return told


def inspect_file(file: Path | str) -> Inspection:
    """What a file is, from its header and its quantization markers. No torch.

    Raises:
        OverrideArchMismatch: it is no checkpoint, or a broken one.
    """
    header = read_header(file)
    keys = normalise(header.path, header.tensors)
    try:
        formats, refusal = _formats(header, keys), None
    except OverrideArchMismatch as error:
        formats, refusal = {}, error
    return Inspection(
        header, keys, identify(keys, metadata=header.metadata), tuple(layer_maps(formats)), refusal=refusal
    )


def inspect_over_base(file: Path | str, base: BaseModel, component: str, settings: LoadSettings) -> Inspection:
    """The same, with what loading it over a base model would do, cost, and could cost with other settings.

    Args:
        file: the file.
        base: the base model.
        component: the component that it would replace.
        settings: how it would be loaded.

    Raises:
        OverrideArchMismatch: it is no checkpoint, or a broken one; that it does not fit is no error but told.
        BaseModelError: the base model cannot be used.
    """
    from transplant.memory import available_bytes

    found = inspect_file(file)
    try:
        planned = _plan(file, base, component, settings, settings.compute)
    except OverrideArchMismatch as refusal:
        return replace(found, refusal=refusal)
    alternatives = tuple(_alternatives(planned, lambda compute: _plan(file, base, component, settings, compute)))
    return replace(
        found, plan=planned, refusal=None, alternatives=alternatives, available_bytes=available_bytes(settings.rests_on)
    )


def _formats(header: Header, keys: NamedKeys) -> dict[str, str]:
    """Format of every quantized weight and dtype of every other tensor, by own name."""
    quantization = read_quantization(header, keys)
    formats = {name: header.tensors[stored].dtype for name, stored in keys.stored.items()}
    for name in quantization.sidecars:
        formats.pop(name, None)
    for name, layer in quantization.layers.items():
        weight = name if name in formats else f"{name}.weight"  # GGUF layers go by the whole name
        formats[weight] = str(layer.params.get("type", layer.format))
    return formats


def _plan(file: Path | str, base: BaseModel, component: str, settings: LoadSettings, compute: Compute) -> LoadPlan:
    from transplant.plan import plan

    return plan(
        file, base, component=component, dtype=settings.dtype, device=settings.rests_on, use_mmap=settings.use_mmap,
        compute=compute,
    )  # fmt: skip


def _alternatives(planned: LoadPlan, again: Callable[[Compute], LoadPlan]) -> list[Alternative]:
    """FP8 storage and quantization on load, each alone."""
    from transplant.fp8_storage import support_on
    from transplant.sdnq_bridge import QuantizeOnLoad

    wanted = planned.compute
    plain = replace(wanted, fp8_storage=False, quantize=None)
    support = support_on(planned.compute.runs_on or planned.device)
    settings = {
        "FP8 storage": replace(plain, fp8_storage=True),
        "int8 on load": replace(plain, quantize=QuantizeOnLoad("int8")),
        "uint4 on load": replace(plain, quantize=QuantizeOnLoad("uint4")),
    }
    found: list[Alternative] = []
    for title, compute in settings.items():
        reason = support.reason if title == "FP8 storage" and not support.possible else ""
        if planned.layers:
            reason = "the file is quantized already and stays as it is"
        found.append(Alternative(title, None if reason else again(compute).resident_bytes, reason))
    return found
