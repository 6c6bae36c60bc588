"""A plan as rows, as text and as JSON. Pure: the same rows serve the command line, the log and the WebUI."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transplant.architectures.detect import BUNDLE, SHARD, TRANSFORMER, Detection
from transplant.checkpoint.header import Header
from transplant.checkpoint.naming import BUNDLED, NamedKeys
from transplant.errors import printable, sample
from transplant.inventory import UNREADABLE, Entry

if TYPE_CHECKING:
    from transplant.load_plan import LoadPlan, TargetTensor

Row = tuple[str, str]


@dataclass(frozen=True)
class Group:
    """Tensors of one part of the network that are stored and held alike.

    Attributes:
        layers: the part, with block numbers as `*`.
        count: number of tensors.
        stored: safetensors dtype in the file.
        resident: dtype once loaded, "" before a plan.
        nbytes: bytes, loaded where a plan is known, else stored.
    """

    layers: str
    count: int
    stored: str
    resident: str
    nbytes: int


def size(nbytes: int) -> str:
    """Bytes as people read them, in powers of 1000."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def plan_rows(plan: LoadPlan) -> list[Row]:
    """What a plan says, label and value."""
    transformer = plan.transformer
    rows = [
        ("file", _file(plan.header)),
        ("base model", f"{plan.base.path.name} ({plan.base.pipeline})"),
        ("architecture", f"{plan.spec.name}: {plan.why}"),
        ("class", f"{transformer.cls.__name__}, as {transformer.component}"),
        ("layout", f"{plan.layout}, {'prefix ' + plan.prefix if plan.prefix else 'no prefix'}"),
        ("tensors", f"{len(plan.header.tensors)} stored, {len(plan.targets)} in the model"),
        ("quantization", _quantization(plan)),
        ("not read", _counts(plan.companions)),
        ("dropped", sample(plan.dropped) if plan.dropped else "nothing"),
        ("missing", _missing(plan)),
        ("brings along", ", ".join(part.component for part in plan.siblings) or "nothing"),
        *([("variant", str(plan.variant))] if plan.variant else []),
        *([(plan.branch.title, str(plan.branch))] if plan.branch else []),
        ("config", _changes(plan.config_changes)),
        ("resident", f"{size(plan.resident_bytes)}, of which {size(plan.mapped_bytes)} stay in the file (mapped)"),
        ("peak", f"{size(plan.peak_bytes)} beside the mapped file, on {plan.device}"),
    ]
    return [*rows, *(("warning", text) for text in plan.warnings), ("verdict", "can be loaded")]


def plan_groups(plan: LoadPlan) -> list[Group]:
    """The model's tensors by part of the network and dtype."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for target in plan.targets:
        key = (_part(target.name), target.stored or "zeros", target.resident)
        counts[key] += 1
        sizes[key] += target.nbytes
    return [Group(key[0], count, key[1], key[2], sizes[key]) for key, count in counts.items()]


def plan_json(plan: LoadPlan) -> dict[str, Any]:
    """The plan for programs; sizes in bytes."""
    return {
        "file": str(plan.header.path),
        "files": [str(part.path) for part in plan.header.parts] or [str(plan.header.path)],
        "file_bytes": plan.header.stamp.size,
        "kind": TRANSFORMER if BUNDLED.isdisjoint(plan.companions) else BUNDLE,
        "base": str(plan.base.path),
        "architecture": plan.spec.name,
        "why": plan.why,
        "class": plan.transformer.cls.__name__,
        "component": plan.transformer.component,
        "layout": plan.layout,
        "prefix": plan.prefix,
        "quantization": plan.quantization,
        "formats": dict(_formats(plan)),
        "companions": dict(plan.companions),
        "dropped": list(plan.dropped),
        "left_alone": [name for part in plan.parts for name in part.left_alone],
        "zero_filled": list(plan.zero_filled),
        "variant": str(plan.variant) if plan.variant else None,
        "branch": {"title": plan.branch.title, "state": plan.branch.state.value} if plan.branch else None,
        "siblings": [part.component for part in plan.siblings],
        "config_changes": dict(plan.config_changes),
        "groups": [vars(group) for group in plan_groups(plan)],
        "resident_bytes": plan.resident_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "peak_bytes": plan.peak_bytes,
        "device": str(plan.device),
        "warnings": list(plan.warnings),
        "verdict": "can be loaded",
    }


def file_rows(header: Header, keys: NamedKeys, detection: Detection) -> list[Row]:
    """What a file says without a base model."""
    lost = [str(rejected) for rejected in detection.rejected if rejected.verdict.found]
    return [
        ("file", _file(header)),
        ("kind", f"{detection.kind}: {detection.why}"),
        ("architecture", " or ".join(detection.may_be) or "none known here"),
        *([("variant", str(detection.variant))] if detection.variant else []),
        ("layout", detection.layout.name if detection.layout else "unknown"),
        ("prefix", keys.prefix or "none"),
        ("tensors", f"{len(header.tensors)} stored{_own(keys, detection)}"),
        ("not read", _counts(keys.companions)),
        *(("rejected", text) for text in lost[:5]),
    ]


def _own(keys: NamedKeys, detection: Detection) -> str:
    """How many of a file's tensors are the transformer's, where it holds one."""
    return f", {len(keys.stored)} of them the transformer's" if detection.kind in (TRANSFORMER, BUNDLE) else ""


def file_groups(header: Header, keys: NamedKeys) -> list[Group]:
    """The file's tensors by part of the network and dtype."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, stored in keys.stored.items():
        key = (_part(name), header.tensors[stored].dtype)
        counts[key] += 1
        sizes[key] += header.tensors[stored].nbytes
    return [Group(key[0], count, key[1], "", sizes[key]) for key, count in counts.items()]


