import sys
from types import ModuleType

import gradio as gr

from modules.modeldata import model_data
from modules.options import OptionInfo, Options
from modules.shared_state import State


def _files():
    from modules import sd_unet

    return {"choices": ["Default", *sd_unet.unet_dict]}


def _refresh():
    from modules import sd_unet

    sd_unet.refresh_unet_list()


_SD, _OFFLOAD, _QUANT = ("sd", "Model Loading"), ("offload", "Model Offloading"), ("quantization", "Model Quantization")
opts = Options({
    "sd_model_checkpoint": OptionInfo("", "Base model", gr.Dropdown, section=_SD),
    "sd_unet": OptionInfo("Default", "UNET model", gr.Dropdown, _files, section=_SD, refresh=_refresh),
    "sd_unet_secondary": OptionInfo("Default", "UNET secondary", gr.Dropdown, _files, section=_SD, refresh=_refresh),
    "hfcache_dir": OptionInfo("models/huggingface", section=_SD),
    "diffusers_dir": OptionInfo("models/Diffusers", section=_SD),
    "offline_mode": OptionInfo(True, section=_SD),
    "diffusers_offload_mode": OptionInfo("none", section=_OFFLOAD),
    "sdnq_quantize_weights": OptionInfo([], section=_QUANT),
    "sdnq_quantize_mode": OptionInfo("auto", section=_QUANT),
    "sdnq_quantize_weights_mode": OptionInfo("int8", section=_QUANT),
    "sdnq_quantize_matmul_mode": OptionInfo("disabled", section=_QUANT),
    "sdnq_dequantize_compile": OptionInfo(False, section=_QUANT),
    "sdnq_dequantize_fp32": OptionInfo(True, section=_QUANT),
    "layerwise_quantization": OptionInfo([], section=_QUANT),
    "cuda_compile_backend": OptionInfo("none", section=_QUANT),
    "cuda_compile": OptionInfo([], section=_QUANT),
    "quicksettings_list": OptionInfo(["sd_model_checkpoint", "sd_unet"], section=("ui", "User Interface")),
})  # fmt: skip
state = State()
api = None


class _Shared(ModuleType):
    @property
    def sd_model(self):
        """Asking for it loads it."""
        if model_data.sd_model is None:
            from modules import sd_models

            sd_models.reload_model_weights()
        return model_data.sd_model


sys.modules[__name__].__class__ = _Shared
