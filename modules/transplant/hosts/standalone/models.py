"""The models that the settings name, brought into the session: everything here runs on the worker's thread.

The settings say what is selected, `holding` says what is loaded; after each load they are held against each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transplant.digest import Digests
from transplant.errors import OptionError, TransplantError, printable
from transplant.hosts.standalone.folders import Catalog, find, list_bases, list_overrides
from transplant.hosts.standalone.jobs import Job, Notice, Refused, sentence
from transplant.hosts.standalone.settings import Settings
from transplant.samplers import sampler_names
from transplant.slots import DEFAULT, SLOTS, Override, SlotKind, name_of, stamp_of

if TYPE_CHECKING:
    from transplant.hosts.base import Host
    from transplant.pipeline import Outcome, Session

log = logging.getLogger("transplant")

BASE, FP8, OFFLOAD = "sd_model_checkpoint", "fp8_storage", "diffusers_offload_mode"
NOTED = {FP8: "FP8 storage", OFFLOAD: "Offloading"}
"""Options whose effect depends on what is loaded, and where; with what they do, for people."""
MODULES = {"sdnq_modules_to_not_convert": "", "sdnq_modules_dtype_dict": "{}"}
"""Options that name modules, and their values that name none."""
SLOT_OF = {kind.option: kind for kind in SLOTS}
"""The slot behind each option."""
GONE, CHANGED = "missing on disk", "changed on disk"
"""What may become of a file that is loaded. What was loaded from it stays usable all the same."""


@dataclass(frozen=True)
class Holding:
    """What is loaded.

    Attributes:
        base: the base model's name.
        pipeline: class name of its pipeline.
        architecture: name of its transformer's architecture.
        overrides: what each slot that the pipeline has holds: a file's name or Default, by the slot's option.
        strayed: what became of the files that were loaded and are not on the disk as they were, by the slot's option.
        how: compute dtype and device, for people.
        samplers: what it can draw with.
        makes_video: whether it can make more than one frame.
    """

    base: str
    pipeline: str
    architecture: str
    overrides: Mapping[str, str]
    how: str
    samplers: tuple[str, ...]
    makes_video: bool
    strayed: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Note:
    """What an option does for what is loaded.

    Attributes:
        text: a sentence.
        enabled: False where it can do nothing on this device.
    """

    text: str
    enabled: bool


class Models:
    """The session, and what the settings want of it.

    Attributes:
        holding: what is loaded; None while nothing is.
        missing: base model and overrides that the settings name and the folders lack.
        notes: what an option does for what is loaded, by key, for those whose effect depends on it.
        is_settling: True while what a job put aside comes back, which no cancel ends.
        keep_settings: True while a job has models of its own for a while: what is loaded then is not saved.
        on_cpu: whether what is loaded computes there; None while that is not known.
    """

    def __init__(self, host: Host, settings: Settings, catalog: Catalog, digests: Digests) -> None:
        self.holding: Holding | None = None
        self.missing: frozenset[str] = frozenset()
        self.notes: dict[str, Note] = {}
        self.keep_settings = self.is_settling = False
        self.on_cpu: bool | None = None
        self._wanted_load = self._done_load = 0
        self._host = host
        self._settings = settings
        self._catalog = catalog
        self._digests = digests
        self._session: Session | None = None
        self._names: dict[Path, str] = {}

    def session(self) -> Session:
        """The session, made at first need: this imports torch and diffusers."""
        if self._session is None:
            from diffusers.utils import logging as diffusers_logging
            from transformers.utils import logging as transformers_logging

            from transplant.pipeline import Session

            diffusers_logging.disable_progress_bar()
            transformers_logging.disable_progress_bar()
            self._session = Session(self._host)
        return self._session

    def outdate(self) -> None:
        """An option that loads depend on has changed; may be called from any thread."""
        self._wanted_load += 1

    def pipeline(self) -> Any:
        """The loaded pipeline. Raises TransplantError while there is none."""
        pipeline = self.session().pipeline
        if pipeline is None:
            raise TransplantError("no base model is loaded: choose one first")
        return pipeline

    def load_at_start(self, job: Job) -> Notice | None:
        """Load what the settings name."""
        self._forget_built_in()
        self.follow_names()
        problems = [*self._settings.warnings, *self._forget_bad_modules()]
        if not any(path.is_relative_to(self._catalog.models_dir) for path in self._catalog.overrides.values()):
            problems += self.misplaced()
        if self.selected_base():
            job.report(f"Loading {self.selected_base()}", None)
            notice = self.load_base(self.selected_base(), {})
            problems += [notice.text] if notice else []
        return Notice("warning", " ".join(problems)) if problems else None

    def _forget_bad_modules(self) -> list[str]:
        """Give options that name modules their default where SDNQ cannot read them; what is to be said of that."""
        from transplant.hosts.base import check_modules

        told: list[str] = []
        for key, none in MODULES.items():
            values = {**MODULES, key: self._settings.get(key)}
            try:
                if values[key] != none:
                    check_modules(*values.values(), compiled=self._settings.get("sdnq_dequantize_compile"))
            except OptionError as error:
                told.append(self._settings.fall_back(error))
                log.warning("%s", told[-1])
        return told

    def follow_names(self) -> None:
        """Let the settings name files as the list does: another file of the same name may have come or gone.

        What is loaded stays chosen, also where its name alone would mean several files now.
        """
        loaded = self._loaded_paths()
        held = {BASE: self.holding.base, **self.holding.overrides} if self.holding else {}

        def entry(key: str, name: str) -> str:
            kept = self._catalog.name_of(loaded[key]) if key in loaded and name == held.get(key) else None
            return kept or self._catalog.entry(name)

        named = {key: self._settings.get(key) for key in (BASE, *SLOT_OF)}
        entries = {key: entry(key, name) for key, name in named.items()}
        if self.holding is not None and BASE in loaded:
            renamed = {key: entry(key, name) for key, name in held.items()}
            base = self._names[loaded[BASE]] = renamed.pop(BASE)
            self.holding = replace(self.holding, base=base, overrides=renamed, strayed=self._strayed())
        self._save({key: name for key, name in entries.items() if name != named[key]})

    def _strayed(self) -> dict[str, str]:
        """What became of the loaded files that are not on the disk as they were, by option."""
        session = self._session
        loaded = {key: session.slots[kind.name].loaded for key, kind in SLOT_OF.items()} if session else {}
        files = {key: (one.override.path, one.stamp) for key, one in loaded.items() if one and one.override}
        states = {key: CHANGED if os.path.exists(path) else GONE for key, (path, _) in files.items()}
        return {key: state for key, state in states.items() if stamp_of(files[key][0]) != files[key][1]}

    def _look_at_disk(self) -> None:
        if self.holding is not None:
            self.holding = replace(self.holding, strayed=self._strayed())

    def lost(self) -> dict[str, Path]:
        """The loaded files that are missing on disk, by the names that they were loaded under."""
        holding, paths = self.holding, self._loaded_paths()
        strayed = holding.strayed if holding else {}
        return {holding.overrides[key]: paths[key] for key in paths if holding and strayed.get(key) == GONE}

    def _loaded_paths(self) -> dict[str, Path]:
        """Folder of the loaded base model and files in its slots, by option."""
        session = self._session
        if session is None or session.base is None:
            return {}
        files = {key: session.slots[kind.name].loaded for key, kind in SLOT_OF.items()}
        paths = {key: loaded.override.path for key, loaded in files.items() if loaded and loaded.override}
        return {BASE: session.base.path, **paths}

    def misplaced(self) -> list[str]:
        """What is to be said of transformers that lie in the wrong folder."""
        found = self._catalog.misplaced()
        return [
            f"{printable(path.name)} in {path.parent} is a {entry.architecture} transformer and no base model: move it "
            f"to {self._catalog.overrides_dir} and choose it as UNET model, over a {entry.architecture} base model."
            for path, entry in list(found.items())[:3]
        ]

    def selected_base(self) -> str:
        """The base model that the settings name; the only one where they name none."""
        bases = list(self._catalog.bases)
        return self._settings.get(BASE) or (bases[0] if len(bases) == 1 else "")

    def load_base(self, name: str, wanted: Mapping[str, str]) -> Notice | None:
        """Load a base model with files in its slots.

        Args:
            name: the base model.
            wanted: files by slot option. A slot that is not named keeps what is selected for it, where the base
                model is of the same type as the one before.

        Returns:
            What could not be done as wanted.
        """
        path = find(self._catalog.bases, name)
        if path is None:
            self.missing = frozenset({name})
            raise TransplantError(
                f"the base model {name} is missing from {self._catalog.bases_dir}: "
                "put it back and refresh, or choose another"
            )
        told: list[Notice] = []
        chosen = self._chosen(path, wanted, told)
        overrides = {key: self._override(entry) for key, entry in chosen.items()}
        missing = frozenset(entry for key, entry in chosen.items() if overrides[key] is None and entry != DEFAULT)
        self._names[path] = name
        load = self._wanted_load
        try:
            outcome = self.session().load_base(path, *(overrides[key] for key in SLOT_OF))
            self.missing, self._done_load = missing, load
        finally:
            self._record()
        if missing:
            told.append(self._lacking(missing))
        return _together([*told, *self._refusal(outcome)])

    def choose(self, key: str, name: str) -> Notice | None:
        """Put an override into a slot of the loaded base model; load that first where nothing is.

        Args:
            key: the slot's option.
            name: the file's entry, or Default.
        """
        if self.session().pipeline is None or self._is_outdated():
            return self.load_base(self._needed_base(), {key: name})
        override = self._override(name)
        if override is None and name != DEFAULT:
            self._look_at_disk()
            if self.holding and name == self.holding.overrides.get(key) and self.holding.strayed.get(key) == GONE:
                return None  # what was loaded from it stays
            raise TransplantError(f"{name} is not there any more: refresh the list")
        try:
            outcome = self.session().choose(override, SLOT_OF[key])
        finally:
            self.missing -= {self._settings.get(key)}
            self._record()
        return _together(self._refusal(outcome, SLOT_OF[key]))

    def settle(self) -> Notice | None:
        """Load what is selected and not loaded: nothing where it is, also where a file was changed on disk.

        What was loaded from a file that is gone, or is another one now that is refused, stays.
        """
        base, held = self._needed_base(), self.holding.overrides if self.holding else {}
        selected = {key: self._settings.get(key) for key in SLOT_OF}
        if self.holding is None or base != self.holding.base or self._is_outdated():
            # What was chosen since the last load was chosen for this base model.
            return self.load_base(base, {key: name for key, name in selected.items() if name != held.get(key, DEFAULT)})
        self._look_at_disk()
        notices: list[Notice] = []
        for key in held:
            name, state = selected[key], self.holding.strayed.get(key)
            if name == held[key] and (state == GONE or self._override(name) is None):
                continue  # also where a file of that name came since, which the list has not
            if name != DEFAULT and self._override(name) is None:
                notice = self._without(key, name) if held[key] != DEFAULT else None
            else:
                notice = self.choose(key, name)
            if notice is not None and name == held[key] and state == CHANGED:
                notice = replace(notice, level="warning")  # it is no error of whoever asks for a picture
            notices += [notice] if notice else []
        return _together(notices)

    def _without(self, key: str, name: str) -> Notice:
        """Put the base model's own transformer where a file is missing and another one is loaded."""
        self.missing |= {name}
        self.session().choose(None, SLOT_OF[key])
        self._record()
        return self._lacking(frozenset({name}))

    def refuse_unreturnable(self) -> None:
        """Raises TransplantError where what is loaded could not be loaded again after a job with other models."""
        self._look_at_disk()
        if lost := self.lost():
            raise TransplantError(
                f"what is loaded, {' and '.join(map(printable, lost))}, is missing on disk and could not be loaded "
                "again afterwards: put it back, or choose another first"
            )

    def refuse_unused(self, wanted: Mapping[str, Any]) -> None:
        """Raises Refused where a file is wanted for a slot that the loaded base model has not."""
        for key in SLOT_OF:
            if self.holding and key not in self.holding.overrides and wanted.get(key, DEFAULT) != DEFAULT:
                why = "has no second transformer that a file could replace"
                raise Refused(f"{key}: {printable(self.holding.base)} is a {self.holding.pipeline}, which {why}.")

    def settle_at_last(self) -> None:
        """After a job with models of its own: load what is selected, also where that job was cancelled."""
        self.is_settling = True
        try:
            self.settle()
        finally:
            self.is_settling = self.keep_settings = False

    def load_again(self) -> Notice | None:
        """Load what is loaded again, with the settings of now."""
        if self.holding is None:
            return None
        return self.load_base(self.holding.base, {})

    def noting(self, notice: Notice | None, turned_on: Sequence[str]) -> Notice | None:
        """The notice, and which of the options that were turned on have no effect on this device."""
        notes = [(NOTED[key], self.notes[key]) for key in turned_on if key in self.notes]
        useless = [Notice("info", f"{name}: {note.text}") for name, note in notes if not note.enabled]
        return _together([*([notice] if notice else []), *useless])

    def picture_names(self) -> dict[str, str]:
        """What made a picture, for its metadata: base model, and each file with its hash."""
        names = {"Model": printable(self.holding.base)} if self.holding else {}
        for slot in self.session().slots.values():
            if slot.loaded is None or slot.loaded.override is None:
                continue
            override, title = slot.loaded.override, slot.kind.title
            names[title] = printable(override.name)
            try:
                digest = self._digests.of_loaded(override.path, slot.loaded.stamp)
            except OSError as error:
                log.warning("%s: no hash for the metadata (%s)", override.path.name, error.strerror)
                continue
            names |= {f"{title} hash": digest} if digest else {}
        return names

    def base_path(self) -> Path | None:
        """The folder of the base model that is selected: the loaded one's where it is that, also if no list has it."""
        loaded, name = self._loaded_paths().get(BASE), self.selected_base()
        if self.holding is not None and name == self.holding.base and loaded:
            return loaded
        return find(self._catalog.bases, name) or loaded

    def _chosen(self, path: Path, wanted: Mapping[str, str], told: list[Notice]) -> dict[str, str]:
        """The entry for each slot, by option; what had to be set back to Default is told."""
        from transplant.base_model import read_base

        base = read_base(path)
        is_other_type = self.holding is not None and self.holding.pipeline != base.pipeline
        chosen = {key: self._settings.get(key) for key in SLOT_OF} | dict(wanted)
        for key, kind in SLOT_OF.items():
            is_lacking = kind.component_in(base) is None
            if chosen[key] == DEFAULT or not (is_lacking or (is_other_type and key not in wanted)):
                continue
            why = "has no second transformer" if is_lacking else "is another type of model"
            told.append(Notice("info", f"{kind.title} {chosen[key]} is not used: {self._called(path)} {why}."))
            chosen[key] = DEFAULT
        return chosen

    def _is_outdated(self) -> bool:
        return self._done_load != self._wanted_load

    def _called(self, path: Path) -> str:
        return next((name for name, known in self._catalog.bases.items() if known == path), path.name)

    def _needed_base(self) -> str:
        name = self.selected_base()
        if not name:
            raise TransplantError("no base model is chosen: choose one first")
        return name

    def _override(self, name: str) -> Override | None:
        path = find(self._catalog.overrides, name)
        return None if path is None or name == DEFAULT or not os.path.exists(path) else Override(name, path)

    def _lacking(self, missing: frozenset[str]) -> Notice:
        several = {name: entries for name in sorted(missing) if (entries := self._catalog.alike(name))}
        if several:
            told = "; ".join(f"{name} may be {' or '.join(entries)}" for name, entries in several.items())
            return Notice("warning", f"{told}: choose one. The base model's own transformer is loaded.")
        names, verb = " and ".join(sorted(missing)), "is" if len(missing) == 1 else "are"
        return Notice(
            "warning",
            f"The override {names} {verb} missing from {self._catalog.overrides_dir}. The base model's own transformer "
            "is loaded; put the file back and refresh, or choose another.",
        )

    def _refusal(self, outcome: Outcome, kind: SlotKind | None = None) -> list[Notice]:
        """What is to be said of a refused file, and what is loaded in its place."""
        if outcome.refused is None:
            return []
        slots = self.session().slots
        kind = kind or next((slot.kind for slot in slots.values() if slot.failed), SLOTS[0])
        kept = name_of(slots[kind.name].loaded)
        stays = "The base model's own transformer is" if kept == DEFAULT else f"{kept} stays"
        if self._loaded_paths().get(kind.option) == outcome.refused.file:
            stays = "It is another file now than was loaded; what was loaded from it stays"
        return [Notice("error", f"{sentence(str(outcome.refused))} {stays} loaded.")]

    def _record(self) -> None:
        """Hold the settings against what is really loaded, and save them so."""
        from transplant.generate import makes_video
        from transplant.plan import spec_for

        session = self.session()
        self.on_cpu = self._host.load_settings().device.type == "cpu"
        fp8 = session.fp8_outlook()
        self.notes = {FP8: Note(fp8.text, fp8.possible), OFFLOAD: self._offload_note()}
        if session.base is None or session.pipeline is None:
            self.holding = None
            return
        overrides: dict[str, str] = {}
        selected = dict.fromkeys(SLOT_OF, DEFAULT)
        for key, kind in SLOT_OF.items():
            slot = session.slots[kind.name]
            if kind.component_in(session.base) is None:
                continue
            overrides[key], selected[key] = name_of(slot.loaded), slot.selected
            if slot.loaded and slot.loaded.override and stamp_of(slot.loaded.override.path) == slot.loaded.stamp:
                self._digests.start(slot.loaded.override.path)
        base = self._names[session.base.path]
        self.holding = Holding(
            base, session.base.pipeline, spec_for(session.base).name, overrides, session.placement,
            tuple(sampler_names(cast("Any", session.pipeline).scheduler)), makes_video(session.pipeline),
            self._strayed(),
        )  # fmt: skip
        kept = {key for key in SLOT_OF if self._settings.get(key) in self.missing}
        if not self.keep_settings:
            self._save({BASE: base, **{key: name for key, name in selected.items() if key not in kept}})

    def _offload_note(self) -> Note:
        from transplant.offload import refusal_on

        reason = refusal_on(self._host.load_settings().device)
        return Note(f"No effect: {reason}." if reason else "", not reason)

    def _forget_built_in(self) -> None:
        """Settings that name the built-in models count as not set once those are not offered any more."""
        if self._settings.get(BASE) in self._catalog.bases:
            return
        if self._settings.get(BASE) in list_bases(self._catalog.built_in_dir, False):
            known = list_overrides(self._catalog.built_in_dir)
            self._save({BASE: "", **{key: DEFAULT for key in SLOT_OF if self._settings.get(key) in known}})

    def _save(self, values: Mapping[str, str]) -> None:
        try:
            self._settings.set_many(values)
        except OSError as error:
            log.warning("%s cannot be written (%s)", self._settings.path, error.strerror)


def _together(notices: list[Notice]) -> Notice | None:
    """Several notices as one, as bad as the worst of them."""
    if not notices:
        return None
    worst = max(notices, key=lambda notice: ("info", "warning", "error").index(notice.level))
    return Notice(worst.level, " ".join(dict.fromkeys(notice.text for notice in notices)))
