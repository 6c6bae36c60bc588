"""What the fields of a new page hold: a prompt and a size that suit the built-in base model while it is offered."""

from __future__ import annotations

from transplant.hosts.standalone.folders import Catalog

PROMPT = "a big yellow square left of a blue star on pink"
"""One that the built-in base model was never trained on."""


def first_prompt(catalog: Catalog) -> str:
    """A prompt that the built-in base model draws; none for others."""
    return PROMPT if catalog.is_built_in else ""


def first_side(catalog: Catalog) -> int:
    """Width and height in pixels."""
    return 128 if catalog.is_built_in else 256
