"""The host's own: a failed choice counts as loaded, and every other choice loads the whole model again."""

from pathlib import Path

unet_dict = {}
loaded_unet = None
loaded_unet_secondary = None
calls = []


def refresh_unet_list():
    unet_dict.clear()
    for file in sorted(Path("models/UNET").rglob("*")):
        if file.suffix in (".safetensors", ".gguf"):
            unet_dict[file.stem if file.suffix == ".safetensors" else file.name] = str(file)


def load_unet(model, repo_id=None):
    global loaded_unet
    from modules import sd_models, shared

    calls.append("load_unet")
    if repo_id is not None or shared.opts.sd_unet == loaded_unet:
        return
    loaded_unet = shared.opts.sd_unet
    sd_models.reload_model_weights(force=True)


def load_unet_secondary(model):
    global loaded_unet_secondary
    from modules import sd_models, shared

    calls.append("load_unet_secondary")
    if shared.opts.sd_unet_secondary == loaded_unet_secondary:
        return
    loaded_unet_secondary = shared.opts.sd_unet_secondary
    sd_models.reload_model_weights(force=True)
