"""What the page shows, as HTML and rows. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from transplant.architectures.detect import BUNDLE, TRANSFORMER
from transplant.hosts.standalone.jobs import Job, Notice
from transplant.hosts.standalone.models import Holding
from transplant.inventory import Entry
from transplant.options import Effect, Option
from transplant.slots import DEFAULT, NONE

EFFECTS: dict[Effect, str] = {
    "none": "",
    "base": "Loads the base model.",
    "transformer": "Swaps the transformer.",
    "reload": "The model is loaded again with it.",
    "page": "Reload the page to see it.",
    "restart": "Takes effect at the next start.",
}

Choice = tuple[str, str]

LABELS = {NONE: f"{NONE} (same as {DEFAULT})"}
"""Entries that do not speak for themselves."""

CHANGED = "●"
"""Marks an option that has another value than its default."""


def status(
    job: Job | None, waiting: int, holding: Holding | None, not_loaded: Sequence[str] = (), last: Job | None = None
) -> str:
    """The status line: what is being done and how far it is, or what is loaded and what is only selected.

    What assistive programs are told is in `data-told`, and changes with `data-job`: the job that is done, or the
    `last` one of whoever looks with what came of it, however quick it was.
    """
    if job is None:
        later = f" · the next picture loads {' and '.join(not_loaded)}" if not_loaded else ""
        text = escape(_idle(holding) + later)
        came = f"{escape(last.title)}: {last.status}. " if last else ""
        number = last.number if last else 0
        return f'<div class="tp-status" role="status" data-job="{number}" data-told="{came}{text}">{text}</div>'
    percent = None if job.fraction is None else min(max(round(100 * job.fraction), 0), 100)
    parts = [job.text or job.title]
    if job.cancelled:
        parts.insert(0, "Cancelling after this step")
    if percent is not None:
        parts.append(f"{percent} %")
    rate, remaining = job.rate(), job.remaining()
    if rate:
        parts.append(rate)
    if remaining is not None and not job.cancelled:
        parts.append(f"{duration(remaining)} left")
    if waiting:
        parts.append(f"{waiting} waiting")
    text, told = escape(" · ".join(parts)), escape(f"Cancelling {job.title}" if job.cancelled else job.title)
    value = "" if percent is None else f' aria-valuenow="{percent}" aria-valuemin="0" aria-valuemax="100"'
    bar = '<i class="tp-unknown"></i>' if percent is None else f'<i style="width:{percent}%"></i>'
    return (
        f'<div class="tp-status tp-busy" data-job="{job.number}" data-told="{told}"><div class="tp-text">{text}</div>'
        f'<div class="tp-bar" role="progressbar" aria-label="{text}"{value}>{bar}</div></div>'
    )


def message(notice: Notice | None) -> str:
    """The message area: empty, or a sentence."""
    if notice is None:
        return '<div role="alert"></div>'
    fold = f"<details><summary>Details</summary><pre>{escape(notice.details)}</pre></details>" if notice.details else ""
    return f'<div role="alert" class="tp-message tp-{notice.level}">{escape(notice.text)}{fold}</div>'


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 60:
        return f"{max(round(seconds), 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def choices(names: Sequence[str], value: object) -> list[Choice]:
    """Dropdown entries, label and value; a value that is not among the names is shown as missing."""
    entries = [(name, name) for name in names]
    if isinstance(value, str) and value and value not in names:
        entries.insert(0, (f"{value} (missing)", value))
    return entries


def file_choices(
    names: Sequence[str], value: object, seen: Mapping[str, Entry], architecture: str, others: str
) -> list[Choice]:
    """Entries for files; those that are not for the loaded base model say what they are, or are left out.

    Args:
        names: the entries.
        value: the one that is chosen; it is never left out.
        seen: what the files are, as far as that is known.
        architecture: the loaded base model's; "" while none is.
        others: "mark", "hide" or "show" those that are not for it.
    """
    entries = [(LABELS.get(name, label), name) for label, name in choices(names, value)]
    if others == "show":
        return entries
    told = [(label, name, _other(seen.get(name), architecture)) for label, name in entries]
    if others == "hide":
        return [(label, name) for label, name, other in told if not other or name == value]
    return [(f"{label} ({other})" if other else label, name) for label, name, other in told]


def strangers(names: Sequence[str], seen: Mapping[str, Entry], architecture: str) -> dict[str, str]:
    """The files among `names` that are not for the loaded base model, and what they are."""
    return {name: other for name in names if (other := _other(seen.get(name), architecture))}


def _other(entry: Entry | None, architecture: str) -> str:
    """What a file is that is not for the loaded base model; "" for one that may be."""
    if entry is None:
        return ""
    if entry.kind not in (TRANSFORMER, BUNDLE, "unknown"):
        return entry.kind
    may_be = (entry.architecture, entry.or_else)
    return entry.title if architecture and entry.architecture and architecture not in may_be else ""


def explanation(option: Option) -> str:
    """What the settings page says below an option."""
    return " ".join(part for part in (option.help, EFFECTS[option.effect]) if part)


def applied(options: Sequence[Option]) -> Notice:
    """What Apply says after it."""
    if not options:
        return Notice("info", "Nothing was changed.")
    effects = list(dict.fromkeys(text for option in options if (text := EFFECTS[option.effect])))
    names = ", ".join(option.label for option in options)
    return Notice("info", " ".join([f"Saved: {names}.", *effects]))


def _idle(holding: Holding | None) -> str:
    if holding is None:
        return "Nothing is loaded."
    own, states = "its own", holding.strayed
    said = {key: f"{name} ({states[key]})" if key in states else name for key, name in holding.overrides.items()}
    files = [text for key, text in said.items() if holding.overrides[key] != DEFAULT]
    if not files:
        what = "its own transformer" if len(said) == 1 else "its own transformers"
    elif len(said) == 1:
        what = f"the transformer {files[0]}"
    else:
        first, second = (own if holding.overrides[key] == DEFAULT else text for key, text in said.items())
        what = f"the transformers {first} and {second}"
    return f"{holding.base} with {what}, {holding.how}"
