import importlib
import os

from modules import script_callbacks, sd_unet, shared
from modules.logger import log
from modules.modeldata import model_data

allow_post_quant = True
loads = []
"""What was loaded as a whole, in order."""
calls = []

LOADERS = {
    "ZImagePipeline": "pipelines.model_z_image", "WanPipeline": "pipelines.model_wanai",
    "Flux2KleinPipeline": "pipelines.model_flux2_klein", "AnimaTextToImagePipeline": "pipelines.model_anima",
    "StableDiffusionXLPipeline": "pipelines.model_sdxl",
}  # fmt: skip


def reload_model_weights(sd_model=None, info=None, op="model", force=False, revision=None):
    from pipelines.generic_util import pipeline_class

    name = shared.opts.sd_model_checkpoint
    before = model_data.sd_model
    if before is not None and before.sd_checkpoint_info == name and not force:
        return None
    job = shared.state.begin("Load model")
    if before is not None:
        _reset_other_type(pipeline_class(before.sd_checkpoint_info), pipeline_class(name))
        model_data.sd_model = None  # everything goes before anything is opened
        del before
    try:
        load_diffuser(name, pipeline_class(name))
    except Exception as error:
        log.error(f"Load model: {error}")
    shared.state.end(job)
    return model_data.sd_model


def _reset_other_type(old, new):
    if old == new:
        return
    shared.opts.data["sd_unet"] = shared.opts.data["sd_unet_secondary"] = "Default"
    sd_unet.loaded_unet = sd_unet.loaded_unet_secondary = None


def load_diffuser(name, cls):
    global allow_post_quant
    import torch

    allow_post_quant = True
    loads.append(name)
    pipe = importlib.import_module(LOADERS[cls]).load(name, {"torch_dtype": torch.float32})
    if pipe is None:
        log.error(f"Load model: {name} not loaded")
        return
    allow_post_quant = False
    pipe.sd_checkpoint_info = name
    if hasattr(pipe, "unet"):
        sd_unet.load_unet(pipe, os.path.abspath(name))
    model_data.sd_model = pipe
    script_callbacks.call("model_loaded", pipe)


def set_diffuser_options(sd_model, vae=None, op="model", offload=True, quiet=False):
    calls.append("options")


def set_diffuser_offload(sd_model, op="model", quiet=False, force=False):
    calls.append(f"offload force={force}")


def move_model(model, device=None, force=False):
    calls.append(f"move to {device}")
    model.to(device)
