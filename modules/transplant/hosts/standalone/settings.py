"""The option store: config.json, read tolerantly, written atomically."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from transplant.errors import OptionError
from transplant.options import OPTIONS, option
from transplant.storage import write_atomically

log = logging.getLogger("transplant")

_OVERLAY: ContextVar[Mapping[str, Any]] = ContextVar("overlay")
"""Values that hold for one job; each thread has its own."""


class Settings:
    """Values of the options. What this version does not know, or refuses, stays in the file as it is.

    Attributes:
        path: the file.
        warnings: what was wrong with it when it was read, one sentence each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._unreadable: OSError | None = None
        self._stored = self._read()
        self._values = {known.key: known.default for known in OPTIONS}
        self._values.update(self._accepted())
        for text in self.warnings:
            log.warning("%s", text)

    def get(self, key: str) -> Any:
        """The option's value. Raises OptionError for an unknown key."""
        with self._lock:
            value = _OVERLAY.get({}).get(key, self._values[option(key).key])
            return list(cast("list[str]", value)) if isinstance(value, list) else value

    @contextmanager
    def overlaid(self, values: Mapping[str, Any]) -> Generator[None]:
        """Within this context, and in this thread only, options have these values; nothing is saved."""
        token = _OVERLAY.set(dict(values))
        try:
            yield
        finally:
            _OVERLAY.reset(token)

    def set_many(self, values: Mapping[str, object], dynamic: Mapping[str, Sequence[str]] | None = None) -> list[str]:
        """Check every value, then set and save them all, or none.

        Args:
            values: new values by key.
            dynamic: the current members of the lists that change while running, see Option.checked.

        Returns:
            The keys whose value changed.

        Raises:
            OptionError: a key is unknown or a value is refused; nothing was changed.
            OSError: config.json cannot be written, or could not be read; nothing was changed.
        """
        checked = {key: option(key).checked(value, dynamic) for key, value in values.items()}
        with self._lock:
            stored = {**self._stored, **checked}
            if stored != self._stored:
                if self._unreadable is not None:
                    raise self._unreadable
                write_atomically(self.path, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")
            changed = [key for key, value in checked.items() if value != self._values[key]]
            self._stored = stored
            self._values.update(checked)
        return changed

    def _read(self) -> dict[str, Any]:
        try:
            value: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._unreadable = error  # saving would replace what could not be read
            self.warnings.append(f"{self.path} cannot be read ({error.strerror}): every option has its default")
            return {}
        except (ValueError, RecursionError) as error:
            return self._set_aside(str(error))
        return cast("dict[str, Any]", value) if isinstance(value, dict) else self._set_aside("it is not a JSON object")

    def _set_aside(self, why: str) -> dict[str, Any]:
        aside = self.path.with_name(f"{self.path.name}.broken")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            why = f"{why}; it could not be renamed: {error.strerror}"
        self.warnings.append(f"{self.path.name} is broken and was kept as {aside.name} ({why}): options have defaults")
        return {}

    def _accepted(self) -> dict[str, Any]:
        """The stored values that their options take."""
        accepted: dict[str, Any] = {}
        for known in OPTIONS:
            if known.key not in self._stored:
                continue
            try:
                accepted[known.key] = known.checked(self._stored[known.key])
            except OptionError as error:
                self.warnings.append(self._refused(error))
        return accepted

    def fall_back(self, error: OptionError) -> str:
        """Give an option its default where its stored value turns out to be none; the file stays as it is.

        Returns:
            What is to be said of it.
        """
        with self._lock:
            self._values[error.key] = option(error.key).default
        return self._refused(error)

    def _refused(self, error: OptionError) -> str:
        return f"{self.path.name}: {error}; {option(error.key).default!r} is used instead"
