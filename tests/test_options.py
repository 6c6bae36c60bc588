"""Options as data: every value is checked by the option that stores it."""

from __future__ import annotations

import pytest

from transplant.errors import OptionError
from transplant.options import OPTIONS, option

LISTS = {"bases": ["a", "b"], "overrides": ["Default", "x"], "options": [o.key for o in OPTIONS]}


@pytest.mark.parametrize("key", [o.key for o in OPTIONS])
def test_every_default_is_a_valid_value(key: str) -> None:
    found = option(key)
    lists = LISTS | {"bases": ["", "a"]}
    assert found.checked(found.default, lists) == found.default
    assert found.label and found.section


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sd_unet", "nope"), ("sd_unet", 3), ("sd_unet", None), ("cuda_dtype", "BF16"), ("samples_save", "true"),
        ("samples_save", 1), ("quicksettings_list", "sd_unet"), ("quicksettings_list", ["nope"]),
        ("quicksettings_list", [1]), ("sd_model_checkpoint", ["a"]),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=key) as refusal:
        option(key).checked(value, LISTS)
    assert repr(refusal.value.value) in repr(value)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("twin", "the choices are a/twin.safetensors, z/twin.safetensors, Default, file 0, "),
        ("fiel 13", "the choices are file 13, "),
        ("quite other", "the choices are Default, file 0, file 1, file 2, file 3, file 4, file 5, file 6, ..."),
    ],
)
def test_what_is_like_a_wrong_choice_is_told_first(value: str, told: str) -> None:
    """Also of a long list: a name that several files have now is followed by those files."""
    lists = {"overrides": ["Default", *(f"file {n}" for n in range(20)), "a/twin.safetensors", "z/twin.safetensors"]}
    with pytest.raises(OptionError) as refusal:
        option("sd_unet").checked(value, lists)
    assert f"there is no {value!r}; {told}" in str(refusal.value)


def test_good_values() -> None:
    assert option("sd_unet").checked("x", LISTS) == "x"
    assert option("quicksettings_list").checked(["sd_unet", "cuda_dtype", "sd_unet"], LISTS) == [
        "sd_unet",
        "cuda_dtype",
    ]
    assert option("sd_unet").checked("anything") == "anything"  # a list that is not known is not checked


def test_keys_are_unique() -> None:
    assert len({o.key for o in OPTIONS}) == len(OPTIONS)


def test_unknown_option() -> None:
    with pytest.raises(OptionError, match="no such option"):
        option("nope")
