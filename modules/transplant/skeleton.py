"""Diffusers classes by name, and their networks without weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from transplant.architectures.spec import DIFFUSERS_LAYOUT, Keys, Layout, TransformerSpec
from transplant.architectures.spec import Converter as NamedConverter
from transplant.errors import BaseModelError
from transplant.recipe import CONVERTER_ERRORS, Converter

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


DIFFUSERS = "diffusers"

_OWN_CLASSES = {"Krea2ResidualTransformer2DModel": "transplant.krea2_residual"}
"""Classes that add to diffusers' what some files need, and their modules."""

OWN_MODULES = frozenset(_OWN_CLASSES.values())
"""What a pipeline's index calls the library of a component of such a class."""


def resolve_class(name: str, library: str = DIFFUSERS) -> type[ModelMixin]:
    """The model class called `name`.

    Args:
        name: the class.
        library: where a pipeline's index, or a host, says that it is from. A module of a host counts where it is
            imported already; else the class is diffusers', or one of ours.

    Raises:
        BaseModelError: there is no such class.
    """
    import diffusers
    from diffusers.models.modeling_utils import ModelMixin

    own = _OWN_CLASSES.get(name)
    cls = getattr(importlib.import_module(own) if own else diffusers, name, None)
    cls = foreign_class(name, library) or cls
    if not (inspect.isclass(cls) and issubclass(cls, ModelMixin)):
        raise BaseModelError(f"diffusers {diffusers.__version__} has no model class {name}: a newer diffusers may")
    return cls


def foreign_class(name: str, library: str) -> Any:
    """A class that neither diffusers nor this package defines, from a module that is imported already; else None."""
    if library.partition(".")[0] == DIFFUSERS or library in OWN_MODULES:
        return None
    return getattr(sys.modules.get(library), name, None)


def resolve_converter(converter: NamedConverter) -> Converter:
    """The function that a spec names. Raises BaseModelError where this diffusers lacks it."""
    if not isinstance(converter, str):
        return converter
    module, _, name = converter.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise BaseModelError(f"{module} has no {name}: a newer diffusers may")
    return cast("Converter", function)


def empty_network(cls: type[ModelMixin], config: Mapping[str, Any], **kwargs: Any) -> ModelMixin:
    """A network whose parameters are on meta, while buffers keep the values that __init__ gives them.

    Args:
        cls: the class.
        config: its config, as in config.json.
        kwargs: passed on to `from_config`.

    Raises:
        BaseModelError: the class does not accept the config.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False):
            return cast("Any", cls).from_config(dict(config), **kwargs)  # of ConfigMixin, which ModelMixin is not
    except CONVERTER_ERRORS as error:
        raise BaseModelError(f"{cls.__name__} cannot be made from the base model's config.json ({error})") from error


def shapes_only(cls: type[ModelMixin], config: Mapping[str, Any]) -> ModelMixin:
    """A network that is all on meta: enough to know its tensors, without computing buffers, which can take seconds.

    Args:
        cls: the class.
        config: its config, as in config.json.

    Raises:
        BaseModelError: the class does not accept the config.
    """
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=True):
            return cast("Any", cls).from_config(dict(config))
    except CONVERTER_ERRORS:  # a class whose __init__ needs real values
        return empty_network(cls, config)


def fp32_modules(network: Any) -> frozenset[str]:
    """Names of the modules that a class wants kept in fp32, as parts of its parameters' names."""
    modules: Any = getattr(network, "_keep_in_fp32_modules", None)
    return frozenset([modules] if isinstance(modules, str) else modules or ())


def make_default_spec(cls: str, component: str = "transformer", library: str = DIFFUSERS) -> TransformerSpec:
    """A spec for a diffusers class that has no file of its own.

    The converter is the one of diffusers' single-file table. The layouts carry no telling keys: which
    one a file has is decided by comparing its names with the model's.

    Raises:
        BaseModelError: there is no such class.
    """
    resolve_class(cls, library)
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    table = cast("Mapping[str, Mapping[str, Any]]", SINGLE_FILE_LOADABLE_CLASSES)
    converter = cast("Converter | None", table.get(cls, {}).get("checkpoint_mapping_fn"))
    layouts = (Layout(DIFFUSERS_LAYOUT, Keys()),)
    if converter is not None:
        layouts += (Layout("original", Keys(), converter),)
    return TransformerSpec(cls, cls, ("",), layouts, component=component, subfolder=component)
