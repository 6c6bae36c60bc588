"""The host's own modules. They carry no types, so what comes from them is Any; it is asked for here and nowhere else.

Every name is looked up when it is used: the host may not have imported it yet, and other extensions replace things.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from transplant.slots import DEFAULT, NONE


def module(name: str) -> Any:
    """A module of the host, for example `modules.sd_models`. Raises ImportError where this host lacks it."""
    return importlib.import_module(name)


def shared() -> Any:
    """`modules.shared`: options, state, the loaded pipeline."""
    return module("modules.shared")


def option(key: str, default: Any = None) -> Any:
    """The value of an option; `default` where this host has no such option."""
    return getattr(shared().opts, key, default)


def has_option(key: str) -> bool:
    """Whether an option is registered."""
    return key in shared().opts.data_labels


def set_option(key: str, value: Any) -> None:
    """Set an option without its onchange, which would load something."""
    if option(key) != value:
        shared().opts.data[key] = value


def is_default(name: object) -> bool:
    """Whether an entry of the UNET dropdowns means the base model's own transformer."""
    return name in (None, "", DEFAULT, NONE)


def loaded_pipeline() -> Any:
    """The pipeline that is loaded, or None; unlike `shared.sd_model` this loads nothing."""
    return module("modules.modeldata").model_data.sd_model


def is_running() -> bool:
    """Whether this process is the host."""
    return "modules.shared" in sys.modules
