"""One job at a time, in order, on one thread; each can be cancelled, waiting or running. No torch."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transplant.errors import OUT_OF_MEMORY, LoadCancelled, TransplantError, is_out_of_memory
from transplant.view import size

log = logging.getLogger("transplant")

EVERYONE = ""
"""The owner of jobs that nobody asked for, such as loading at start."""

Level = Literal["info", "warning", "error"]
Kind = Literal["load", "pictures", "comparison", "question"]
Unit = Literal["", "bytes", "steps"]
Status = Literal["waiting", "running", "finished", "failed", "cancelled"]


@dataclass(frozen=True)
class Notice:
    """A sentence for whoever asked for a job.

    Attributes:
        level: how bad it is.
        text: what happened and what to do.
        details: what only those need who look for the cause, such as a traceback.
    """

    level: Level
    text: str
    details: str = ""


@dataclass(frozen=True)
class Saved:
    """A picture that a job made.

    Attributes:
        path: its file.
        infotext: the parameters in its metadata.
    """

    path: Path
    infotext: str


@dataclass
class Job:
    """One request. Its own thread writes the fields, everybody may read them.

    Attributes:
        number: counts up over all jobs.
        owner: who asked for it.
        title: what it is, for people.
        work: what it does; returns what its owner should be told.
        wants: the option values that it will have set when it succeeds.
        kind: what it does, for those who follow one kind only.
        status: where it is.
        text: what it is doing.
        fraction: how far it is, 0 to 1; None where that is not known.
        notice: what came of it; while it is not over, what is known already.
        pictures: what it made so far.
        result: what it found out, for a job that is a question.
    """

    number: int
    owner: str
    title: str
    work: Callable[[Job], Notice | None]
    wants: dict[str, str]
    kind: Kind = "load"
    status: Status = "waiting"
    text: str = ""
    fraction: float | None = None
    notice: Notice | None = None
    pictures: tuple[Saved, ...] = ()
    result: Any = None
    _phase_start: float = field(default_factory=time.monotonic)
    _phase_from: float = 0.0
    _total: float | None = None
    _unit: Unit = ""
    _cancel: threading.Event = field(default_factory=threading.Event)
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        """Whether someone wants it to end."""
        return self._cancel.is_set()

    @property
    def is_over(self) -> bool:
        """Whether it is finished, failed or cancelled."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Ask it to end."""
        self._cancel.set()

    def end(self, status: Status, notice: Notice | None) -> None:
        """Note what came of it and let go of whoever waits."""
        self.status, self.notice = status, notice
        self._done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; whether it came in time."""
        return self._done.wait(timeout)

    def report(self, text: str, fraction: float | None, total: float | None = None, unit: Unit = "") -> None:
        """Say what it is doing and how far it is.

        Args:
            text: what it is doing.
            fraction: how far it is, 0 to 1; None where that is not known.
            total: how much there is to do, for a rate.
            unit: of what.
        """
        if fraction is None or self.fraction is None or fraction < self.fraction:
            self._phase_start, self._phase_from = time.monotonic(), fraction or 0.0
        self.text, self.fraction, self._total, self._unit = text, fraction, total, unit

    def remaining(self) -> float | None:
        """Seconds that the phase at hand will still take, where that can be told yet."""
        speed = self._speed()
        return (1 - (self.fraction or 0)) / speed if speed else None

    def rate(self) -> str:
        """How fast it is, for people; "" where that cannot be told yet."""
        speed = self._speed()
        if not speed or self._total is None:
            return ""
        amount = speed * self._total
        if self._unit == "bytes":
            return f"{size(int(amount))}/s"
        return f"{amount:.1f} {self._unit}/s" if amount >= 1 else f"{1 / amount:.1f} s/{self._unit.removesuffix('s')}"

    def _speed(self) -> float | None:
        """Fraction done in a second, over the phase at hand."""
        elapsed, done = time.monotonic() - self._phase_start, (self.fraction or 0) - self._phase_from
        return done / elapsed if done >= 0.02 and elapsed >= 1 else None


class JobQueue:
    """Runs jobs one after another."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after a job came to its end, before whoever waits for it goes on."""
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._waiting: deque[Job] = deque()
        self._recent: deque[Job] = deque(maxlen=200)
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="transplant-worker")

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, timeout: float = 5) -> bool:
        """Cancel everything and end the thread; whether it ended in time."""
        with self._changed:
            self._stopped = True
            for job in [*self._waiting, *([self._running] if self._running else [])]:
                job.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(
        self,
        owner: str,
        title: str,
        work: Callable[[Job], Notice | None],
        wants: dict[str, str] | None = None,
        kind: Kind = "load",
        notice: Notice | None = None,
    ) -> Job:
        """Put a job at the end of the queue; its owner is told `notice` until it is over."""
        with self._changed:
            job = Job(next(self._numbers), owner, title, work, wants or {}, kind, text=title, notice=notice)
            self._waiting.append(job)
            self._recent.append(job)
            self._changed.notify_all()
        return job

    def tell(self, owner: str, notice: Notice) -> None:
        """Give someone a notice without a job, for example about a request that cannot become one."""
        with self._changed:
            job = Job(next(self._numbers), owner, "", lambda _: None, {})
            job.end("finished", notice)
            self._recent.append(job)

    def cancel(self, number: int) -> None:
        """Cancel a job by its number, waiting or running; one that is over stays as it is."""
        with self._changed:
            job = next((job for job in [*self._waiting, self._running] if job and job.number == number), None)
            if job is not None:
                job.cancel()
            if job in self._waiting:
                self._waiting.remove(job)
                self._finish(job, "cancelled", Notice("info", f"{job.title}: cancelled before it began."))

    def cancel_waiting(self) -> None:
        """Cancel every job that has not begun."""
        with self._changed:
            for job in list(self._waiting):
                self.cancel(job.number)

    def current(self) -> tuple[Job | None, int]:
        """The running job and how many wait behind it."""
        with self._changed:
            return self._running, len(self._waiting)

    def jobs_of(self, owner: str) -> list[Job]:
        """The jobs that someone asked for, in order."""
        with self._changed:
            return [job for job in self._recent if job.owner == owner]

    def last_of(self, owner: str) -> Job | None:
        """The newest job of someone that is over and was no mere question."""
        over = [job for job in self.jobs_of(owner) if job.is_over and job.title and job.kind != "question"]
        return over[-1] if over else None

    def latest(self, owner: str) -> Job | None:
        """The newest job that is of interest to someone: their own, or one of everyone's."""
        with self._changed:
            return next((job for job in reversed(self._recent) if job.owner in (owner, EVERYONE)), None)

    def pictures(self, owner: str, kind: Kind) -> tuple[Saved, ...]:
        """The pictures of someone's newest job of a kind that has made any."""
        with self._changed:
            jobs = [job for job in reversed(self._recent) if job.owner == owner and job.kind == kind]
        return next((job.pictures for job in jobs if job.pictures), ())

    def notice(self, owner: str) -> Notice | None:
        """What someone is to be told now: what came of their newest job, or everyone's."""
        job = self.latest(owner)
        if job is None or (job.owner == EVERYONE and self._is_outdated(job)):
            return None
        return job.notice

    def _is_outdated(self, job: Job) -> bool:
        """Whether a later job of anyone came to a good end: what everyone was told then is over."""
        with self._changed:
            later = [other for other in self._recent if other.number > job.number]
            return any(other.title and other.status == "finished" for other in later)

    def pending(self, key: str) -> str | None:
        """The value that an option will have once the queue is empty, where a job there sets it."""
        with self._changed:
            jobs = [*self._waiting][::-1] + ([self._running] if self._running else [])
        return next((job.wants[key] for job in jobs if key in job.wants), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                job = self._running = self._waiting.popleft()
                job.status = "running"
            status, notice = _outcome(job)
            with self._changed:
                self._running = None
                self._finish(job, status, notice)

    def _finish(self, job: Job, status: Status, notice: Notice | None) -> None:
        self._on_change()
        job.end(status, notice)


class Refused(TransplantError):
    """A refusal that the log has already."""


def _outcome(job: Job) -> tuple[Status, Notice | None]:
    """Run a job. The host boundary: whatever it raises becomes one sentence for its owner.

    The log has each once; the answer to a question is none of its matters.
    """
    try:
        return "finished", job.work(job)
    except LoadCancelled as error:
        log.info("%s", error)
        return "cancelled", Notice("info", f"{job.title}: cancelled.")
    except TransplantError as error:
        inner = error.__cause__ if isinstance(error.__cause__, RuntimeError) else None  # torch's
        if job.kind != "question" and not isinstance(error, Refused):
            log.error("%s", error, exc_info=inner)
        return "failed", Notice("error", sentence(str(error)), _details(inner) if inner else "")
    except Exception as error:
        log.exception("%s failed", job.title)
        text = f"{job.title} failed. {_explained(error)} The log has the details."
        return "failed", Notice("error", text, _details(error))


def _details(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _explained(error: Exception) -> str:
    if is_out_of_memory(error):
        return sentence(OUT_OF_MEMORY)
    lines = str(error).strip().splitlines() or ["no reason given"]
    return sentence(f"{type(error).__name__}: {lines[0]}")


def sentence(text: str) -> str:
    """The text with a full stop, and with a capital where it begins with a word and not with a name."""
    if re.match(r"[a-z]+ ", text):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
