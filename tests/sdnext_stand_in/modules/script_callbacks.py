from collections import namedtuple

ScriptCallback = namedtuple("ScriptCallback", ["script", "callback"])
callback_map = {name: [] for name in (
    "app_started", "ui_tabs", "ui_settings", "before_process", "after_process", "model_loaded",
)}  # fmt: skip


def _add(name, callback):
    callback_map[name].append(ScriptCallback("a script", callback))


def on_app_started(callback):
    _add("app_started", callback)


def on_ui_tabs(callback):
    _add("ui_tabs", callback)


def on_ui_settings(callback):
    _add("ui_settings", callback)


def on_before_process(callback):
    _add("before_process", callback)


def on_after_process(callback):
    _add("after_process", callback)


def on_model_loaded(callback):
    _add("model_loaded", callback)


def remove_callbacks_for_function(function):
    for callbacks in callback_map.values():
        for found in [one for one in callbacks if one.callback == function]:
            callbacks.remove(found)


def call(name, *args):
    """Exceptions of one do not stop the others, nor the host."""
    from modules.logger import log

    results = []
    for found in list(callback_map[name]):
        try:
            results.append(found.callback(*args))
        except Exception as error:
            log.error(f"Executing callback: {name} {error}")
    return results
