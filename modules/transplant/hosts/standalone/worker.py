"""The standalone host: one session, and everything that is done with it, one job at a time.

Torch and diffusers are imported on the worker's own thread, so that the page answers before they are.
"""

from __future__ import annotations

import logging
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transplant.digest import Digests
from transplant.errors import OptionError, TransplantError, printable
from transplant.hosts.standalone.folders import BASES, OVERRIDES, Catalog, find, list_bases, list_overrides
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.jobs import EVERYONE, Job, JobQueue, Notice, Saved, sentence
from transplant.hosts.standalone.settings import Settings
from transplant.options import OPTIONS, option
from transplant.slots import DEFAULT, Loaded, Override, name_of, stamp_of

if TYPE_CHECKING:
    from transplant.generate import Request
    from transplant.hosts.base import LoadSettings
    from transplant.pipeline import Outcome, Session

log = logging.getLogger("transplant")

BASE, UNET, FP8 = "sd_model_checkpoint", "sd_unet", "fp8_storage"
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Holding:
    """What is loaded.

    Attributes:
        base: the base model's name.
        override: the file in place of its transformer, or Default.
        how: compute dtype and device, for people.
    """

    base: str
    override: str
    how: str


@dataclass(frozen=True)
class Note:
    """What an option does for what is loaded.

    Attributes:
        text: a sentence.
        enabled: False where it can do nothing on this device.
    """

    text: str
    enabled: bool


