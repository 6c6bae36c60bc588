"""The way to SDNQ: the PyPI package, or the copy that a host carries.

Whatever is used of SDNQ is asked for here, so that layers are made of the classes that the host knows.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from transplant.errors import MissingPackage

_PYPI = "sdnq"
_chosen: list[str] = []
"""Name of the package that a host has given."""


def use(package: ModuleType) -> None:
    """Use a host's copy of SDNQ instead of the PyPI package, in this process and for good.

    Args:
        package: the imported copy, with the submodules that the PyPI package has. It decides itself whether to
            compile.

    Raises:
        RuntimeError: another SDNQ has been used already: its layers are of other classes.
    """
    if package.__name__ == name():
        return
    if _chosen or _PYPI in sys.modules:
        raise RuntimeError(f"{package.__name__} comes too late: {name()} is in use in this process")
    _chosen.append(package.__name__)


def choose_compilation(compiled: bool) -> None:
    """Tell SDNQ, before its first import in this process, whether to compile. It cannot be told again later."""
    os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "1" if compiled else "0")


def name() -> str:
    """The name that the SDNQ in use is imported by."""
    return _chosen[0] if _chosen else _PYPI


def part(submodule: str = "") -> Any:
    """SDNQ itself, or one of its submodules, imported when it is first asked for.

    Raises:
        MissingPackage: it, or something that it needs, is not installed.
    """
    try:
        package = importlib.import_module(name())  # first, so that its absence is not called that of a submodule
        return importlib.import_module(f"{name()}.{submodule}") if submodule else package
    except ModuleNotFoundError as error:
        raise MissingPackage(error.name or name(), "quantized layers need it") from error


def has_scales_of_scales() -> bool:
    """Whether SDNQ holds block scales as codes with a scale of their own, and tables of values.

    The version of the PyPI package that is required does, and is not imported to ask it; a host's copy may be older.
    """
    return not _chosen or "scale_dtype" in inspect.signature(part("dequantizer").SDNQDequantizer).parameters
