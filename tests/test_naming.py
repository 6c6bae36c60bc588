"""Own names of a transformer's tensors: the same for every prefix, wrapper and bundle, or refused."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_models import MANIFESTS, manifest
from transplant.checkpoint.naming import (
    COMPANIONS,
    PREFIXES,
    SCHEDULE_BUFFERS,
    NamedKeys,
    dominant_prefix,
    drop_companions,
    normalise,
    split_siblings,
    unwrap,
)
from transplant.errors import DuplicateTensor, MixedPrefixes, OverrideArchMismatch, UnreadableFile

FILE = Path("folder/model.safetensors")
OWN = ("x_embedder.weight", "layers.0.attention.qkv.weight", "layers.0.attention.qkv.weight_scale", "layers.1.w1.bias")
ALL_MANIFESTS = sorted(path.name.removesuffix(".json.gz") for path in MANIFESTS.glob("*.json.gz"))
ALL_PREFIXES = ("", *PREFIXES)
HEADS = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.")


def under(prefix: str, names: Sequence[str] = OWN) -> list[str]:
    return [prefix + name for name in names]


@cache
def names_of(name: str) -> tuple[str, ...]:
    """The stored names of a real file, in its order."""
    return tuple(manifest(name).tensors)


def own_names(names: Sequence[str]) -> NamedKeys:
    """Normalised; the map to the stored names is complete and in the order of the file."""
    keys = normalise(FILE, iter(names))
    stored = dict.fromkeys(keys.stored.values())
    assert list(stored) == [name for name in names if name in stored]
    assert len(stored) + sum(keys.companions.values()) == len(names)
    return keys


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_the_prefixes_are_these_with_the_longest_first() -> None:
    assert set(PREFIXES) == {"model.diffusion_model.", "diffusion_model.", "net.", "transformer.", "model."}
    for index, prefix in enumerate(PREFIXES):
        assert not any(prefix.startswith(earlier) for earlier in PREFIXES[:index])


@pytest.mark.parametrize("prefix", ALL_PREFIXES)
def test_each_prefix(prefix: str) -> None:
    keys = own_names(under(prefix))
    assert keys.prefix == prefix
    assert dict(keys.stored) == {name: prefix + name for name in OWN}
    assert keys.companions == {}
    assert keys.wrappers == ()


@pytest.mark.parametrize("prefix", ALL_PREFIXES)
@pytest.mark.parametrize("name", ALL_MANIFESTS)
def test_real_files_have_the_same_own_names_under_every_prefix(name: str, prefix: str) -> None:
    stored = names_of(name)
    keys = own_names(stored)
    transformer = set(keys.stored.values())
    others = [other for other in stored if other not in transformer]
    moved = own_names([*others, *under(prefix, list(keys.stored))])
    assert list(moved.stored) == list(keys.stored)
    assert moved.prefix == prefix
    assert moved.companions == keys.companions


@pytest.mark.parametrize("name", ALL_MANIFESTS)
def test_real_files_lose_nothing_but_prefix_and_companions(name: str) -> None:
    keys = own_names(names_of(name))
    assert keys.wrappers == ()
    assert all(stored == keys.prefix + own for own, stored in keys.stored.items())
    assert not any(own.startswith(PREFIXES) for own in keys.stored)
    assert len(keys.stored) > 50
    assert bool(keys.companions) == (name.startswith("aio_") or name.endswith("_with_vae"))


def test_the_bundle_of_stable_diffusion() -> None:
    keys = own_names(names_of("aio_sd15_fp32"))
    assert keys.prefix == "model.diffusion_model."
    assert len(keys.stored) == 686
    assert keys.companions == {"schedule buffer": 12, "text encoder": 197, "VAE": 248, "EMA copy": 2}


def test_the_longest_prefix_that_fits_is_taken() -> None:
    assert dominant_prefix(under("model.diffusion_model.")) == "model.diffusion_model."
    assert dominant_prefix(under("model.diffusion.")) == "model."
    assert dominant_prefix([]) == ""


def test_only_whole_parts_are_prefixes() -> None:
    names = ["transformer_blocks.0.weight", "model_blocks.0.weight", "network.weight", "nets.0.weight"]
    keys = own_names(names)
    assert keys.prefix == ""
    assert list(keys.stored) == names


def test_names_that_begin_like_a_prefix_stay_where_most_have_none() -> None:
    names = [*under("blocks."), "net.weight", "model.weight", "transformer.weight"]
    keys = own_names(names)
    assert keys.prefix == ""
    assert list(keys.stored) == names


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_is_taken_off_once(prefix: str) -> None:
    assert list(own_names([*under(prefix), f"{prefix}{prefix}weight"]).stored)[-1] == f"{prefix}weight"


# --- mixed prefixes -------------------------------------------------------------------------------------------------


def mixed(names: Sequence[str]) -> MixedPrefixes:
    with pytest.raises(MixedPrefixes) as caught:
        normalise(FILE, names)
    assert isinstance(caught.value, OverrideArchMismatch)
    assert str(caught.value).startswith("model.safetensors: ")
    return caught.value


@pytest.mark.parametrize("prefix", PREFIXES)
def test_bare_names_beside_a_prefix_are_strangers(prefix: str) -> None:
    error = mixed(["lost.weight", *under(prefix), "found.bias"])
    assert error.prefix == prefix
    assert error.strangers == ("lost.weight", "found.bias")
    for word in (repr(prefix), "2 do not follow it", "lost.weight, found.bias"):
        assert word in str(error)


@pytest.mark.parametrize("other", ["model.diffusion_model.", "diffusion_model."])
def test_prefixed_names_beside_bare_ones_are_strangers(other: str) -> None:
    error = mixed([*under(""), f"{other}w"])
    assert (error.prefix, error.strangers) == ("", (f"{other}w",))
    assert "most keys have no prefix" in str(error)


@pytest.mark.parametrize("first", PREFIXES)
@pytest.mark.parametrize("second", PREFIXES)
def test_two_prefixes(first: str, second: str) -> None:
    names = [*under(first), f"{second}lost.weight"]
    if second.startswith(first):
        assert normalise(FILE, names).prefix == first
    else:
        error = mixed(names)
        assert (error.prefix, error.strangers) == (first, (f"{second}lost.weight",))


def test_of_two_halves_the_longest_prefix_is_named() -> None:
    assert mixed(["a", "b", "net.c", "net.d"]).prefix == "net."
    assert mixed(["net.c", "diffusion_model.d"]).prefix == "diffusion_model."


def test_five_strangers_are_shown() -> None:
    error = mixed([*under("net.", [f"own{n}" for n in range(20)]), *(f"lost{n}" for n in range(8))])
    assert "lost0, lost1, lost2, lost3, lost4 and 3 more" in str(error)
    assert len(error.strangers) == 8


def test_strangers_are_shown_with_control_characters_escaped() -> None:
    assert "a\\nb\\x1b" in str(mixed([*under("net."), "a\nb\x1b"]))


def test_a_prefix_that_is_not_known_counts_as_part_of_the_names() -> None:
    keys = own_names(under("dit.model."))
    assert keys.prefix == ""
    assert list(keys.stored) == under("dit.model.")


# --- wrappers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ALL_PREFIXES)
@pytest.mark.parametrize("head", HEADS[:4])
def test_wrappers_before_and_after_every_prefix(head: str, prefix: str) -> None:
    for names in (under(head + prefix), under(prefix + head)):
        keys = own_names(names)
        assert list(keys.stored) == list(OWN)
        assert "".join((keys.prefix, *keys.wrappers)).count("_orig_mod") == head.count("_orig_mod")
        assert "".join((keys.prefix, *keys.wrappers)).count("module") == head.count("module")


@pytest.mark.parametrize("head", [*HEADS[:4], "net._orig_mod.", "model.diffusion_model.module."])
@pytest.mark.parametrize("name", ["z_image_turbo_comfy_bf16", "aio_sd15_fp32", "anima_base_v1_bf16"])
def test_real_files_have_the_same_own_names_under_every_wrapper(name: str, head: str) -> None:
    own = list(own_names(names_of(name)).stored)
    assert list(own_names(under(head, own)).stored) == own


def test_wrappers_inside_names() -> None:
    stored = {
        "blocks.0._orig_mod.attn.to_q.weight": "blocks.0.attn.to_q.weight",
        "blocks._orig_mod.1._orig_mod.mlp.weight": "blocks.1.mlp.weight",
        "_orig_mod.blocks.2._orig_mod.weight": "blocks.2.weight",
        "final._orig_mod.weight": "final.weight",
    }
    keys = own_names(list(stored))
    assert {stored: own for own, stored in keys.stored.items()} == stored
    assert keys.wrappers == ("_orig_mod.",)


@pytest.mark.parametrize(
    "name", ["blocks.module.weight", "modules.0.weight", "x_orig_mod.weight", "_orig_mods.weight", "weight._orig_mod"]
)
def test_names_that_only_look_like_wrapped(name: str) -> None:
    seen: set[str] = set()
    assert unwrap(name, seen) == name
    assert seen == set()
    assert list(own_names([name]).stored) == [name]


def test_unwrap_tells_what_it_took_off() -> None:
    for name, parts in (
        ("module.w", {"module."}), ("_orig_mod.w", {"_orig_mod."}), ("a._orig_mod.w", {"_orig_mod."}),
        ("module._orig_mod.w", {"module.", "_orig_mod."}), ("_orig_mod.module.w", {"module.", "_orig_mod."}),
    ):  # fmt: skip
        seen: set[str] = set()
        assert unwrap(name, seen) in ("w", "a.w")
        assert seen == parts


def test_some_wrapped_and_some_not() -> None:
    keys = own_names(["module.a", "b", "blocks.0._orig_mod.c"])
    assert list(keys.stored) == ["a", "b", "blocks.0.c"]
    assert keys.wrappers == ("_orig_mod.", "module.")


# --- two stored names for one tensor --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (("w", "module.w"), "w"),
        (("_orig_mod.w", "w"), "w"),
        (("blocks.0.w", "blocks._orig_mod.0.w"), "blocks.0.w"),
        (("net.w", "net.module.w"), "w"),
        (("model.diffusion_model.blocks.0._orig_mod.w", "model.diffusion_model._orig_mod.blocks.0.w"), "blocks.0.w"),
        (("net.scaled_fp8", "scaled_fp8", "net.w"), "scaled_fp8"),
    ],
)
def test_duplicates_show_both_stored_names(names: tuple[str, ...], own: str) -> None:
    with pytest.raises(DuplicateTensor) as caught:
        normalise(FILE, names)
    assert isinstance(caught.value, UnreadableFile)
    assert caught.value.tensor == own
    assert caught.value.stored == names[:2]
    assert f"holds {own} twice, as {names[0]} and as {names[1]}" in str(caught.value)


# --- companions, EMA, schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ALL_PREFIXES)
@pytest.mark.parametrize("companion", COMPANIONS)
def test_each_companion_beside_each_prefix(companion: str, prefix: str) -> None:
    keys = own_names([f"{companion}first.weight", *under(prefix), f"{companion}last.weight"])
    assert list(keys.stored) == list(OWN)
    assert keys.prefix == prefix
    assert keys.companions == {COMPANIONS[companion]: 2}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("companion", COMPANIONS)
def test_companions_in_wrappers(companion: str, head: str) -> None:
    keys = own_names([*under(f"{head}model.diffusion_model."), f"{head}{companion}weight"])
    assert list(keys.stored) == list(OWN)
    assert keys.companions == {COMPANIONS[companion]: 1}


def test_companions_that_outnumber_the_transformer() -> None:
    keys = own_names([*(f"conditioner.embedders.0.{n}" for n in range(99)), "model.diffusion_model.w"])
    assert keys.prefix == "model.diffusion_model."
    assert list(keys.stored) == ["w"]


def test_kinds_of_companions_are_counted_together() -> None:
    names = ["cond_stage_model.a", "text_encoders.b", "vae.c", "first_stage_model.d", "first_stage_model.e", "w"]
    assert own_names(names).companions == {"text encoder": 2, "VAE": 3}


@pytest.mark.parametrize(
    "name", ["vaes.w", "vae", "conditioner_proj.w", "blocks.vae.w", "vocoder_in.w", "model_emas.w"]
)
def test_names_that_only_look_like_companions(name: str) -> None:
    assert drop_companions([name]) == ([name], {})


def test_a_bundle_of_companions_only() -> None:
    keys = own_names(["vae.encoder.w", "conditioner.w", "betas", "model_ema.decay"])
    assert keys.stored == {}
    assert keys.prefix == ""
    assert keys.companions == {"VAE": 1, "text encoder": 1, "schedule buffer": 1, "EMA copy": 1}


def test_no_names() -> None:
    assert own_names([]) == NamedKeys("", {}, {}, ())


def test_of_normal_and_ema_weights_the_normal_ones_are_taken() -> None:
    for order in (("model.", "model_ema."), ("model_ema.", "model.")):
        keys = own_names([name for prefix in order for name in under(prefix)])
        assert dict(keys.stored) == {name: f"model.{name}" for name in OWN}
        assert keys.companions == {"EMA copy": len(OWN)}


def test_ema_names_of_stable_diffusion_have_no_dots() -> None:
    names = ["model_ema.decay", "model_ema.num_updates", "model_ema.diffusion_modelinput_blocks00weight"]
    keys = own_names([*names, *under("model.diffusion_model.")])
    assert keys.companions == {"EMA copy": 3}
    assert list(keys.stored) == list(OWN)


@pytest.mark.parametrize("buffer", sorted(SCHEDULE_BUFFERS))
def test_schedule_buffers(buffer: str) -> None:
    keys = own_names([buffer, *under("model.diffusion_model.")])
    assert keys.companions == {"schedule buffer": 1}
    assert list(keys.stored) == list(OWN)
    inside = f"model.diffusion_model.{buffer}"
    assert list(own_names([*under("model.diffusion_model."), inside]).stored)[-1] == buffer


# --- markers of the whole file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ALL_PREFIXES)
@pytest.mark.parametrize("marker_prefix", ["", None])
def test_the_scaled_fp8_marker_outside_and_under_the_prefix(prefix: str, marker_prefix: str | None) -> None:
    marker = (prefix if marker_prefix is None else marker_prefix) + "scaled_fp8"
    for names in ([marker, *under(prefix)], [*under(prefix), marker], [marker, f"{prefix}w"]):
        keys = own_names(names)
        assert keys.prefix == prefix
        assert keys.stored["scaled_fp8"] == marker


def test_other_markers_must_follow_the_prefix() -> None:
    assert mixed([*under("net."), "scaled_fp8.w"]).strangers == ("scaled_fp8.w",)
    assert mixed([*under("net."), "w.comfy_quant"]).strangers == ("w.comfy_quant",)


# --- siblings -------------------------------------------------------------------------------------------------------


def test_siblings_are_split_off_with_their_prefix_kept() -> None:
    names = ["llm_adapter.a", "blocks.0", "aligner.b", "llm_adapter.c", "blocks.1", "llm_adapters.d"]
    own, siblings = split_siblings(iter(names), ["llm_adapter.", "aligner."])
    assert own == ["blocks.0", "blocks.1", "llm_adapters.d"]
    assert siblings == {"llm_adapter.": ["llm_adapter.a", "llm_adapter.c"], "aligner.": ["aligner.b"]}


def test_no_siblings() -> None:
    assert split_siblings(OWN, []) == (list(OWN), {})
    assert split_siblings(OWN, ["llm_adapter."]) == (list(OWN), {})
    assert split_siblings([], ["llm_adapter."]) == ([], {})


def test_the_adapter_of_anima() -> None:
    keys = own_names(names_of("anima_base_v1_bf16"))
    own, siblings = split_siblings(keys.stored, ["llm_adapter."])
    assert len(own) + len(siblings["llm_adapter."]) == len(keys.stored) == 685
    assert len(siblings["llm_adapter."]) > 50
    assert all(keys.stored[name].startswith("net.llm_adapter.") for name in siblings["llm_adapter."])


# --- properties -----------------------------------------------------------------------------------------------------

PARTS = st.sampled_from(["blocks", "0", "1", "attn", "weight", "bias", "module", "vae", "net", "model", "é", "a b", ""])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(NAMES, min_size=1, max_size=8, unique=True),
    prefix=st.sampled_from(ALL_PREFIXES),
    head=st.sampled_from(["", *HEADS[:4]]),
    order=st.booleans(),
)
def test_what_is_put_on_is_taken_off(names: list[str], prefix: str, head: str, order: bool) -> None:
    names = [f"own_{name}" for name in names]  # so that none begins like a prefix, wrapper or companion itself
    keys = own_names(under(head + prefix if order else prefix + head, names))
    assert list(keys.stored) == names


@settings(max_examples=300, deadline=None)
@given(names=st.lists(NAMES, max_size=8, unique=True))
def test_any_names_are_accounted_for_or_refused(names: list[str]) -> None:
    try:
        keys = own_names(names)
    except (MixedPrefixes, DuplicateTensor):
        return
    assert all(stored.endswith(own) for own, stored in keys.stored.items())
