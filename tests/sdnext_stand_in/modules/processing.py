import os
from types import SimpleNamespace

from modules import script_callbacks, sd_models, shared
from modules.modeldata import model_data


def request(**override_settings):
    return SimpleNamespace(
        override_settings=override_settings, override_settings_restore_afterwards=True, extra_generation_params={},
        n_iter=1,
    )  # fmt: skip


def process_images(p, draw):
    """What `draw(pipeline)` gives, in a list."""
    assert shared.sd_model is not None
    for key, value in list(p.override_settings.items()):
        now = getattr(shared.opts, key)
        if now == value or (isinstance(now, str) and os.path.splitext(now)[0] == value):
            p.override_settings.pop(key)
    stored = {key: getattr(shared.opts, key) for key in p.override_settings}
    try:
        for key, value in p.override_settings.items():
            setattr(shared.opts, key, value)
            if key == "sd_model_checkpoint":
                sd_models.reload_model_weights()
        script_callbacks.call("before_process", p)
        job = shared.state.begin("Process")  # an earlier interrupt is forgotten
        results = [draw(model_data.sd_model) for _ in range(p.n_iter)]
        shared.state.end(job)
        return results
    finally:
        script_callbacks.call("after_process", p)
        if p.override_settings_restore_afterwards:
            for key, value in stored.items():
                setattr(shared.opts, key, value)
