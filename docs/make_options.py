"""Writes docs/options.md from the options' data: `python docs/make_options.py`."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "modules"))

from transplant.hosts.standalone.page import EFFECTS  # noqa: E402
from transplant.options import OPTIONS, Option  # noqa: E402

INTRO = """\
# Options

What the settings page shows, `config.json` holds and `/sdapi/v1/options` reads and writes. The names are SD.Next's
where SD.Next has the option. This page is made from the options' data by `python docs/make_options.py`.
"""


def markdown() -> str:
    """The page."""
    parts = [INTRO]
    for section in dict.fromkeys(option.section for option in OPTIONS):
        parts.append(f"## {section}\n\n| option | shown as | values | default | |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(option)}" for option in OPTIONS if option.section == section) + "\n"
    return "\n".join(parts)


def _row(option: Option) -> str:
    default = ", ".join(option.default) if isinstance(option.default, list) else str(option.default)
    default = default if isinstance(option.default, str) else default.lower()
    about = " ".join(filter(None, (option.help, EFFECTS[option.effect])))
    return f"| `{option.key}` | {option.label} | {_values(option)} | {default or '(none)'} | {about} |"


def _values(option: Option) -> str:
    if isinstance(option.choices, tuple):
        return ", ".join(option.choices)
    if option.choices is not None:
        return {"bases": "a base model", "overrides": "Default or a file", "options": "options"}[option.choices]
    if option.control == "number":
        return f"{option.minimum:g} to {option.maximum:g}"
    return "true, false" if option.control == "checkbox" else "text"


if __name__ == "__main__":
    (DOCS / "options.md").write_text(markdown(), encoding="utf-8")
