import logging

log = logging.getLogger("sd")
log.propagate = False
log.setLevel(logging.DEBUG)
lines: list[tuple[str, str]] = []
"""Level and text of every line that the host's own handlers get."""


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        lines.append((record.levelname, record.getMessage()))


log.handlers = [_Lines()]
