"""Another transformer in the pipeline that the host has loaded, while its text encoders and VAE stay.

The host calls these in place of `modules.sd_unet.load_unet` and `load_unet_secondary` when a choice changes. A file is
judged before anything is released. What cannot be swapped in place is the host's to reload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transplant.errors import BaseModelError, LoadCancelled, OverrideArchMismatch, TransplantError
from transplant.hosts.sdnext import app, notices
from transplant.hosts.sdnext.base import HostBase, of_pipeline
from transplant.hosts.sdnext.calls import LOADED, Call, Held, chosen, held_in
from transplant.hosts.sdnext.loading import (
    built_from,
    job,
    own_transformer,
    plan_call,
    plan_file,
    take_over,
    takes,
)
from transplant.hosts.sdnext.settings import load_settings, quantize_on_load
from transplant.load_plan import LoadPlan
from transplant.memory import available_bytes
from transplant.slots import DEFAULT, PRIMARY, SECONDARY, Override, SlotKind, name_of, stamp_of

log = logging.getLogger("transplant")

UNET = "unet"
"""The component of Stable Diffusion and SDXL, which the host loads with the pipeline and asks us to replace after."""

_IN_PLACE = ("none", "balanced", "model")
"""Offload modes under which a component can be replaced; the others tie themselves to every module."""


def load_unet(original: Callable[..., Any], model: Any, repo_id: Any = None) -> Any:
    """The host's `load_unet`: bring the pipeline to what `sd_unet` says."""
    return _brought(original, PRIMARY, model, repo_id)


def load_unet_secondary(original: Callable[..., Any], model: Any) -> Any:
    """The host's `load_unet_secondary`: bring the pipeline to what `sd_unet_secondary` says."""
    return _brought(original, SECONDARY, model, None)


def check_second(pipeline: Any) -> None:
    """A pipeline was loaded: a file that is still chosen for a second transformer which it has not is told of."""
    name = app.option(SECONDARY.option)
    if app.is_default(name) or held_in(pipeline, SECONDARY) is not None or not _lacks_second(pipeline):
        return
    _keep(SECONDARY, None, _no_second(name, pipeline))


def settle(kind: SlotKind, is_asked: bool = False) -> bool:
    """Bring the loaded pipeline to what a slot's option says, where that is not what it holds.

    Args:
        kind: the slot.
        is_asked: whether somebody asked for it; else a pipeline of which nothing is known here is left alone.

    Returns:
        Whether it then holds what was wanted.
    """
    pipeline, wanted = app.loaded_pipeline(), app.option(kind.option)
    sd_unet, held = app.module("modules.sd_unet"), held_in(pipeline, kind)
    if held is None and not is_asked:
        return True
    if _same(wanted, name_of(held.loaded) if held else getattr(sd_unet, LOADED[kind.name], None)):
        return True
    if kind is PRIMARY:
        sd_unet.load_unet(pipeline)
    else:
        sd_unet.load_unet_secondary(pipeline)
    return _same(wanted, app.option(kind.option))


def _brought(original: Callable[..., Any], kind: SlotKind, model: Any, repo_id: Any) -> Any:
    arguments = () if repo_id is None else (repo_id,)
    try:
        if model is not None and _choose(kind, model, is_loading=repo_id is not None):
            return None
    except Exception as error:  # the host boundary
        notices.fault("the transformer could not be swapped", error)
    try:
        return original(model, *arguments)
    except Exception as error:  # whatever the host's loaders raise
        if repo_id is not None or not _say_what_is_loaded(kind, error):
            raise


def _choose(kind: SlotKind, pipeline: Any, is_loading: bool) -> bool:
    """Bring a slot to what its option says. False where that is the host's own to do."""
    held = held_in(pipeline, kind)
    has_unet = kind is PRIMARY and getattr(pipeline, UNET, None) is not None
    try:
        override = chosen(kind)
    except OverrideArchMismatch as refusal:
        return _keep(kind, held, refusal)
    if held is not None and _holds(held, override):
        return True
    if held is None and kind is SECONDARY and override is not None and _lacks_second(pipeline):
        return _keep(kind, None, _no_second(override.name, pipeline))
    if held is None and (override is None or not has_unet):
        return False
    if override is not None and not takes(override.path):
        return False
    if not is_loading and not app.option("transplant_swap", True):
        return False
    return _swap(kind, pipeline, held, override, is_loading)


def _swap(kind: SlotKind, pipeline: Any, held: Held | None, override: Override | None, is_loading: bool) -> bool:
    call = held.call if held else None
    if override is None:
        if call is None or not _is_possible(pipeline, held, None):
            return _reload(kind)
        with job("Load UNET"):
            model = own_transformer(_original_loader(), call)
        if model is not None:
            _install(pipeline, call.component, model)
        return model is not None
    try:
        planned = _planned(pipeline, call, override)
    except BaseModelError as error:  # not enough is known of the base model here: its own loader knows more
        log.debug("%s is not swapped in place: %s", override.name, error)
        return _keep(kind, held, error) if is_loading else _reload(kind)
    except OverrideArchMismatch as refusal:
        return _keep(kind, held, refusal)
    try:
        if not is_loading and not _is_possible(pipeline, held, planned):
            return _reload(kind)
        with job("Load UNET"):
            built = built_from(planned)
    except (OverrideArchMismatch, LoadCancelled, MemoryError, RuntimeError, OSError) as error:
        return _keep(kind, held, error)
    component = call.component if call else UNET
    take_over(kind, component, override, planned, built, call)
    _install(pipeline, component, built.transformer, is_loading)
    log.info("%s is in place of the %s of %s", override.name, component, type(pipeline).__name__)
    return True


