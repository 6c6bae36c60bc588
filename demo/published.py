"""Z-Image transformers as people publish them: ComfyUI's layout, quantized by comfy-kitchen and the gguf package.

The layers that a quantized file of Z-Image holds as codes are those of the published ones: the attention, the
feed-forward and the modulation of every block. Everything else stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy_kitchen
import gguf
import torch
from comfy_kitchen.tensor import QuantizedTensor

import make_demo

Tensors = dict[str, torch.Tensor]

comfy_kitchen.set_backend_priority(["eager"])

GROUP_SIZE = 64
"""Of ConvRot's rotation; the published files have 256, which does not divide this width."""


def is_quantized(name: str) -> bool:
    """Whether a quantized file holds codes for a key of ComfyUI's layout."""
    parts = (".attention.qkv.", ".attention.out.", ".feed_forward.", ".adaLN_modulation.0.")
    return name.endswith(".weight") and "final_layer" not in name and any(part in name for part in parts)


def quantized(tensors: Tensors, layout: str, marker: Mapping[str, Any], **options: Any) -> Tensors:
    """A state dict in ComfyUI's layout with its blocks' weights in one of comfy-kitchen's layouts, and markers."""
    result: Tensors = {}
    text = torch.frombuffer(bytearray(json.dumps(marker).encode()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        if is_quantized(name):
            codes = QuantizedTensor.from_float(tensor.float(), layout, **options)
            result |= {key: value.contiguous() for key, value in codes.state_dict(name).items()}
            result[name.removesuffix("weight") + "comfy_quant"] = text.clone()
        else:
            result[name] = tensor
    return result


def int8_convrot(tensors: Tensors) -> Tensors:
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP_SIZE}
    options = {"per_channel": True, "convrot": True, "convrot_groupsize": GROUP_SIZE}
    return quantized(tensors, "TensorWiseINT8Layout", marker, **options)


def float8_scaled(tensors: Tensors) -> Tensors:
    return quantized(tensors, "TensorCoreFP8Layout", {"format": "float8_e4m3fn"}, dtype=torch.float8_e4m3fn)


def nvfp4(tensors: Tensors) -> Tensors:
    return quantized(tensors, "TensorCoreNVFP4Layout", {"format": "nvfp4"})


def save_gguf(path: Path, tensors: Tensors, kind: gguf.GGMLQuantizationType) -> Path:
    """Blocks' weights as codes, the rest in float: norms and other vectors in fp32, matrices in bf16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "lumina2")
    for name, tensor in tensors.items():
        if is_quantized(name):
            writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
        elif tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Writer = Callable[[Path, Tensors, Tensors], Path]
"""Writes a file without its ending: its path, the transformer in ComfyUI's layout, the companions of a bundle."""


def _safetensors(change: Callable[[Tensors], Tensors]) -> Writer:
    def write(path: Path, tensors: Tensors, companions: Tensors) -> Path:
        del companions
        return make_demo.save(path.with_name(f"{path.name}.safetensors"), change(tensors))

    return write


def _bundle(path: Path, tensors: Tensors, companions: Tensors) -> Path:
    transformer = make_demo.with_prefix(float8_scaled(tensors), "model.diffusion_model.")
    return make_demo.save(path.with_name(f"{path.name}.safetensors"), {**transformer, **companions})


def _gguf(kind: gguf.GGMLQuantizationType) -> Writer:
    return lambda path, tensors, companions: save_gguf(path.with_name(f"{path.name}.gguf"), tensors, kind)


WRITERS: dict[str, Writer] = {
    "bf16": _safetensors(dict),
    "int8-convrot": _safetensors(int8_convrot),
    "fp8-bundle": _bundle,
    "nvfp4": _safetensors(nvfp4),
    "gguf-q8_0": _gguf(gguf.GGMLQuantizationType.Q8_0),
}
