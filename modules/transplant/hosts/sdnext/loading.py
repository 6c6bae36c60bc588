"""The host's loads of a transformer through the core.

The host calls these in place of `pipelines.generic.load_transformer` and `pipelines.native_transformer.load`. Where a
file is refused the host gets its base model's own transformer; where we fail, its own code does what it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from transplant.architectures import SPECS
from transplant.architectures.spec import SiblingSpec, TransformerSpec
from transplant.base_model import BaseModel
from transplant.build import Built, Progress, build
from transplant.errors import LoadCancelled, OverrideArchMismatch
from transplant.hosts.base import LoadSettings
from transplant.hosts.sdnext import app, notices
from transplant.hosts.sdnext.base import of_repository
from transplant.hosts.sdnext.calls import LOADED, Call, call_of, chosen, forget, remember
from transplant.hosts.sdnext.settings import load_settings, quantize_on_load
from transplant.load_plan import LoadPlan
from transplant.plan import plan, spec_for
from transplant.slots import DEFAULT, PRIMARY, Loaded, Override, SlotKind
from transplant.view import log_line

log = logging.getLogger("transplant")

_by_host: ContextVar[bool] = ContextVar("by_host", default=False)
"""Whether the host's own loader is at work, whose inner calls are its own matter."""

_SHARED = ("load_config", "dtype", "allow_quant", "modules_to_not_convert", "modules_dtype_dict")
"""Arguments that the host's two loaders share."""

_STEPS = 100
"""Steps that a load's progress is told in."""


def takes(path: Path) -> bool:
    """Whether files like this one are ours to load, by the switches."""
    return bool(app.option("transplant_gguf" if path.suffix.lower() == ".gguf" else "transplant_loader", True))


def load_transformer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The host's `load_transformer`: the transformer of a base model, or of the file that the user chose for it.

    Returns:
        A diffusers model; None or an error only where the base model itself cannot be loaded.
    """
    try:
        call = call_of(original, args, kwargs)
    except (TypeError, KeyError) as error:
        notices.fault("a call of load_transformer was not understood", error)
        return original(*args, **kwargs)
    try:
        override = chosen(call.kind)
    except OverrideArchMismatch as refusal:
        return own_transformer(original, call, str(refusal))
    if override is None:
        return own_transformer(original, call)
    forget(call.kind)
    if not takes(override.path):
        return _by_itself(original, call)
    failure: Exception | None = None
    try:
        with job("Load UNET"):
            planned = plan_call(call, override)
            built = built_from(planned)
        take_over(call.kind, call.component, override, planned, built, call)
        return built.transformer
    except Exception as error:  # the host boundary: a fault of ours must not cost the host its model
        failure = error
    return _instead(original, call, override, failure)


def load_native(
    original: Callable[..., Any], local_file: Any, repo_id: str, spec: Any, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The host's `native_transformer.load`: a file's transformer with the models that it brings along.

    Returns:
        The transformer, and the siblings by the host's names for them.
    """
    path = Path(local_file).absolute()
    if _by_host.get() or not takes(path):
        return original(local_file, repo_id, spec, *args, **kwargs)
    override = Override(app.option(PRIMARY.option, path.stem), path)
    component = getattr(spec, "subfolder", None) or "transformer"
    own: dict[str, Any] = {"cls_name": spec.cls, "load_config": args[0] if args else None, "subfolder": component}
    own = {"repo_id": repo_id, **own, **{key: value for key, value in kwargs.items() if key in _SHARED}}
    call = Call(PRIMARY, repo_id, spec.cls, component, own, kwargs.get("sibling_classes") or {})
    forget(call.kind)
    failure: Exception | None = None
    try:
        with job("Load UNET"):
            planned = plan_call(call, override)
            built = built_from(planned)
        take_over(call.kind, component, override, planned, built, call)
        return built.transformer, dict(built.siblings)
    except Exception as error:  # the host boundary
        failure = error
    if not isinstance(failure, (OverrideArchMismatch, LoadCancelled)):
        notices.fault(f"{path.name} could not be loaded", failure)
        return original(local_file, repo_id, spec, *args, **kwargs)
    _refuse(call, str(failure))
    return app.module("pipelines.generic").load_transformer(**own), {}


def plan_call(call: Call, override: Override) -> LoadPlan:
    """Judge the file that was chosen for what the host asks for.

    Raises:
        OverrideArchMismatch, BaseModelError: see `plan.plan`.
    """
    base = of_repository(call.repo_id, {call.component: call.cls, **call.siblings})
    spec = _with_siblings(_spec(call, base), call.siblings)
    settings = load_settings(call.arguments.get("dtype"), quantize_on_load(call.arguments))
    return plan_file(override, base, call.component, settings, spec)