class Worker:
    """The standalone Host (see hosts/base.py).

    Attributes:
        settings: the option store.
        catalog: what can be chosen.
        queue: the jobs.
        revision: changes whenever something that a control shows may have changed.
        holding: what is loaded; None while nothing is.
        missing: base model or override that the settings name and the folders lack.
        notes: what an option does for what is loaded, by key, for those whose effect depends on it.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        pictures: PictureStore,
        digests: Digests,
        device: str = "auto",
        dtype: str | None = None,
    ) -> None:
        """`dtype` stands above the option of that name, for this run."""
        self.settings = settings
        self.catalog = catalog
        self.queue = JobQueue(self._bump)
        self.revision = 0
        self.holding: Holding | None = None
        self.missing: frozenset[str] = frozenset()
        self.notes: dict[str, Note] = {}
        self._pictures = pictures
        self._digests = digests
        self._device = device
        self._dtype = dtype
        self._session: Session | None = None
        self._job: Job | None = None
        self._names: dict[Path, str] = {}
        catalog.refresh(settings.get("transplant_hub_cache"))

    # What the page, and later the API, ask for.

    def start(self) -> None:
        """Begin to work; first load what the settings name."""
        self._submit(EVERYONE, "Loading at start", self._load_at_start)
        self.queue.start()

    def stop(self) -> bool:
        """Cancel everything and end; whether the thread ended in time."""
        return self.queue.stop()

    def dynamic(self) -> dict[str, Sequence[str]]:
        """The members of the lists that change while running."""
        return {
            "bases": list(self.catalog.bases),
            "overrides": [DEFAULT, *self.catalog.overrides],
            "options": [known.key for known in OPTIONS],
        }

    def shown(self, key: str) -> object:
        """The value that an option's control shows: the one it is about to have, or has."""
        pending = self.queue.pending(key)
        return self.settings.get(key) if pending is None else pending

    def set_options(self, owner: str, values: Mapping[str, object]) -> list[str]:
        """Check all values, then set them; what they load is queued.

        Args:
            owner: who is told what came of it.
            values: new values by key.

        Returns:
            The keys that changed or are about to.

        Raises:
            OptionError: a value is refused; nothing was changed.
            TransplantError: the values cannot be saved; nothing was changed.
        """
        dynamic = self.dynamic()
        checked = {key: option(key).checked(_normal(value), dynamic) for key, value in values.items()}
        models = {key: checked.pop(key) for key in (BASE, UNET) if key in checked}
        try:
            changed = self.settings.set_many(checked, dynamic)
        except OSError as error:
            reason = f"{self.settings.path} cannot be written ({error.strerror})"
            raise TransplantError(f"{reason}: nothing was saved") from error
        if "transplant_hub_cache" in changed:
            self.catalog.refresh(self.settings.get("transplant_hub_cache"))
        self._bump()
        changed += [key for key, name in models.items() if self._is_new(key, name)]
        again = any(option(key).effect == "reload" for key in changed)
        if BASE in changed:
            self._submit_base(owner, models[BASE], models.get(UNET))
        elif again and UNET in changed and self.holding:
            self._submit_base(owner, self.holding.base, models[UNET])
        elif UNET in changed:
            self._submit_override(owner, models[UNET])
        elif again and (self.holding or self.queue.current()[0]):
            self._submit(owner, "Loading the model again", self._load_again)
        return changed

    def refresh(self, owner: str) -> None:
        """Look at the folders again; what the settings name and was missing is loaded when it is back."""
        self.catalog.refresh(self.settings.get("transplant_hub_cache"))
        self._bump()
        wanted_base, wanted = self.settings.get(BASE), self.settings.get(UNET)
        if wanted_base in self.missing and find(self.catalog.bases, wanted_base):
            self._submit_base(owner, wanted_base, None)
        elif self.holding and wanted in self.missing and find(self.catalog.overrides, wanted):
            self._submit_override(owner, wanted)

    def generate(self, owner: str, request: Request) -> Job:
        """Queue pictures."""
        title = "Picture" if request.batch == 1 else f"{request.batch} pictures"
        return self._submit(owner, title, lambda job: self._generate(job, request))

    def refuse(self, owner: str, error: TransplantError) -> None:
        """Tell someone why their request cannot become a job; the controls go back to what is true."""
        self.queue.tell(owner, Notice("error", sentence(str(error))))
        self._bump()

    # The Host protocol; called on the worker's thread.

    def load_settings(self) -> LoadSettings:
        """See Host. Raises TransplantError where this machine has no such device."""
        from transplant.hosts.base import compute_from, default_settings

        use_mmap = {"on": True, "off": False}.get(self.settings.get("transplant_mmap"))
        try:
            compute = compute_from(self.settings.get)
            return default_settings(self._device, self._dtype or self.settings.get("cuda_dtype"), use_mmap, compute)
        except (ValueError, RuntimeError) as error:
            raise TransplantError(f"{error}: start with another --device") from error

    def report(self, text: str, fraction: float | None) -> None:
        """See Host."""
        if self._job is not None:
            self._job.report(text, fraction)

    def cancelled(self) -> bool:
        """See Host."""
        return self._job is not None and self._job.cancelled

    # Jobs; they run on the worker's thread.

    def _submit(
        self, owner: str, title: str, work: Callable[[Job], Notice | None], wants: dict[str, str] | None = None
    ) -> Job:
        def run(job: Job) -> Notice | None:
            self._job = job
            try:
                return work(job)
            finally:
                self._job = None

        return self.queue.submit(owner, title, run, wants)

    def _submit_base(self, owner: str, name: str, override: str | None) -> None:
        wants = {BASE: name} if override is None else {BASE: name, UNET: override}
        self._submit(owner, f"Loading {name}", lambda _: self._load_base(name, override), wants)

    def _submit_override(self, owner: str, name: str) -> None:
        title = "Loading the base model's transformer" if name == DEFAULT else f"Loading {name}"
        self._submit(owner, title, lambda _: self._choose(name), {UNET: name})

    def _load_at_start(self, job: Job) -> Notice | None:
        if self.catalog.needs_demo:
            job.report("Making the demo", None)
            self.catalog.make_demo()
            self.catalog.refresh(self.settings.get("transplant_hub_cache"))
            self._bump()
        self._forget_demo()
        problems = list(self.settings.warnings)
        if self._selected_base():
            job.report(f"Loading {self._selected_base()}", None)
            notice = self._load_selected()
            problems += [notice.text] if notice else []
        return Notice("warning", " ".join(problems)) if problems else None

    def _forget_demo(self) -> None:
        """Settings that name the demo count as not set once it is not offered any more."""
        if self.settings.get(BASE) in self.catalog.bases:
            return
        if self.settings.get(BASE) in list_bases(self.catalog.demo_dir, False):
            values = {BASE: ""}
            if self.settings.get(UNET) in list_overrides(self.catalog.demo_dir):
                values[UNET] = DEFAULT
            self._save(values)

    def _selected_base(self) -> str:
        """The base model that the settings name; the only one where they name none."""
        bases = list(self.catalog.bases)
        return self.settings.get(BASE) or (bases[0] if len(bases) == 1 else "")

    def _load_selected(self) -> Notice | None:
        name = self._selected_base()
        if not name:
            raise TransplantError("no base model is chosen: choose one first")
        return self._load_base(name, None)

    def _load_base(self, name: str, override_name: str | None) -> Notice | None:
        """Load a base model with the override that is chosen now, or is given, where that fits."""
        path = find(self.catalog.bases, name)
        if path is None:
            self.missing = frozenset({name})
            folder = self.catalog.models_dir / BASES
            raise TransplantError(
                f"the base model {name} is missing from {folder}: put it back and refresh, or choose another"
            )
        wanted = override_name or self.settings.get(UNET)
        override = self._override(wanted)
        is_missing = override is None and wanted != DEFAULT
        self._names[path] = name
        try:
            outcome = self._sessions().load_base(path, override)
            self.missing = frozenset({wanted}) if is_missing else frozenset()
        finally:
            self._record()
        if is_missing:
            folder = self.catalog.models_dir / OVERRIDES
            return Notice(
                "warning",
                f"The override {wanted} is missing from {folder}. The base model's own transformer is loaded; "
                "put the file back and refresh, or choose another.",
            )
        return self._told(outcome)

    def _choose(self, name: str) -> Notice | None:
        """Put an override into the loaded base model; load that first where nothing is."""
        if self._sessions().pipeline is None:
            if not self._selected_base():
                raise TransplantError("no base model is chosen: choose one first")
            return self._load_base(self._selected_base(), name)
        override = self._override(name)
        if override is None and name != DEFAULT:
            raise TransplantError(f"{name} is not there any more: refresh the list")
        try:
            outcome = self._sessions().choose(override)
        finally:
            self.missing = frozenset()
            self._record()
        return self._told(outcome)

    def _load_again(self, _: Job) -> Notice | None:
        session = self._sessions()
        if session.base is None:
            return None
        loaded = session.primary.loaded
        try:
            return self._told(session.load_base(session.base.path, loaded.override if loaded else None))
        finally:
            self._record()

    def _generate(self, job: Job, request: Request) -> Notice | None:
        from transplant.generate import generate, infotext

        session = self._sessions()
        notice = self._load_selected() if session.pipeline is None else None
        pipeline = session.pipeline
        if pipeline is None:
            raise TransplantError("no base model is loaded: choose one first")
        pipeline.set_progress_bar_config(disable=True)

        def on_step(index: int, step: int, steps: int) -> None:
            of = f"Picture {index + 1} of {request.batch}, step" if request.batch > 1 else "Step"
            job.report(f"{of} {step} of {steps}", (index * steps + step) / (steps * request.batch))

        job.report("Encoding the prompt", None)
        names, keep = self._picture_names(), self.settings.get("samples_save")
        for picture in generate(pipeline, request, on_step=on_step, cancelled=self.cancelled):
            text = infotext(request, picture.seed, names)
            path = self._pictures.save(picture.image, picture.seed, text, keep)
            job.pictures = (*job.pictures, Saved(path, text))
            log.info("%s: %s", path.name, " / ".join(text.splitlines()))
        return notice

    # State

    def _sessions(self) -> Session:
        """The session, made at first need: this imports torch and diffusers."""
        if self._session is None:
            from diffusers.utils import logging as diffusers_logging
            from transformers.utils import logging as transformers_logging

            from transplant.pipeline import Session

            diffusers_logging.disable_progress_bar()
            transformers_logging.disable_progress_bar()
            self._session = Session(self)
        return self._session

    def _override(self, name: str) -> Override | None:
        path = find(self.catalog.overrides, name)
        return None if path is None or name == DEFAULT else Override(name, path)

    def _is_new(self, key: str, name: str) -> bool:
        """Whether choosing `name` asks for anything that is neither loaded nor queued."""
        pending = self.queue.pending(key)
        if pending is not None or self.holding is None:
            return pending != name
        if name in self.missing or key == UNET:
            return True  # the session knows whether the file changed
        return name != self.holding.base

    def _record(self) -> None:
        """Hold the settings against what is really loaded, and save them so."""
        session = self._sessions()
        fp8 = session.fp8_outlook()
        self.notes = {FP8: Note(fp8.text, fp8.possible)}
        if session.base is None or session.pipeline is None:
            self.holding = None
            return
        primary, pipeline = session.primary, session.pipeline
        how = f"{str(pipeline.dtype).removeprefix('torch.')} on {pipeline.device}"
        self.holding = Holding(self._names[session.base.path], name_of(primary.loaded), how)
        values = {BASE: self.holding.base}
        if self.settings.get(UNET) not in self.missing:
            values[UNET] = primary.selected
        self._save(values)
        if primary.loaded and primary.loaded.override:
            self._digests.start(primary.loaded.override.path)

    def _save(self, values: Mapping[str, str]) -> None:
        try:
            self.settings.set_many(values)
        except OSError as error:
            log.warning("%s cannot be written (%s)", self.settings.path, error.strerror)

    def _told(self, outcome: Outcome) -> Notice | None:
        if outcome.refused is None:
            return None
        kept = name_of(self._sessions().primary.loaded)
        stays = "The base model's own transformer is" if kept == DEFAULT else f"{kept} stays"
        return Notice("error", f"{sentence(str(outcome.refused))} {stays} loaded.")

    def _picture_names(self) -> dict[str, str]:
        """What made a picture, for its metadata."""
        session, holding = self._sessions(), self.holding
        names = {"Model": printable(holding.base)} if holding else {}
        loaded: Loaded | None = session.primary.loaded
        if loaded is None or loaded.override is None:
            return names
        names["UNET"] = printable(loaded.override.name)
        try:
            if stamp_of(loaded.override.path) == loaded.stamp:
                names["UNET hash"] = self._digests.short(loaded.override.path)
        except OSError as error:
            log.warning("%s: no hash for the metadata (%s)", loaded.override.path.name, error.strerror)
        return names

    def _bump(self) -> None:
        self.revision += 1


