"""One loaded pipeline and the transformers in it: load, swap in place, fall back, nothing lost.

OverrideArchMismatch is caught here and nowhere else.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transplant import offload
from transplant.base_components import load_component, load_pipeline, weight_bytes
from transplant.base_model import BaseModel, read_base
from transplant.build import Progress, build
from transplant.checkpoint.shards import title
from transplant.errors import BaseModelError, OverrideArchMismatch
from transplant.fp8_outlook import Outlook, outlook
from transplant.fp8_storage import store_in_fp8, support_on
from transplant.hosts.base import Host, LoadSettings
from transplant.kept import KeptModels, Key
from transplant.load_plan import LoadPlan
from transplant.memory import available_bytes
from transplant.plan import plan, spec_for
from transplant.slots import PRIMARY, SECONDARY, SLOTS, Failure, Loaded, Override, Slot, SlotKind, stamp_of
from transplant.view import log_line

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


log = logging.getLogger("transplant")


@dataclass(frozen=True)
class Outcome:
    """What a request came to.

    Attributes:
        changed: whether the pipeline was changed.
        refused: why a chosen file was refused, the first where there are two; the pipeline works all the same.
    """

    changed: bool
    refused: OverrideArchMismatch | None = None


@dataclass(frozen=True)
class _Choice:
    """What a slot is to hold: a planned file, or the base model's own transformer.

    Attributes:
        kind: the slot.
        component: the pipeline component that it fills.
        override: the file; None for the base model's own transformer, also where the file was refused.
        plan: the file's plan.
        failure: why the file that was wanted is not used.
    """

    kind: SlotKind
    component: str
    override: Override | None = None
    plan: LoadPlan | None = None
    failure: Failure | None = None


class Session:
    """A base model's pipeline with a file in each slot. Not thread-safe: the host runs one request at a time.

    Attributes:
        base: the base model; None before the first load.
        pipeline: its pipeline; None while nothing is loaded.
        slots: state of every slot by name.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.base: BaseModel | None = None
        self.pipeline: DiffusionPipeline | None = None
        self.slots: dict[str, Slot] = {kind.name: Slot(kind) for kind in SLOTS}
        self._kept = KeptModels()
        self._loaded_with: dict[str, LoadSettings] = {}

    @property
    def primary(self) -> Slot:
        """The slot behind `sd_unet`."""
        return self.slots[PRIMARY.name]

    @property
    def transformer(self) -> ModelMixin | None:
        """The transformer of the primary slot."""
        component = PRIMARY.component_in(self.base) if self.base else None
        return getattr(self.pipeline, component) if self.pipeline is not None and component else None

    def load_base(
        self, path: Path | str, override: Override | None = None, secondary: Override | None = None
    ) -> Outcome:
        """Load a base model, with files in its slots where they are given.

        With a file that fits, the base model's own transformer is never read. A file that does not is
        refused and the base model comes with its own.

        Args:
            path: a diffusers pipeline folder or the id of a repository in the local hub cache.
            override: the file for the primary slot; None for the base model's own transformer.
            secondary: the file for the second transformer, where the pipeline has one.

        Returns:
            Whether a file was refused, and why.

        Raises:
            BaseModelError: the base model cannot be used; what was loaded before still is.
            LoadCancelled: the user cancelled; what was loaded before is loaded again.
        """
        base, settings = read_base(path), self._host.load_settings()
        choices = self._choices(base, {PRIMARY.name: override, SECONDARY.name: secondary})
        with ExitStack() as undo:
            if self.base is not None and self.pipeline is not None and weight_bytes(base.path) > self._available():
                undo.callback(self._load_again, self.base, dict(self.slots))
                self.unload()
            pipeline, loaded, choices = self._load_pipeline(base, choices, self._host.cancelled)
            undo.pop_all()
        self.unload()
        self.base, self.pipeline = base, pipeline
        self._settle(choices, loaded)
        log.info("%s: %s, %s on %s", base.path.name, base.pipeline, settings.dtype, settings.device)
        refused = next((choice.failure.error for choice in choices if choice.failure), None)
        return Outcome(changed=True, refused=refused)

    def choose(self, override: Override | None, kind: SlotKind = PRIMARY) -> Outcome:
        """Put a file into a slot; None puts the base model's own transformer back.

        Only that transformer is replaced: every other component stays as it is.

        Returns:
            Whether anything changed, and why not.

        Raises:
            BaseModelError: no base model is loaded, or its pipeline has no such slot.
            LoadCancelled: the user cancelled; the transformer that was there before still works.
            TransplantError, OSError, MemoryError, RuntimeError: the load failed half-way; likewise.
        """
        if self.base is None or self.pipeline is None:
            raise BaseModelError("no base model is loaded: choose one first")
        slot = self.slots[kind.name]
        if slot.holds(override):
            self.slots[kind.name] = slot.with_loaded(replace(slot.loaded or Loaded(None), override=override))
            return Outcome(changed=False)
        choice = self._choice(self.base, kind, override)
        if choice.failure is not None:
            self.slots[kind.name] = slot.with_refused(choice.failure)
            return Outcome(changed=False, refused=choice.failure.error)
        try:
            self._swap(self.base, choice)
        except OverrideArchMismatch as error:  # what only the weights themselves could tell, for example NaN scales
            failure = _failed(choice, error)
            self.slots[kind.name] = self.slots[kind.name].with_refused(failure)
            return Outcome(changed=False, refused=failure.error)
        return Outcome(changed=True)

    def fp8_outlook(self) -> Outlook:
        """What FP8 storage does, or would do, for the transformers that are loaded."""
        settings = self._host.load_settings()
        models: dict[str, Any] = {}
        if self.base is not None and self.pipeline is not None:
            names = [kind.component_in(self.base) for kind in SLOTS]
            models = {name: model for name in names if name and (model := getattr(self.pipeline, name)) is not None}
        patterns = {name: spec_for(self.base, name).fp8_skip_patterns for name in models} if self.base else {}
        return outlook(models, patterns, settings.device, settings.compute.fp8_storage)

    @property
    def placement(self) -> str:
        """Where and in which dtype the transformer computes, for people; "" while nothing is loaded."""
        component = PRIMARY.component_in(self.base) if self.base and self.pipeline is not None else None
        if component is None:
            return ""
        settings = self._loaded_with[component]
        rest = "" if settings.offload.mode == "none" else f", offloaded ({settings.offload.mode})"
        return f"{str(settings.dtype).removeprefix('torch.')} on {settings.device}{rest}"

    def unload(self) -> None:
        """Free the pipeline, and what was kept beside it."""
        self._kept.clear()
        self.pipeline = None
        self.slots = {name: slot.emptied() for name, slot in self.slots.items()}
        _free_memory()

    def _choices(self, base: BaseModel, overrides: Mapping[str, Override | None]) -> list[_Choice]:
        """A choice for every slot that the pipeline has. Files for slots that it lacks are ignored."""
        return [
            self._choice(base, kind, overrides.get(kind.name))
            for kind in SLOTS
            if kind is PRIMARY or kind.component_in(base) is not None
        ]

    def _choice(self, base: BaseModel, kind: SlotKind, override: Override | None) -> _Choice:
        """Plan a file for a slot, or say why not. A refusal holds until the file changes."""
        component = _component(base, kind)
        if override is None:
            return _Choice(kind, component)
        failed = self.slots[kind.name].failed
        if failed and failed.override == override and self.base == base and failed.still_holds():
            return _Choice(kind, component, failure=failed)
        settings = self._host.load_settings()
        stamp = stamp_of(override.path)
        try:
            planned = plan(
                override.path, base, component=component, dtype=settings.dtype,
                device=settings.rests_on, use_mmap=settings.use_mmap, compute=settings.compute,
            )  # fmt: skip
        except OverrideArchMismatch as error:
            log.warning("%s", error)
            return _Choice(kind, component, failure=Failure(override, stamp, error))
        return _Choice(kind, component, override, planned)

    def _swap(self, base: BaseModel, choice: _Choice) -> None:
        """Replace a transformer: the old one goes last, or first where memory is short."""
        before = self.slots[choice.kind.name]
        stamp = choice.plan.header.stamp if choice.plan else None
        settings = self._settings()
        kept = self._kept.take(Key(base.path, choice.component, choice.override, stamp, settings))
        models, loaded = kept or self._loaded_anew(base, choice, before)
        for sibling in before.loaded.siblings if before.loaded else ():
            if sibling not in models:  # the old file's sibling goes with it
                models[sibling] = load_component(base, sibling, self._host.load_settings())
        offload.disable(self.pipeline)
        self._keep(base, choice.component, before.loaded)
        self._loaded_with[choice.component] = settings
        self._install(models)
        self._offload()
        self._settle([choice], {choice.kind.name: loaded})
        models.clear()
        _free_memory()

    def _loaded_anew(self, base: BaseModel, choice: _Choice, before: Slot) -> tuple[dict[str, Any], Loaded]:
        needed = choice.plan.peak_bytes if choice.plan else weight_bytes(base.path / choice.component)
        with ExitStack() as undo:
            if needed > self._available():
                self._kept.clear()
                _free_memory()
            if needed > self._available():
                undo.callback(self._restore, base, before)
                offload.disable(self.pipeline)
                self._install({choice.component: None})
                _free_memory()
            loaded = self._load(base, choice, self._host.cancelled)
            undo.pop_all()
        return loaded

    def _keep(self, base: BaseModel, component: str, loaded: Loaded | None) -> None:
        """Keep what a slot holds now, and what came with it, for when it is chosen again."""
        if loaded is None or getattr(self.pipeline, component) is None:  # it had to go first
            return
        models = {name: getattr(self.pipeline, name) for name in (component, *loaded.siblings)}
        key = Key(base.path, component, loaded.override, loaded.stamp, self._loaded_with[component])
        self._kept.put(key, models, loaded, self._host.load_settings().keep)

    def _settings(self) -> LoadSettings:
        """What a load of now depends on."""
        return replace(self._host.load_settings(), keep=0)

    def _restore(self, base: BaseModel, before: Slot) -> None:
        """Load what a slot held before; the base model's own transformer where that file is gone."""
        choice = self._choice(base, before.kind, before.loaded.override if before.loaded else None)
        models, loaded = self._load(base, choice, _never)
        self._install(models)
        self._offload()
        self._settle([choice], {before.kind.name: loaded})

    def _load_again(self, base: BaseModel, slots: Mapping[str, Slot]) -> None:
        """After a failed change of base model: what was there before it had to go."""
        log.info("loading %s again", base.path.name)
        held = {name: slot.loaded.override if slot.loaded else None for name, slot in slots.items()}
        choices = self._choices(base, held)
        self.pipeline, loaded, choices = self._load_pipeline(base, choices, _never)
        self.base = base
        self._settle(choices, loaded)

    def _settle(self, choices: Iterable[_Choice], loaded: Mapping[str, Loaded]) -> None:
        """Let the slots say what the pipeline holds now."""
        for choice in choices:
            slot = Slot(choice.kind).with_loaded(loaded[choice.kind.name])
            self.slots[choice.kind.name] = slot.with_refused(choice.failure) if choice.failure else slot

    def _load_pipeline(
        self, base: BaseModel, choices: Sequence[_Choice], cancelled: Callable[[], bool]
    ) -> tuple[DiffusionPipeline, dict[str, Loaded], list[_Choice]]:
        """The pipeline, what each slot then holds, and the choices with what was refused while loading."""
        given: dict[str, Any] = {}
        loaded: dict[str, Loaded] = {}
        taken: list[_Choice] = []
        for choice in choices:
            loaded[choice.kind.name] = Loaded(None)
            if choice.plan is not None:
                try:
                    models, loaded[choice.kind.name] = self._load(base, choice, cancelled)
                    given |= models
                except OverrideArchMismatch as error:
                    choice = _Choice(choice.kind, choice.component, failure=_failed(choice, error))
            taken.append(choice)
        pipeline = load_pipeline(base, self._host.load_settings(), given, self._host.report, cancelled)
        for choice in taken:
            self._loaded_with[choice.component] = self._settings()
            if choice.component not in given:
                self._rest_in_fp8(base, choice.component, getattr(pipeline, choice.component))
        settings = self._settings()
        offload.enable(pipeline, settings.offload, settings.device)
        return pipeline, loaded, taken

    def _load(self, base: BaseModel, choice: _Choice, cancelled: Callable[[], bool]) -> tuple[dict[str, Any], Loaded]:
        """The transformer that a choice describes, with its siblings, by component; and what the slot then holds."""
        if choice.plan is None:
            self._host.report(f"Loading {choice.component} of {base.path.name}", None)
            own = load_component(base, choice.component, self._host.load_settings())
            self._rest_in_fp8(base, choice.component, own)
            return {choice.component: own}, Loaded(None)
        name = choice.plan.header.path.name

        def report(progress: Progress) -> None:
            total = progress.total_bytes
            self._host.report(f"Loading {name}", progress.done_bytes / max(total, 1), total)

        built = build(choice.plan, progress=report, cancelled=cancelled)
        log.info("%s", log_line(choice.plan, built.seconds))
        loaded = Loaded(choice.override, choice.plan.header.stamp, tuple(built.siblings))
        return {choice.component: built.transformer, **built.siblings}, loaded

    def _rest_in_fp8(self, base: BaseModel, component: str, model: Any) -> None:
        """FP8 storage for a transformer of the base model, where it is wanted and possible."""
        settings = self._host.load_settings()
        if not settings.compute.fp8_storage:
            return
        support = support_on(settings.device)
        if support.possible:
            store_in_fp8(model, spec_for(base, component).fp8_skip_patterns, f"{component} of {base.path.name}")
        else:
            log.info("FP8 storage has no effect: it %s", support.reason)

    def _install(self, models: Mapping[str, Any]) -> None:
        for component, model in models.items():
            setattr(self.pipeline, component, model)

    def _offload(self) -> None:
        settings = self._settings()
        offload.enable(self.pipeline, settings.offload, settings.device)

    def _available(self) -> int:
        return available_bytes(self._host.load_settings().rests_on)


def _failed(choice: _Choice, error: OverrideArchMismatch) -> Failure:
    """A refusal that came while loading."""
    log.warning("%s", error)
    override = choice.override or Override(title(error.file), error.file)
    return Failure(override, choice.plan.header.stamp if choice.plan else None, error)


def _component(base: BaseModel, kind: SlotKind) -> str:
    component = kind.component_in(base)
    if component is None:
        which = "no transformer" if kind is PRIMARY else "no second transformer"
        raise BaseModelError(f"{base.path.name}: a {base.pipeline} has {which} that a file could replace")
    return component


def _never() -> bool:
    return False


def _free_memory() -> None:
    """Give back what nobody refers to any more, also on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
