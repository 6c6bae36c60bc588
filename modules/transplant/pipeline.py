"""One loaded pipeline and the transformers in it: load, swap in place, fall back, nothing lost.

OverrideArchMismatch is caught here and nowhere else.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from transplant.base_components import load_component, load_pipeline, weight_bytes
from transplant.base_model import BaseModel, read_base
from transplant.build import Progress, build
from transplant.errors import BaseModelError, OverrideArchMismatch, TransplantError
from transplant.hosts.base import Host
from transplant.memory import available_bytes
from transplant.plan import LoadPlan, plan
from transplant.slots import PRIMARY, Failure, Loaded, Override, Slot, stamp_of
from transplant.view import log_line

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

log = logging.getLogger("transplant")

LOAD_ERRORS = (TransplantError, OSError, MemoryError, RuntimeError)
"""What a load can end with once its plan was accepted: cancelled, the disk failed, memory ran out."""


@dataclass(frozen=True)
class Outcome:
    """What a request came to.

    Attributes:
        changed: whether the pipeline was changed.
        refused: why the chosen file was refused; the pipeline works all the same.
    """

    changed: bool
    refused: OverrideArchMismatch | None = None


class Session:
    """A base model's pipeline with a file in each slot. Not thread-safe: the host runs one request at a time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.base: BaseModel | None = None
        self.pipeline: DiffusionPipeline | None = None
        self.primary = Slot(PRIMARY)

    def load_base(self, path: Path | str, override: Override | None = None) -> Outcome:
        """Load a base model, with a file in its primary slot if one is given.

        With a file that fits, the base model's own transformer is never read. A file that does not is
        refused and the base model comes with its own.

        Args:
            path: a diffusers pipeline folder or the id of a repository in the local hub cache.
            override: the file for the primary slot; None for the base model's own transformer.

        Returns:
            Whether the file was refused, and why.

        Raises:
            BaseModelError: the base model cannot be used; what was loaded before still is.
            LoadCancelled: the user cancelled; what was loaded before is loaded again.
        """
        base = read_base(path)
        planned, failure = self._plan(base, override)
        settings = self._host.load_settings()
        before = (self.base, self.primary)
        if self.pipeline is not None and weight_bytes(base.path) > available_bytes(settings.device):
            self.unload()
        try:
            pipeline, loaded = self._load_pipeline(base, override if planned else None, planned, self._host.cancelled)
        except LOAD_ERRORS:
            self._load_again(*before)
            raise
        self.unload()
        self.base, self.pipeline, self.primary = base, pipeline, Slot(PRIMARY).with_loaded(loaded)
        if failure is not None:
            self.primary = self.primary.with_refused(failure)
        return Outcome(changed=True, refused=failure.error if failure else None)

    def choose(self, override: Override | None) -> Outcome:
        """Put a file into the primary slot; None puts the base model's own transformer back.

        Only the transformer is replaced: every other component stays as it is.

        Returns:
            Whether anything changed, and why not.

        Raises:
            LoadCancelled: the user cancelled; the transformer that was there before still works.
            TransplantError, OSError, MemoryError, RuntimeError: the load failed half-way; likewise.
        """
        if self.base is None or self.pipeline is None:
            raise BaseModelError("no base model is loaded: choose one first")
        if self.primary.holds(override):
            self.primary = self.primary.with_loaded(self.primary.loaded or Loaded(None))
            return Outcome(changed=False)
        planned, failure = self._plan(self.base, override)
        if failure is not None:
            self.primary = self.primary.with_refused(failure)
            return Outcome(changed=False, refused=failure.error)
        self._swap(self.base, override, planned)
        return Outcome(changed=True)

    def unload(self) -> None:
        """Free the pipeline."""
        self.pipeline = None
        self.primary = self.primary.emptied()
        _free_memory()

    @property
    def transformer(self) -> ModelMixin | None:
        """The transformer that the pipeline holds."""
        if self.pipeline is None or self.base is None:
            return None
        return getattr(self.pipeline, _component(self.base))

    def _plan(self, base: BaseModel, override: Override | None) -> tuple[LoadPlan | None, Failure | None]:
        """Plan a file, or say why not. A refusal holds until the file changes."""
        if override is None:
            return None, None
        failed = self.primary.failed
        if failed and failed.override == override and self.base == base and failed.still_holds():
            return None, failed
        settings = self._host.load_settings()
        stamp = stamp_of(override.path)
        try:
            planned = plan(
                override.path, base, component=_component(base), dtype=settings.dtype,
                device=settings.device, use_mmap=settings.use_mmap,
            )  # fmt: skip
        except OverrideArchMismatch as error:
            log.warning("%s", error)
            return None, Failure(override, stamp, error)
        return planned, None

    def _swap(self, base: BaseModel, override: Override | None, planned: LoadPlan | None) -> None:
        """Replace the transformer: the old one goes last, or first where memory is short."""
        component, before = _component(base), self.primary
        needed = planned.peak_bytes if planned else weight_bytes(base.path / component)
        release_first = needed > available_bytes(self._host.load_settings().device)
        if release_first:
            self._install(component, None)
        try:
            new, loaded = self._load_transformer(base, override, planned, self._host.cancelled)
        except LOAD_ERRORS:
            if release_first:
                self._restore(base, before)
            raise
        self._install(component, new)
        self.primary = before.with_loaded(loaded)
        del new
        _free_memory()

    def _restore(self, base: BaseModel, before: Slot) -> None:
        """Load what a slot held before; the base model's own transformer where that file is gone."""
        override = before.loaded.override if before.loaded else None
        planned, failure = self._plan(base, override)
        model, loaded = self._load_transformer(base, override if planned else None, planned, _never)
        self._install(_component(base), model)
        self.primary = before.with_loaded(loaded)
        if failure is not None:
            self.primary = self.primary.with_refused(failure)

    def _load_again(self, base: BaseModel | None, slot: Slot) -> None:
        """After a failed change of base model: what was there before, if it had to go."""
        if base is None or self.pipeline is not None:
            return
        log.info("loading %s again", base.path.name)
        override = slot.loaded.override if slot.loaded else None
        planned, _ = self._plan(base, override)
        self.pipeline, loaded = self._load_pipeline(base, override if planned else None, planned, _never)
        self.base, self.primary = base, slot.with_loaded(loaded)

    def _load_pipeline(
        self, base: BaseModel, override: Override | None, planned: LoadPlan | None, cancelled: Callable[[], bool]
    ) -> tuple[DiffusionPipeline, Loaded]:
        given: dict[str, Any] = {}
        loaded = Loaded(None)
        if planned is not None:
            given[_component(base)], loaded = self._load_transformer(base, override, planned, cancelled)
        settings = self._host.load_settings()
        return load_pipeline(base, settings, given, self._host.report, cancelled), loaded

    def _load_transformer(
        self, base: BaseModel, override: Override | None, planned: LoadPlan | None, cancelled: Callable[[], bool]
    ) -> tuple[Any, Loaded]:
        """The transformer that a plan describes, or the base model's own where there is none."""
        if planned is None:
            component = _component(base)
            self._host.report(f"Loading {component} of {base.path.name}", None)
            return load_component(base, component, self._host.load_settings()), Loaded(None)
        name = planned.header.path.name

        def report(progress: Progress) -> None:
            self._host.report(f"Loading {name}", progress.done_bytes / max(progress.total_bytes, 1))

        built = build(planned, progress=report, cancelled=cancelled)
        log.info("%s", log_line(planned, built.seconds))
        return built.transformer, Loaded(override, planned.header.stamp)

    def _install(self, component: str, model: Any) -> None:
        setattr(self.pipeline, component, model)
        if model is None:
            _free_memory()


def _component(base: BaseModel) -> str:
    component = PRIMARY.component_in(base)
    if component is None:
        raise BaseModelError(f"{base.path.name}: a {base.pipeline} has no transformer that a file could replace")
    return component


def _never() -> bool:
    return False


def _free_memory() -> None:
    """Give back what nobody refers to any more, also on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
