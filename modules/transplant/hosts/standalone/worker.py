"""The standalone host: one session, and everything that is done with it, one job at a time.

Torch and diffusers are imported on the worker's own thread, so that the page answers before they are.
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transplant import options
from transplant.base_model import read_base
from transplant.digest import Digests
from transplant.errors import OptionError, TransplantError, counted
from transplant.hosts.standalone import page
from transplant.hosts.standalone.compare import Comparison, compare
from transplant.hosts.standalone.folders import Catalog, find
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.jobs import EVERYONE, Job, JobQueue, Kind, Notice, Refused, Saved, sentence
from transplant.hosts.standalone.models import BASE, MODULES, NOTED, OFFLOAD, SLOT_OF, Holding, Models, Note
from transplant.hosts.standalone.recall import Recalled, recall
from transplant.hosts.standalone.settings import Settings
from transplant.hosts.standalone.starting import Start, architecture_of, start_for
from transplant.options import OPTIONS, option
from transplant.samplers import DEFAULT_SAMPLER
from transplant.slots import DEFAULT, NONE, PRIMARY, SECONDARY

if TYPE_CHECKING:
    from transplant.hosts.base import LoadSettings
    from transplant.inspection import Inspection
    from transplant.request import Request

log = logging.getLogger("transplant")

LISTED = ("transplant_hub_cache", "diffusers_dir", "unet_dir")
"""Options that say what is listed."""
FOLDERS = {known.key for known in OPTIONS if known.section == options.FOLDERS}


class Worker:
    """The standalone Host (see hosts/base.py).

    Attributes:
        settings: the option store.
        catalog: what can be chosen.
        pictures: where pictures go.
        queue: the jobs.
        models: what is loaded; its methods are for the worker's thread alone.
        revision: changes whenever something that a control shows may have changed.
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
        self.pictures = pictures
        self.queue = JobQueue(self._bump)
        self.models = Models(self, settings, catalog, digests)
        self.revision = 0
        self._digests = digests
        self._device = device
        self._dtype = dtype
        self._job: Job | None = None
        self._look_again()

    # What the page and the API ask for.

    def start(self) -> None:
        """Begin to work; first load what the settings name."""
        self._submit(EVERYONE, "Loading at start", self.models.load_at_start)
        self.queue.start()

    def stop(self) -> bool:
        """Cancel everything and end; whether the thread ended in time."""
        return self.queue.stop()

    @property
    def holding(self) -> Holding | None:
        """What is loaded; None while nothing is."""
        return self.models.holding

    @property
    def notes(self) -> Mapping[str, Note]:
        """What an option does for what is loaded, by key, for those whose effect depends on it."""
        return self.models.notes

    def dynamic(self) -> dict[str, Sequence[str]]:
        """The members of the lists that change while running."""
        return {
            "bases": list(self.catalog.bases),
            "overrides": [DEFAULT, NONE, *dict.fromkeys([*self.catalog.overrides, *self.models.lost()])],
            "options": [known.key for known in OPTIONS],
        }

    def shown(self, key: str) -> object:
        """The value that an option's control shows: the one it is about to have, or has."""
        pending = self.queue.pending(key)
        return self.settings.get(key) if pending is None else pending

    def is_shown(self, key: str) -> bool:
        """Whether an option is of any use now: the second slot is while the base model has two transformers."""
        if key != SECONDARY.option:
            return True
        return self.holding is not None and key in self.holding.overrides

    def file_choices(self, value: object) -> list[page.Choice]:
        """The entries of a slot's dropdown, with Default and None first."""
        others, lost = self.settings.get("transplant_other_files"), self.models.lost()
        there = [name for name, path in self.catalog.overrides.items() if lost.get(name) != path]
        return page.file_choices([DEFAULT, NONE, *there], value, self.catalog.seen, self.architecture(), others)

    def listed_files(self) -> list[page.Choice]:
        """Every file, none hidden; those that are not for the base model say so, where that is wanted at all."""
        others = "show" if self.settings.get("transplant_other_files") == "show" else "mark"
        return page.file_choices(list(self.catalog.overrides), None, self.catalog.seen, self.architecture(), others)

    def architecture(self) -> str:
        """The architecture of the loaded base model, of the selected one while none is; "" where that is not known."""
        if self.holding is not None:
            return self.holding.architecture
        base = find(self.catalog.bases, self.models.selected_base())
        return architecture_of(base) if base else ""

    def _look_again(self) -> None:
        """List the folders, and look into the files in the background: a thousand take seconds the first time."""

        def look() -> None:
            self.catalog.described()
            self._bump()

        self.catalog.refresh(*(self.settings.get(key) for key in LISTED))
        self._bump()
        threading.Thread(target=look, daemon=True, name="transplant-inventory").start()

    def not_loaded(self) -> list[str]:
        """What is selected and neither loaded nor about to be; the next picture loads it."""
        holding = self.holding
        if holding is None or self.queue.current()[0] is not None:
            return []
        loaded = {BASE: holding.base, **holding.overrides}
        known = {**self.catalog.bases, **self.catalog.overrides, DEFAULT: None}
        return [name for key in loaded if (name := self.settings.get(key)) != loaded[key] and name in known]

    def checked(self, values: Mapping[str, object]) -> dict[str, Any]:
        """The values as their options store them. Raises OptionError for the first that is refused."""
        dynamic = self.dynamic()
        checked = {key: option(key).checked(self._normal(key, value), dynamic) for key, value in values.items()}
        if any(checked.get(key, none) != none for key, none in MODULES.items()):
            from transplant.hosts.base import check_modules

            compiled = self.settings.get("sdnq_dequantize_compile")
            check_modules(*(checked.get(key, none) for key, none in MODULES.items()), compiled=compiled)
        for key in FOLDERS & checked.keys():
            if checked[key] and not (Path(checked[key]).is_absolute() and Path(checked[key]).is_dir()):
                raise OptionError(key, checked[key], "must be the full path of a folder that is there, or empty")
        return checked

    def set_options(self, owner: str, values: Mapping[str, object]) -> list[str]:
        """Check all values, then set them; what they load is queued, or waits for the next picture.

        Args:
            owner: who is told what came of it.
            values: new values by key.

        Returns:
            The keys that changed or are about to.

        Raises:
            OptionError: a value is refused; nothing was changed.
            TransplantError: the values cannot be saved; nothing was changed.
        """
        checked = self.checked(values)
        models = {key: checked.pop(key) for key in (BASE, *SLOT_OF) if key in checked}
        at_once = checked.get("transplant_load_at_once", self.settings.get("transplant_load_at_once"))
        try:
            changed = self.settings.set_many({**checked, **({} if at_once else models)}, self.dynamic())
        except OSError as error:
            reason = f"{self.settings.path} cannot be written ({error.strerror})"
            raise TransplantError(f"{reason}: nothing was saved") from error
        if not set(LISTED).isdisjoint(changed):
            self._look_again()
        self._bump()
        again = any(option(key).effect == "reload" for key in changed)
        if again:
            self.models.outdate()
        useless = [key for key in NOTED if key in changed and checked[key] != option(key).default]
        new = {key: name for key, name in models.items() if at_once and self._is_new(key, name)}
        changed += new
        if not (at_once and self._submit_models(owner, new, again, useless)):
            self._tell_useless(owner, useless)
        return changed

    def refresh(self, owner: str) -> None:
        """Look at the folders again; what the settings name and was missing is loaded when it is back."""
        self._look_again()
        self.models.follow_names()
        if misplaced := self.models.misplaced():
            self.queue.tell(owner, Notice("info", " ".join(misplaced)))
        missing, base = self.models.missing, self.settings.get(BASE)
        if base in missing and find(self.catalog.bases, base):
            self._submit_models(owner, {BASE: base}, False)
            return
        wanted = {key: self.settings.get(key) for key in SLOT_OF}
        back = {key: name for key, name in wanted.items() if name in missing and find(self.catalog.overrides, name)}
        if self.holding:
            self._submit_models(owner, back, False)

    def generate(self, owner: str, request: Request, override_settings: Mapping[str, object] | None = None) -> Job:
        """Queue pictures.

        Args:
            owner: who is told what came of it.
            request: what to draw.
            override_settings: option values for this job alone.

        Raises:
            OptionError: one of these values is refused.
        """
        checked = self.checked(override_settings or {})
        title = "Picture" if request.batch == 1 else f"{request.batch} pictures"
        return self._submit(owner, title, lambda job: self._generate(job, request, checked), kind="pictures")

    def compare(self, owner: str, comparison: Comparison) -> Job:
        """Queue a comparison; files that are not for the base model are told at once.

        Raises:
            OptionError: a file is not in the list, or none of them is for the base model.
        """
        for file in comparison.files:
            self.checked({comparison.slot: file})
        strangers = page.strangers(comparison.files, self.catalog.seen, self.architecture())
        told = " and ".join(f"{file} ({what})" for file, what in strangers.items())
        if len(strangers) == len(comparison.files):
            raise OptionError("files", list(strangers), f"none of them is for the loaded base model: {told}")
        warning = Notice("warning", f"Not for the loaded base model, and not drawn: {told}.") if strangers else None

        def work(job: Job) -> Notice | None:
            self.models.refuse_unreturnable()
            return compare(job, comparison, self.models, self.settings, self.pictures, self.cancelled)

        title = f"Comparing {counted(len(comparison.files), 'file')}"
        return self._submit(owner, title, work, kind="comparison", notice=warning)

    def inspect(self, owner: str, file: Path, base: Path, slot: str) -> Job:
        """Queue the question what loading a file over a base model would do; the job's result is the Inspection.

        In the queue, because planning must not run while the worker loads.
        """

        def work(job: Job) -> None:
            from transplant.inspection import inspect_over_base

            model = read_base(base)
            component = SLOT_OF[slot].component_in(model)
            if component is None:
                raise TransplantError(f"{base.name}: a {model.pipeline} has nothing for {slot}")
            job.result = inspect_over_base(file, model, component, self.load_settings())

        return self._submit(owner, f"Inspecting {file.name}", work, kind="question")

    def answer(self, owner: str) -> Inspection | None:
        """What someone's newest question came to; None while there is none, or it failed."""
        asked = [job for job in self.queue.jobs_of(owner) if job.kind == "question"]
        return asked[-1].result if asked else None

    def starting(self, ask_device: bool = False) -> Start:
        """What a picture begins with where nothing is said.

        Args:
            ask_device: find out where models compute, which imports torch; else a device that is not known yet
                counts as the CPU.

        Raises:
            TransplantError: this machine has no such device.
        """
        base = self.models.base_path()
        on_cpu = self.models.on_cpu
        if on_cpu is None:
            on_cpu = not ask_device or self.load_settings().device.type == "cpu"
        return start_for(base, on_cpu, self.catalog.built_in_dir)

    def samplers(self) -> tuple[str, ...]:
        """What the loaded base model can draw with."""
        return self.holding.samplers if self.holding else (DEFAULT_SAMPLER,)

    def recall(self, owner: str, file: Path) -> Recalled:
        """Read a picture's parameters, choose the models that made it, and say what is not here.

        Raises:
            TransplantError: there are none in it.
        """
        recalled = recall(file, self.catalog, self._digests)
        shown = {key: name for key, name in recalled.models.items() if name != self.shown(key)}
        if not self.is_shown(SECONDARY.option):
            shown = {key: name for key, name in shown.items() if name != DEFAULT or key == PRIMARY.option}
        if shown:
            self.set_options(owner, shown)
        if recalled.warnings:
            self.queue.tell(owner, Notice("warning", " ".join(recalled.warnings)))
        return recalled

    def refuse(self, owner: str, error: TransplantError) -> None:
        """Tell someone why their request cannot become a job; the controls go back to what is true."""
        self.queue.tell(owner, Notice("error", sentence(str(error))))
        self._bump()

    # The Host protocol; called on the worker's thread.

    def load_settings(self) -> LoadSettings:
        """See Host. Raises TransplantError where this machine has no such device."""
        from transplant.hosts.base import compute_from, default_settings
        from transplant.offload import Offload

        use_mmap = {"on": True, "off": False}.get(self.settings.get("transplant_mmap"))
        try:
            compute = compute_from(self.settings.get)
            dtype = self._dtype or self.settings.get("cuda_dtype")
            settings = default_settings(self._device, dtype, use_mmap, compute)
            offload = Offload(self.settings.get(OFFLOAD), self.settings.get("group_offload_stream"))
            return replace(settings, keep=self.settings.get("unet_cache")).offloaded(offload)
        except (ValueError, RuntimeError) as error:
            raise TransplantError(f"{error}: start with another --device") from error

    def report(self, text: str, fraction: float | None, total_bytes: int | None = None) -> None:
        """See Host."""
        if self._job is not None:
            self._job.report(text, fraction, total_bytes, "bytes")

    def cancelled(self) -> bool:
        """See Host."""
        return self._job is not None and self._job.cancelled and not self.models.is_settling

    # Jobs; they run on the worker's thread.

    def _submit(
        self,
        owner: str,
        title: str,
        work: Callable[[Job], Notice | None],
        wants: dict[str, str] | None = None,
        kind: Kind = "load",
        notice: Notice | None = None,
    ) -> Job:
        def run(job: Job) -> Notice | None:
            self._job = job
            try:
                return work(job)
            finally:
                self._job = None

        return self.queue.submit(owner, title, run, wants, kind, notice)

    def _submit_models(self, owner: str, new: dict[str, str], again: bool, turned_on: Sequence[str] = ()) -> bool:
        """Queue what loads the models that are newly chosen, or, where none is, what is loaded again.

        Args:
            owner: who is told what came of it.
            new: models by option.
            again: whether an option that loads depend on was changed.
            turned_on: the options of which the last job says where they have no effect.

        Returns:
            Whether anything was queued.
        """

        def submit(title: str, load: Callable[[], Notice | None], wants: dict[str, str], told: Sequence[str]) -> None:
            self._submit(owner, title, lambda _: self.models.noting(load(), told), wants)

        slots = {key: name for key, name in new.items() if key in SLOT_OF}
        if BASE in new:
            base = new[BASE]
            submit(f"Loading {base}", lambda: self.models.load_base(base, slots), new, turned_on)
        elif slots:
            last = list(slots)[-1]
            for key, name in slots.items():
                title = "Loading the base model's transformer" if name == DEFAULT else f"Loading {name}"
                submit(title, _choosing(self.models, key, name), {key: name}, turned_on if key == last else ())
        elif again and (self.holding or self.queue.current()[0]):
            submit("Loading the model again", self.models.load_again, {}, turned_on)
        else:
            return False
        return True

    def _tell_useless(self, owner: str, turned_on: Sequence[str]) -> None:
        if notice := self.models.noting(None, turned_on):
            self.queue.tell(owner, notice)

    def _generate(self, job: Job, request: Request, override_settings: Mapping[str, Any]) -> Notice | None:
        if not override_settings:
            notice = self.models.settle()
            self._draw(job, request)
            return notice
        reload = any(option(key).effect == "reload" for key in override_settings)
        if reload or self._swaps(override_settings):
            self.models.refuse_unreturnable()
        self.models.keep_settings = True
        try:
            with self.settings.overlaid(override_settings):
                if reload:
                    self.models.outdate()
                notice = self.models.settle()
                if notice is not None and notice.level == "error":
                    raise Refused(notice.text)
                self.models.refuse_unused(override_settings)
                self._draw(job, request)
        finally:
            if reload:
                self.models.outdate()
            self.models.settle_at_last()
        return notice

    def _swaps(self, values: Mapping[str, Any]) -> bool:
        """Whether option values name other models than are loaded."""
        held = {BASE: self.holding.base, **self.holding.overrides} if self.holding else {}
        return any(key in held and values[key] != held[key] for key in values)

    def _draw(self, job: Job, request: Request) -> None:
        from transplant.generate import generate
        from transplant.request import infotext

        pipeline = self.models.pipeline()
        pipeline.set_progress_bar_config(disable=True)

        def on_step(index: int, step: int, steps: int) -> None:
            of = f"Picture {index + 1} of {request.batch}, step" if request.batch > 1 else "Step"
            total = steps * request.batch
            job.report(f"{of} {step} of {steps}", (index * steps + step) / total, total, "steps")

        job.report("Encoding the prompt", None)
        names, keep = self.models.picture_names(), self.settings.get("samples_save")
        for picture in generate(pipeline, request, on_step=on_step, cancelled=self.cancelled):
            text = infotext(request, picture.seed, names)
            path = self.pictures.save(picture, text, keep)
            job.pictures = (*job.pictures, Saved(path, text))
            log.info("%s: %s", path.name, " / ".join(shortened(line) for line in text.splitlines()))

    # State

    def _is_new(self, key: str, name: str) -> bool:
        """Whether choosing `name` asks for anything that is neither loaded nor queued."""
        pending = self.queue.pending(key)
        if pending is not None or self.holding is None:
            return pending != name
        if name in self.models.missing or key in SLOT_OF:
            return True  # the session knows whether the file changed
        return name != self.holding.base

    def _normal(self, key: str, value: object) -> object:
        """A value as the lists spell it: "None" in a slot means what Default does, as in SD.Next."""
        if key in SLOT_OF and value in (None, NONE):
            return DEFAULT
        if not isinstance(value, str):
            return value
        return self.catalog.entry(value) if key in (BASE, *SLOT_OF) else unicodedata.normalize("NFC", value)

    def _bump(self) -> None:
        self.revision += 1


def shortened(text: str, most: int = 200) -> str:
    """The text, cut where it is longer than a log line should be."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _choosing(models: Models, key: str, name: str) -> Callable[[], Notice | None]:
    return lambda: models.choose(key, name)