def make_request(
    prompt: str,
    negative: str,
    steps: float | None,
    guidance: float | None,
    width: float | None,
    height: float | None,
    seed: float | None,
    batch: float | None,
) -> Request:
    """A request from the fields of a form; an empty number is None. Seed -1 draws one.

    Raises:
        OptionError: a field holds what cannot be drawn.
    """
    from transplant.generate import Request

    def whole(name: str, value: float | None, least: int, most: int, multiple: int = 1) -> int:
        if value is None or value != int(value) or not least <= value <= most or value % multiple:
            step = f", a multiple of {multiple}" if multiple > 1 else ""
            raise OptionError(name, value, f"must be a whole number from {least} to {most}{step}, not {value}")
        return int(value)

    number = whole("seed", seed, -1, 2**63 - 1)
    if guidance is None or not 0 <= guidance <= 30:
        raise OptionError("guidance", guidance, f"must be from 0 to 30, not {guidance}")
    return Request(
        prompt, negative, whole("steps", steps, 1, 200), float(guidance), whole("width", width, 64, 4096, 16),
        whole("height", height, 64, 4096, 16), random.randint(0, MAX_SEED) if number == -1 else number,
        whole("pictures", batch, 1, 64),
    )  # fmt: skip


def _normal(value: object) -> object:
    return unicodedata.normalize("NFC", value) if isinstance(value, str) else value
