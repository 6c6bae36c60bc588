"""The host's own options as the core's settings: device, dtype, offload, quantization."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from transplant.checkpoint.reader import mmap_by_default
from transplant.hosts.base import LoadSettings
from transplant.hosts.sdnext import app
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

log = logging.getLogger("transplant")

_NOT_APPLIED = {
    "use_dynamic_quantization": False,
    "quant_conv": False,
    "quant_embedding": False,
    "hadamard_group_size": 256,
    "svd_steps": 8,
}
"""SDNQ's settings that quantization on load does not take from the host, and the values they count with."""


def load_settings(dtype: torch.dtype | None = None, quantize: QuantizeOnLoad | None = None) -> LoadSettings:
    """How the host wants models loaded.

    Args:
        dtype: the compute dtype that the host asks for; its usual one by default.
        quantize: how float files are quantized.
    """
    devices = app.module("modules.devices")
    computes = torch.device(devices.device)
    rests = computes if app.option("diffusers_offload_mode", "none") == "none" else torch.device(devices.cpu)
    use_mmap = {"on": True, "off": False}.get(app.option("transplant_mmap", "auto"), mmap_by_default())
    matmul = str(app.option("sdnq_quantize_matmul_mode", "disabled"))
    compute = Compute(
        quantized_matmul={"disabled": "", "no": "", "enabled": "auto"}.get(matmul, matmul),
        compiled=bool(app.option("sdnq_dequantize_compile", False)),
        dequantize_fp32=bool(app.option("sdnq_dequantize_fp32", True)),
        fp8_storage=bool(app.option("fp8_storage", False)),
        quantize=quantize,
        runs_on=None if rests == computes else computes,
    )
    return LoadSettings(rests, dtype or devices.dtype, use_mmap, compute)


def quantize_on_load(arguments: Mapping[str, Any]) -> QuantizeOnLoad | None:
    """How the host would quantize a transformer while it loads it; None where it would not.

    Args:
        arguments: those of the host's load_transformer.
    """
    if not arguments.get("allow_quant", True):
        return None
    given = {key: arguments.get(key) for key in ("modules_to_not_convert", "modules_dtype_dict")}
    wanted = {key: value.copy() for key, value in given.items() if value}  # the host adds to what it is given
    config = (app.module("modules.model_quant").create_config(module="Model", **wanted) or {}).get(
        "quantization_config"
    )
    if config is None:
        return None
    if not hasattr(config, "weights_dtype"):
        log.warning("Transplant quantizes with SDNQ only: %s is not applied", type(config).__name__)
        return None
    ignored = [key for key, usual in _NOT_APPLIED.items() if getattr(config, key, usual) != usual]
    if ignored:
        log.warning("Transplant quantizes without these settings of SDNQ: %s", ", ".join(ignored))
    return QuantizeOnLoad(
        config.weights_dtype,
        int(config.group_size),
        bool(config.use_svd),
        int(config.svd_rank),
        bool(config.use_hadamard),
        tuple(config.modules_to_not_convert or ()),
        tuple((key, tuple(names)) for key, names in (config.modules_dtype_dict or {}).items()),
    )