def file_json(header: Header, keys: NamedKeys, detection: Detection) -> dict[str, Any]:
    """The same for programs; sizes in bytes."""
    return {
        "file": str(header.path),
        "files": [str(part.path) for part in header.parts] or [str(header.path)],
        "file_bytes": header.stamp.size,
        "kind": detection.kind,
        "architecture": detection.architecture,
        "may_be": list(detection.may_be),
        "variant": str(detection.variant) if detection.variant else None,
        "why": detection.why,
        "layout": detection.layout.name if detection.layout else None,
        "prefix": keys.prefix,
        "companions": dict(keys.companions),
        "rejected": [str(rejected) for rejected in detection.rejected],
        "groups": [vars(group) for group in file_groups(header, keys)],
    }


def inventory_table(folder: Path, entries: Mapping[Path, Entry]) -> str:
    """A folder's checkpoints as aligned text, named relative to it, and how many of each kind there are."""
    lines = [("file", "kind", "architecture", "layout", "size")]
    for path, entry in entries.items():
        known = f"{entry.title} ({entry.variant})" if entry.variant else entry.title
        told = known or (entry.why if entry.kind in (UNREADABLE, SHARD) else "")
        lines.append((printable(str(path.relative_to(folder))), entry.kind, told, entry.layout, size(entry.nbytes)))
    counts = Counter(entry.kind for entry in entries.values())
    total = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "no checkpoints"
    return f"{_columns(lines)}\n\n{total}"


def inventory_json(entries: Mapping[Path, Entry]) -> list[dict[str, Any]]:
    """The same for programs; sizes in bytes."""
    return [{"file": str(path), **vars(entry)} for path, entry in entries.items()]


def table(rows: Sequence[Row]) -> str:
    """Rows as aligned text."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def group_table(groups: Sequence[Group]) -> str:
    """Groups as aligned text, the largest first."""
    lines = [("part", "tensors", "stored", "loaded", "size")]
    for group in sorted(groups, key=lambda group: -group.nbytes):
        lines.append((group.layers, str(group.count), group.stored, group.resident, size(group.nbytes)))
    return _columns(lines)


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines)


def log_line(plan: LoadPlan, seconds: float) -> str:
    """One line for the log after a load."""
    formats = f", {_quantization(plan)}" if plan.layers else ""
    bundled = f", not read: {_counts(plan.companions)}" if plan.companions else ""
    return (
        f"{plan.header.path.name}: {plan.spec.name} ({plan.layout} layout, prefix {plan.prefix or 'none'}), "
        f"{len(plan.targets)} tensors, {size(plan.resident_bytes)} in {seconds:.2f} s{formats}{bundled}"
    )


def _file(header: Header) -> str:
    files = f"{len(header.parts)} files, " if header.parts else ""
    return f"{header.path.name} ({files}{size(header.stamp.size)})"


def _part(name: str) -> str:
    """`layers.3.attention.to_q.weight` → `layers.*.attention`: block numbers starred, the last names cut off."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    return ".".join(parts[: 3 if len(parts) > 1 and parts[1] == "*" else 1])


def _formats(plan: LoadPlan) -> Counter[str]:
    """Quantized layers of the file by format, with the GGML type where that is it."""
    return Counter(str(layer.params.get("type", layer.format)) for layer in plan.layers.values())


def _quantization(plan: LoadPlan) -> str:
    """How many layers are quantized in which format, and what says so."""
    if not plan.layers:
        made = Counter(target.resident for target in plan.targets if target.form)
        return ", ".join(f"{count} layers to {name} on load" for name, count in made.items()) or "none"
    counts = ", ".join(f"{count} layers {name}" for name, count in _formats(plan).items())
    held: dict[str, list[TargetTensor]] = {}
    for target in plan.targets:
        if target.form:
            held.setdefault(target.resident, []).append(target)
    kept = ", ".join(
        f"{len(group)} as {name}, {_bytes_a_weight(group):.4g} bytes a weight" for name, group in held.items()
    )
    return f"{counts} (from {plan.quantization}), held: {kept or 'none'}"


def _bytes_a_weight(targets: Sequence[TargetTensor]) -> float:
    return sum(target.nbytes for target in targets) / max(sum(math.prod(target.shape) for target in targets), 1)


def _counts(companions: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind} tensors" for kind, count in companions.items()) or "nothing"


def _missing(plan: LoadPlan) -> str:
    left_alone = [name for part in plan.parts for name in part.left_alone]
    told = [f"{len(plan.zero_filled)} filled with zeros ({sample(plan.zero_filled)})"] if plan.zero_filled else []
    told += [f"{len(left_alone)} computed ({sample(left_alone)})"] if left_alone else []
    return ", ".join(told) or "nothing"


def _changes(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items()) or "the base model's"