def _lacks_second(pipeline: Any) -> bool:
    """Whether a pipeline whose first slot we filled has nothing for the second."""
    first = held_in(pipeline, PRIMARY)
    names = [name for name in SECONDARY.components if first and name != first.component]
    return first is not None and all(getattr(pipeline, name, None) is None for name in names)


def _no_second(name: str, pipeline: Any) -> TransplantError:
    return TransplantError(
        f"{name} is not used: the {type(pipeline).__name__} that is loaded has no second transformer"
    )


def _planned(pipeline: Any, call: Call | None, override: Override) -> LoadPlan:
    if call is not None:
        return plan_call(call, override)
    base: HostBase = of_pipeline(pipeline, type(pipeline).__name__)
    return plan_file(override, base, UNET, load_settings(quantize=quantize_on_load({})))


def _is_possible(pipeline: Any, held: Held | None, planned: LoadPlan | None) -> bool:
    """Whether a component of a loaded pipeline can be replaced as it stands."""
    if hasattr(pipeline, "pipe") or (held is not None and held.loaded.siblings) or (planned and planned.siblings):
        return False
    if app.option("diffusers_offload_mode", "none") not in _IN_PLACE:
        return False
    if app.option("cuda_compile_backend", "none") != "none" and app.option("cuda_compile", []):
        return False
    is_quantized_after = app.option("sdnq_quantize_mode") == "post" and "Model" in app.option(
        "sdnq_quantize_weights", []
    )
    if is_quantized_after or app.option("layerwise_quantization", []):
        return False
    settings = load_settings()
    return planned is None or planned.peak_bytes <= available_bytes(settings.device)


def _install(pipeline: Any, component: str, model: Any, is_loading: bool = False) -> None:
    """Put a transformer into the pipeline, and do with it what the host does with one that it loads."""
    before: Any = getattr(pipeline, component, None)
    if hasattr(before, "offload_never"):
        model.offload_never = before.offload_never
    setattr(pipeline, component, model)
    del before
    if is_loading:
        return
    sd_models, devices = app.module("modules.sd_models"), app.module("modules.devices")
    sd_models.set_diffuser_options(pipeline, None, "model", offload=False, quiet=True)
    app.module("modules.attention").set_attention_dispatcher(pipeline)
    mode = app.option("diffusers_offload_mode", "none")
    if mode == "model" and hasattr(pipeline, "remove_all_hooks"):
        pipeline.remove_all_hooks()
    if mode == "none":
        sd_models.move_model(model, devices.device)
    else:
        sd_models.set_diffuser_offload(pipeline, "model", quiet=True, force=True)
    devices.torch_gc(force=True, reason="load")


def _reload(kind: SlotKind) -> bool:
    """The host's own reload; its loads come to us again."""
    setattr(app.module("modules.sd_unet"), LOADED[kind.name], None)
    app.module("modules.sd_models").reload_model_weights(force=True)
    return True


def _keep(kind: SlotKind, held: Held | None, error: Exception) -> bool:
    """A choice that was not taken: what is loaded stays, and the option says so."""
    name = name_of(held.loaded if held else None)
    stays = "The base model's own transformer stays" if app.is_default(name) else f"{name} stays"
    notices.refuse(kind.name, f"{str(error).rstrip('.')}. {stays} loaded.")
    app.set_option(kind.option, name)
    return True


def _say_what_is_loaded(kind: SlotKind, error: Exception) -> bool:
    """The host's own code failed at a choice; it would put the option back to what stood there, loaded or not.

    Returns:
        Whether what is loaded now is known, and the option says so.
    """
    pipeline = app.loaded_pipeline()
    held = held_in(pipeline, kind)
    if pipeline is not None and held is None:
        return False
    if held is not None:
        return _keep(kind, held, error)
    notices.refuse(kind.name, f"{app.option(kind.option)}: the host could not load it ({error}). No model is loaded.")
    app.set_option(kind.option, DEFAULT)
    return True


def _same(name: Any, other: Any) -> bool:
    return name == other or (app.is_default(name) and app.is_default(other))


def _holds(held: Held, override: Override | None) -> bool:
    """Whether this very file, unchanged since, is loaded."""
    if override != held.loaded.override:
        return False
    return override is None or stamp_of(override.path) == held.loaded.stamp


def _original_loader() -> Callable[..., Any]:
    """The host's own load_transformer, below ours."""
    function: Any = app.module("pipelines.generic").load_transformer
    return getattr(function, "transplant_original", function)
