"""Which functions of the host are replaced, and how each is put back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transplant.hosts.sdnext import app
from transplant.hosts.sdnext.loading import load_native, load_transformer
from transplant.hosts.sdnext.swapping import load_unet, load_unet_secondary

log = logging.getLogger("transplant")

ORIGINAL = "transplant_original"
"""Attribute of a function of ours: the host's function that it stands for."""


@dataclass(frozen=True)
class Patch:
    """A function of the host and ours in its place.

    Attributes:
        module: where it is.
        name: its name there.
        ours: takes the host's function and then its arguments.
        switches: the options that want it; it is replaced while any of them is on.
    """

    module: str
    name: str
    ours: Callable[..., Any]
    switches: tuple[str, ...]


PATCHES = (
    Patch("pipelines.generic", "load_transformer", load_transformer, ("transplant_loader", "transplant_gguf")),
    Patch("pipelines.native_transformer", "load", load_native, ("transplant_loader",)),
    Patch(
        "modules.sd_unet", "load_unet", load_unet, ("transplant_loader", "transplant_gguf", "transplant_swap")
    ),
    Patch(
        "modules.sd_unet", "load_unet_secondary", load_unet_secondary,
        ("transplant_loader", "transplant_gguf", "transplant_swap"),
    ),
)  # fmt: skip


def apply() -> None:
    """Replace what the switches want replaced, and put back the rest; may be called again."""
    for patch in PATCHES:
        try:
            owner = app.module(patch.module)
        except ImportError as error:
            log.warning("Transplant: this host has no %s (%s): its loads stay its own", patch.module, error)
            continue
        function = getattr(owner, patch.name, None)
        if function is None:
            continue  # a host without a second slot
        wanted = any(app.option(switch, True) for switch in patch.switches)
        original = getattr(function, ORIGINAL, None)
        if wanted and original is None:
            setattr(owner, patch.name, _standing_for(function, patch.ours))
        elif not wanted and original is not None:
            setattr(owner, patch.name, original)


def _standing_for(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(replaced, ORIGINAL, original)
    return replaced