def plan_file(
    override: Override, base: BaseModel, component: str, settings: LoadSettings, spec: TransformerSpec | None = None
) -> LoadPlan:
    """Judge a file for a component of a base model. Raises OverrideArchMismatch, BaseModelError."""
    return plan(
        override.path, base, component=component, dtype=settings.dtype, device=settings.device,
        use_mmap=settings.use_mmap, compute=settings.compute, spec=spec,
    )  # fmt: skip


def built_from(planned: LoadPlan) -> Built:
    """Load what was planned, with the host's progress and its interrupt.

    Raises:
        OverrideArchMismatch: what only the weights could tell.
        LoadCancelled: the user interrupted.
    """
    state = app.shared().state
    state.textinfo, state.sampling_steps = f"Loading {planned.header.path.name}", _STEPS

    def report(progress: Progress) -> None:
        state.sampling_step = _STEPS * progress.done_bytes // max(progress.total_bytes, 1)

    for warning in planned.warnings:
        log.warning("%s: %s", planned.header.path.name, warning)
    built = build(planned, progress=report, cancelled=lambda: bool(state.interrupted))
    log.info("%s", log_line(planned, built.seconds))
    return built


def take_over(
    kind: SlotKind, component: str, override: Override, planned: LoadPlan, built: Built, call: Call | None
) -> None:
    """After a load: let the host's own state say what its slot holds."""
    loaded = Loaded(override, planned.header.stamp, tuple(built.siblings))
    remember(kind, component, loaded, built.transformer, call)
    notices.settled(kind.name)
    app.module("modules.sd_models").allow_post_quant = False


def own_transformer(original: Callable[..., Any], call: Call, refusal: str | None = None) -> Any:
    """The base model's own transformer, by the host's loader; where a file was refused, the option says so too."""
    if refusal is not None:
        _refuse(call, refusal)
    else:
        notices.settled(call.kind.name)
    model = _by_itself(original, call)
    if model is not None:
        remember(call.kind, call.component, Loaded(None), model, call)
    return model


@contextmanager
def job(title: str) -> Generator[None]:
    """What the host shows as being done."""
    state = app.shared().state
    number = state.begin(title)
    try:
        yield
    finally:
        state.end(number)


def _by_itself(original: Callable[..., Any], call: Call) -> Any:
    """The host's own loader, as it was called."""
    token = _by_host.set(True)
    try:
        return original(**call.arguments)
    finally:
        _by_host.reset(token)


def _refuse(call: Call, why: str) -> None:
    """Tell the user why the file is not used; the option goes back to Default."""
    notices.refuse(call.kind.name, f"{why.rstrip('.')}. The base model's own transformer is loaded.")
    app.set_option(call.kind.option, DEFAULT)
    setattr(app.module("modules.sd_unet"), LOADED[call.kind.name], None)


def _instead(original: Callable[..., Any], call: Call, override: Override, failure: Exception) -> Any:
    """What the host gets where its user's file could not be loaded."""
    if isinstance(failure, LoadCancelled) or (isinstance(failure, OverrideArchMismatch) and _is_known(call)):
        return own_transformer(original, call, str(failure))
    if not isinstance(failure, OverrideArchMismatch):
        notices.fault(f"{override.path.name} could not be loaded", failure)
    return _guarded(original, call)


def _guarded(original: Callable[..., Any], call: Call) -> Any:
    """The host's own loader with the file; should that fail, the base model's own transformer."""
    why, model = "", None
    try:
        model = _by_itself(original, call)
    except Exception as error:  # whatever the host's loaders raise
        why = f" ({' '.join(str(error).split())})"
    if model is None:
        return own_transformer(original, call, f"{app.option(call.kind.option)}: the host could not load it{why}")
    return model


def _is_known(call: Call) -> bool:
    """Whether the architecture is one of ours; files for others are the host's to judge, too."""
    return call.cls.__module__.startswith("diffusers.") and any(
        call.cls.__name__ in (spec.cls, *spec.other_classes) for spec in SPECS
    )


def _spec(call: Call, base: BaseModel) -> TransformerSpec:
    """The architecture; a class of the host's own may say what a file may leave out."""
    spec = spec_for(base, call.component)
    zeros: tuple[str, ...] = getattr(call.arguments.get("native_spec"), "zero_init_missing", ())
    return replace(spec, zero_init_missing=(*spec.zero_init_missing, *zeros)) if zeros else spec


def _with_siblings(spec: TransformerSpec, classes: Mapping[str, type]) -> TransformerSpec:
    """The architecture with the host's own classes for what its files bring along."""
    if not classes:
        return spec
    return replace(
        spec,
        siblings=tuple(SiblingSpec(name, name, f"{name}.", cls.__name__) for name, cls in classes.items()),
    )
