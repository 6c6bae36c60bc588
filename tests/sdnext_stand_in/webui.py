"""The host's start-up, in its order."""

from types import SimpleNamespace

from modules import call_queue, script_callbacks, script_loading, sd_models, sd_unet, shared, ui_settings


class Api:
    def __init__(self):
        self.routes = {}

    def add_api_route(self, path, fn, **kwargs):
        """With the host's login and below its path."""
        self.routes[path] = fn


def start():
    sd_unet.refresh_unet_list()
    script_loading.load_scripts()
    quicksettings = ui_settings.create_ui()
    tabs = [tab for tabs in script_callbacks.call("ui_tabs") for tab in tabs or ()]
    shared.api = Api()
    script_callbacks.call("app_started", None, SimpleNamespace())
    queued = call_queue.wrap_queued_call
    shared.opts.onchange("sd_model_checkpoint", queued(lambda: sd_models.reload_model_weights()), call=False)
    shared.opts.onchange("sd_unet", queued(lambda: sd_unet.load_unet(shared.sd_model)), call=False)
    if hasattr(sd_unet, "load_unet_secondary"):
        shared.opts.onchange(
            "sd_unet_secondary", queued(lambda: sd_unet.load_unet_secondary(shared.sd_model)), call=False
        )
    return quicksettings, tabs
