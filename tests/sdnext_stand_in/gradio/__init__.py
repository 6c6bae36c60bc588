"""The names of gradio 3.43 that matter here."""

import threading
from types import SimpleNamespace

from gradio import context


class Checkbox: ...


class Dropdown: ...


class Textbox: ...


shown: list[str] = []


def Warning(message: str) -> None:
    shown.append(message)


def in_event(function, *args):
    """Call a function as gradio does for an event: in a worker thread, with its queue."""
    results = []

    def run() -> None:
        context.thread_data.blocks, context.thread_data.event_id = SimpleNamespace(enable_queue=True), "1"
        results.append(function(*args))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]
