"""The last lines of the log, on the page."""

from __future__ import annotations

import logging
from collections import deque

import gradio as gr

from transplant.hosts.standalone.live import Follower

FORMAT = logging.Formatter("%(asctime)s  %(levelname)-7s  %(message)s", "%H:%M:%S")


class LogLines(logging.Handler):
    """Keeps the newest lines."""

    def __init__(self, count: int = 300) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(FORMAT)
        self._lines: deque[str] = deque(maxlen=count)

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._lines.append(self.format(record))

    def text(self) -> str:
        """The lines, the newest last."""
        return "\n".join(self._lines.copy())


def draw(lines: LogLines) -> Follower:
    """Draw the panel."""
    panel = gr.Textbox(
        label="Log", elem_id="transplant_log", lines=20, max_lines=20, interactive=False, autoscroll=True,
        buttons=["copy"],
    )  # fmt: skip
    return Follower(panel, lambda _: lines.text(), lambda text: gr.update(value=text))
