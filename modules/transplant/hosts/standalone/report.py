"""An inspection as HTML: what the file is, the verdict, memory as bars, and where it stores what. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from transplant.view import size

COLORS = {
    "F32": "#9aa5b1", "BF16": "#5b8def", "F16": "#4fb0ae", "float8_e4m3fn": "#e0a030", "float8_e5m2": "#c98a2b",
    "F8_E4M3": "#e8c170", "F8_E5M2": "#dcb25e", "int8_tensorwise": "#8a63d2", "nvfp4": "#d1495b", "mxfp8": "#ec7d44",
    "convrot_w4a4": "#b5407e", "asym_w4a8_int8": "#6d4bb3", "awq_w4a16": "#3f7d58",
}  # fmt: skip
"""By format; other formats, GGUF's, share the last one of these."""

OTHER_COLOR = "#3b9c5f"
MISSING = "transparent"


def report(told: Mapping[str, Any]) -> str:
    """The whole report, from what `Inspection.as_json` tells."""
    parts = [_verdict(told), _facts(told)]
    if "resident_bytes" in told:
        parts.append(_memory(told))
    parts += [_layer_map(one) for one in told.get("layer_maps", ())]
    if told.get("layer_maps"):
        parts.insert(-len(told["layer_maps"]), _legend(told["layer_maps"]))
    parts.append(_groups(told.get("groups", ())))
    return f'<div class="tp-report">{"".join(parts)}</div>'


def _verdict(told: Mapping[str, Any]) -> str:
    if told.get("verdict") == "refused":
        return f'<p class="tp-message tp-error">{escape(told["message"])}</p>'
    if told.get("verdict"):
        return f'<p class="tp-message tp-good">Fits {escape(str(told["base"]).rpartition("/")[2])}: can be loaded.</p>'
    return ""


def _facts(told: Mapping[str, Any]) -> str:
    companions = ", ".join(f"{count} tensors of its {kind}" for kind, count in told["companions"].items())
    rows = [
        ("File", f"{told['file'].rpartition('/')[2]}, {size(told['file_bytes'])}"),
        ("Kind", told["kind"]),
        ("Architecture", told["architecture"] or "none that is known here"),
        ("Because of", told["why"]),
        ("Layout", f"{told['layout'] or 'unknown'}, {'prefix ' + told['prefix'] if told['prefix'] else 'no prefix'}"),
        ("Not read", companions or "nothing"),
        ("Formats", _formats(told)),
        *(("Note", text) for text in told.get("warnings", ())),
    ]
    cells = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(str(text))}</td></tr>" for name, text in rows)
    return f"<table class=tp-facts>{cells}</table>{_ruled_out(told.get('rejected', ()))}"


def _ruled_out(rejected: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(text)}</li>" for text in rejected)
    return f"<details><summary>Why no other architecture</summary><ul>{lines}</ul></details>" if lines else ""


def _formats(told: Mapping[str, Any]) -> str:
    if told.get("formats"):
        counts = ", ".join(f"{count} layers {name}" for name, count in told["formats"].items())
        return f"{counts}, declared in: {told['quantization']}"
    found = dict.fromkeys(name for one in told.get("layer_maps", ()) for name in _used(one))
    return ", ".join(found) or "none"


def _memory(told: Mapping[str, Any]) -> str:
    """Bars of what the weights would take, against what is free."""
    rows = [("as it is", told["resident_bytes"], ""), ("while loading, beside the mapped file", told["peak_bytes"], "")]
    rows += [(one["title"], one["resident_bytes"], one["reason"]) for one in told.get("alternatives", ())]
    free = told.get("available_bytes") or 0
    most = max([free, *(nbytes or 0 for _, nbytes, _ in rows)]) or 1
    lines = [("free now", free, "")] if free else []
    bars = "".join(_bar(title, nbytes, reason, most, free) for title, nbytes, reason in [*rows, *lines])
    return f"<h4>Memory on {escape(told['device'])}</h4><table class=tp-bars>{bars}</table>"


def _bar(title: str, nbytes: int | None, reason: str, most: int, free: int) -> str:
    if nbytes is None:
        return f"<tr><th scope=row>{escape(title)}</th><td colspan=2>no change: {escape(reason)}</td></tr>"
    kind = "tp-over" if free and nbytes > free else "tp-free" if title == "free now" else ""
    bar = f'<i class="{kind}" style="width:{100 * nbytes / most:.1f}%"></i>'
    return f"<tr><th scope=row>{escape(title)}</th><td class=tp-track>{bar}</td><td>{size(nbytes)}</td></tr>"


def _legend(maps: Iterable[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for one in maps for name in _used(one))
    keys = "".join(f'<span><i style="background:{_color(name)}"></i>{escape(name)}</span>' for name in names)
    return f"<h4>Formats by block and layer</h4><p class=tp-legend>{keys}</p>"


def _layer_map(one: Mapping[str, Any]) -> str:
    """A table of coloured cells: a column for each block, a row for each kind of layer."""
    rows = "".join(
        f"<tr><th scope=row>{escape(kind)}</th>"
        + "".join(_cell(kind, block, stored) for block, stored in zip(one["blocks"], formats, strict=True))
        + "</tr>"
        for kind, formats in one["formats"].items()
    )
    title = f"{one['stem']}, blocks {one['blocks'][0]} to {one['blocks'][-1]}"
    return f"<table class=tp-map><caption>{escape(title)}</caption>{rows}</table>"


def _cell(kind: str, block: int, stored: str | None) -> str:
    told = escape(f"{kind}, block {block}: {stored or 'not in the file'}")
    return f'<td style="background:{_color(stored) if stored else MISSING}" title="{told}"></td>'


def _used(one: Mapping[str, Any]) -> list[str]:
    return [stored for row in one["formats"].values() for stored in row if stored]


def _color(name: str) -> str:
    return COLORS.get(name, OTHER_COLOR)


def _groups(groups: Iterable[Mapping[str, Any]]) -> str:
    rows = sorted(groups, key=lambda group: -group["nbytes"])
    cells = "".join(
        f"<tr><td>{escape(group['layers'])}</td><td>{group['count']}</td><td>{escape(group['stored'])}</td>"
        f"<td>{escape(group['resident'])}</td><td>{size(group['nbytes'])}</td></tr>"
        for group in rows
    )
    head = "<tr><th>part</th><th>tensors</th><th>stored</th><th>loaded</th><th>size</th></tr>"
    return f"<details><summary>All parts</summary><table class=tp-groups>{head}{cells}</table></details>"
