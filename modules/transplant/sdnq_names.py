"""Whether SDNQ knows the names that a quantization on load is asked for with; a refusal tells where they came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transplant.errors import OptionError, nearest
from transplant.sdnq_package import choose_compilation, part

if TYPE_CHECKING:
    from transplant.sdnq_bridge import QuantizeOnLoad


@dataclass(frozen=True)
class Keys:
    """What the user knows the fields of a QuantizeOnLoad as: options, flags, or their own names.

    Attributes:
        weights_dtype: the one for the dtype.
        modules_to_not_convert: the one for the modules that stay as they are.
        modules_dtype_dict: the one for the modules in another dtype.
    """

    weights_dtype: str = "weights_dtype"
    modules_to_not_convert: str = "modules_to_not_convert"
    modules_dtype_dict: str = "modules_dtype_dict"


OPTION_KEYS = Keys("sdnq_quantize_weights_mode", "sdnq_modules_to_not_convert", "sdnq_modules_dtype_dict")


def check_names(wanted: QuantizeOnLoad, keys: Keys, compiled: bool) -> None:
    """Check dtypes and patterns of modules. Imports SDNQ.

    Args:
        wanted: how float files are to be quantized.
        keys: what a refusal calls the fields.
        compiled: whether SDNQ is to compile, where this is its first import.

    Raises:
        OptionError: SDNQ has no such dtype, or cannot read a pattern.
    """
    choose_compilation(compiled)
    _check_dtype(keys.weights_dtype, wanted.weights_dtype)
    _check_patterns(keys.modules_to_not_convert, wanted.modules_to_not_convert)
    for dtype, names in wanted.modules_dtype_dict:
        _check_dtype(keys.modules_dtype_dict, dtype)
        _check_patterns(keys.modules_dtype_dict, names)


def _check_dtype(key: str, dtype: str) -> None:
    known = part("common").accepted_weight_dtypes
    if dtype not in known:
        near = nearest(dtype, sorted(known)) or ["int8", "uint4", "float8_e4m3fn"]
        raise OptionError(key, dtype, f"SDNQ has no {dtype!r}; it has {', '.join(near)} and others")


def _check_patterns(key: str, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            part("utils").check_param_name_in("layers.0.weight", [name])
        except re.error as error:
            raise OptionError(key, name, f"{name!r} is no pattern that SDNQ can read ({error})") from error
