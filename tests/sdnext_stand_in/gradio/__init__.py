"""The names of gradio 3.43 that matter here."""

import threading
from types import SimpleNamespace

from gradio import context

__version__ = "3.43.2"


class Component:
    """A component, or a block that holds some; its events are kept with what they are bound to."""

    def __init__(self, *args, **kwargs):
        self.args, self.events = args, {}

    def input(self, function, inputs=None, outputs=None, api_name=None, show_progress="full", queue=None):
        self.events["input"] = function

    def click(self, function, inputs=None, outputs=None, api_name=None, show_progress="full", queue=None):
        self.events["click"] = function

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


class Blocks(Component): ...


class Row(Component): ...


class Checkbox(Component): ...


class Dropdown(Component): ...


class Radio(Component): ...


class Button(Component): ...


class HTML(Component): ...


def update(**kwargs):
    return kwargs


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
