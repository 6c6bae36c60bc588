"""How a file declares its quantized layers: header, markers, legacy scales, bare scales, GGUF types. No torch.

Sources: ComfyUI's `comfy/utils.py` (convert_old_quants), `comfy/ops.py`, `QUANTIZATION.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transplant.checkpoint.gguf import BLOCK_TYPES, LOADABLE
from transplant.checkpoint.header import Header, TensorInfo
from transplant.checkpoint.naming import COMPANIONS, PREFIXES, NamedKeys
from transplant.errors import UnsupportedQuantization, printable, sample
from transplant.formats.base import QuantizedLayer

MARKER = ".comfy_quant"
HEADER_KEY = "_quantization_metadata"
LEGACY_MARKER = "scaled_fp8"

_LEGACY_ROLES = {".scale_weight": "weight_scale", ".scale_input": "input_scale"}
_ROLES = (
    "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "weight_s_rel", "weight_s_channel",
    "weight_codebook", "weight_correction", "weight_zeros",
)  # fmt: skip
_FOREIGN = {
    "bitsandbytes 4-bit": (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
    "GPTQ or AutoAWQ": (".qweight", ".qzeros", ".g_idx"),
}
_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_CODES = ("I8", "U8", "F4", "F8_E8M0")
_KNOWN_REMEDY = "Use another version of the file: int8, fp8, nvfp4, mxfp8 with ComfyUI's markers, or bf16"


@dataclass(frozen=True)
class Quantization:
    """The quantized layers of a file.

    Attributes:
        layers: by own name; GGUF tensors by the whole name, as those that are no `.weight` are quantized too.
        sidecars: own names of every tensor that belongs to one of them or to the declaration.
        source: where the declarations come from, "" where there are none.
    """

    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict[str, QuantizedLayer])
    sidecars: frozenset[str] = frozenset()
    source: str = ""


def read_quantization(header: Header, keys: NamedKeys) -> Quantization:
    """Find the quantized layers of a file.

    Reads the header and the bytes of the markers, nothing else. Where header and marker speak of one
    layer the header wins, as in ComfyUI.

    Args:
        header: the file's header.
        keys: its names, normalised.

    Raises:
        UnsupportedQuantization: a declaration that cannot be read or resolved, a scale that no declared
            layer uses, or codes without a declaration.
    """
    _refuse_foreign(header, keys)
    from_header = _header_declarations(header, keys)
    from_markers = _marker_declarations(header, keys)
    declared = {**from_markers, **from_header}
    layers = {name: _layer(header, keys, name, entry, "header" if name in from_header else "markers")
              for name, entry in declared.items()}  # fmt: skip
    blocks = _gguf_layers(header, keys)
    legacy = {} if from_header else _legacy_layers(header, keys, layers)
    bare = _bare_layers(header, keys, {**layers, **legacy})
    layers |= legacy | bare
    if blocks and layers:
        raise _refusal(header, [*layers], "these layers are declared in another way than the file's GGUF tensors")
    layers |= blocks
    sidecars = _sidecars(keys, layers)
    _refuse_leftovers(header, keys, layers, sidecars)
    sources = [name for name, found in (("header", from_header), ("markers", from_markers), ("legacy", legacy),
                                        ("scales", bare), ("gguf", blocks)) if found]  # fmt: skip
    return Quantization(layers, sidecars, " and ".join(sources))


def _header_declarations(header: Header, keys: NamedKeys) -> dict[str, Mapping[str, Any]]:
    text = (header.metadata or {}).get(HEADER_KEY)
    if text is None:
        return {}
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(header, [HEADER_KEY], f"the header's declaration is not valid JSON: {error}") from error
    entries = _layer_entries(value)
    if entries is None:
        raise _refusal(header, [HEADER_KEY], "the header's declaration has no layers")
    resolved: dict[str, Mapping[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith(tuple(COMPANIONS)):
            continue
        own = _resolve(name, keys)
        if own is None:
            raise _refusal(header, [name], "the header declares this layer, but the file has no weight of that name")
        if own in resolved:
            raise _refusal(header, [name], f"the header declares {own} twice")
        resolved[own] = _entry(header, name, entry)
    return resolved


def _layer_entries(value: Any) -> dict[str, Any] | None:
    """The map of layers: under `layers`, twice nested, or at the top."""
    while isinstance(value, dict) and isinstance(cast("dict[str, Any]", value).get("layers"), dict):
        value = cast("dict[str, Any]", value)["layers"]
    if not isinstance(value, dict):
        return None
    entries = cast("dict[str, Any]", value)
    return {name: entry for name, entry in entries.items() if name != "format_version"}


def _resolve(name: str, keys: NamedKeys) -> str | None:
    """The own name of a declared layer: as stored, without the file's prefix, or without any known one."""
    for prefix in (keys.prefix, "", *PREFIXES):
        own = name.removeprefix(prefix)
        if f"{own}.weight" in keys.stored:
            return own
    return None


def _entry(header: Header, name: str, value: Any) -> Mapping[str, Any]:
    """A declaration as a map: a bare string is its format; entries under `params` count, outer ones win."""
    if isinstance(value, str):
        return {"format": value}
    if not isinstance(value, dict):
        raise _refusal(header, [name], f"its declaration is {printable(repr(value))}, not an object")
    entry = cast("dict[str, Any]", value)
    nested = entry.get("params")
    merged = {**cast("dict[str, Any]", nested), **entry} if isinstance(nested, dict) else entry
    if not isinstance(merged.get("format"), str):
        raise _refusal(header, [name], "its declaration names no format")
    return merged


def _marker_declarations(header: Header, keys: NamedKeys) -> dict[str, Mapping[str, Any]]:
    markers = [name for name in keys.stored if name.endswith(MARKER)]
    if not markers:
        return {}
    declared: dict[str, Mapping[str, Any]] = {}
    for name in markers:
        info = header.tensors[keys.stored[name]]
        layer = name.removesuffix(MARKER)
        if info.nbytes > 65536:
            raise _refusal(header, [layer], f"its marker has {info.nbytes:,} bytes")
        raw = header.read_bytes(info).rstrip(b"\0")
        try:
            value: Any = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _refusal(header, [layer], f"its marker is not valid JSON: {error}") from error
        declared[layer] = _entry(header, layer, value)
    return declared


def _layer(header: Header, keys: NamedKeys, name: str, entry: Mapping[str, Any], source: str) -> QuantizedLayer:
    if f"{name}.weight" not in keys.stored:
        raise _refusal(header, [name], "it is declared, but the file has no such weight")
    if entry.get("num_experts"):
        raise _refusal(header, [name], "it is a bank of experts, which SDNQ has no layer for")
    tensors = {"weight": header.tensors[keys.stored[f"{name}.weight"]], **_roles(header, keys, name)}
    full_precision = entry.get("full_precision_matrix_mult") is True
    return QuantizedLayer(name, str(entry["format"]), entry, source, tensors, full_precision)


def _roles(header: Header, keys: NamedKeys, name: str) -> dict[str, TensorInfo]:
    """The tensors beside a layer's weight, in both spellings."""
    found = {role: keys.stored.get(f"{name}.{role}") for role in _ROLES}
    for ending, role in _LEGACY_ROLES.items():
        found[role] = found[role] or keys.stored.get(f"{name}{ending}")
    return {role: header.tensors[stored] for role, stored in found.items() if stored is not None}


def _legacy_layers(header: Header, keys: NamedKeys, known: Mapping[str, QuantizedLayer]) -> dict[str, QuantizedLayer]:
    """fp8 weights with `scale_weight`. The weight's own dtype counts, not the marker's."""
    marker = next((keys.stored[name] for name in keys.stored if name.split(".")[-1] == LEGACY_MARKER), None)
    full_precision = marker is not None and header.tensors[marker].shape == (2,)
    names = [name.removesuffix(".scale_weight") for name in keys.stored if name.endswith(".scale_weight")]
    return {
        name: replace(_scaled_fp8(header, keys, name, "legacy"), full_precision_matmul=full_precision)
        for name in names
        if name not in known
    }


def _bare_layers(header: Header, keys: NamedKeys, known: Mapping[str, QuantizedLayer]) -> dict[str, QuantizedLayer]:
    """fp8 weights with a `weight_scale` and no declaration."""
    names = [name.removesuffix(".weight_scale") for name in keys.stored if name.endswith(".weight_scale")]
    return {name: _scaled_fp8(header, keys, name, "scales") for name in names if name not in known}


def _scaled_fp8(header: Header, keys: NamedKeys, name: str, source: str) -> QuantizedLayer:
    stored = keys.stored.get(f"{name}.weight")
    if stored is None:
        raise _refusal(header, [name], "the file has a scale for it, but no weight")
    dtype = header.tensors[stored].dtype
    if dtype not in _FP8:
        raise _refusal(header, [name], f"it is stored as {dtype} with a scale, and nothing says in which format")
    entry = {"format": _FP8[dtype]}
    return _layer(header, keys, name, entry, source)


def _gguf_layers(header: Header, keys: NamedKeys) -> dict[str, QuantizedLayer]:
    """GGUF tensors of block types that can be loaded. Their stored tensor is described as the bytes that it is."""
    layers: dict[str, QuantizedLayer] = {}
    for name, stored in keys.stored.items():
        info = header.tensors[stored]
        if info.dtype not in LOADABLE:
            continue
        rows, columns = math.prod(info.shape[:1]), math.prod(info.shape[1:])
        in_rows = len(info.shape) > 1 and rows and columns % BLOCK_TYPES[info.dtype].block == 0
        packed = replace(info, dtype="U8", shape=(rows, info.nbytes // rows) if in_rows else (info.nbytes,))
        params = {"type": info.dtype, "shape": info.shape}
        layers[name] = QuantizedLayer(name.removesuffix(".weight"), "gguf", params, "gguf", {"weight": packed})
    return layers


def _sidecars(keys: NamedKeys, layers: Mapping[str, QuantizedLayer]) -> frozenset[str]:
    own_names = {stored: own for own, stored in keys.stored.items()}
    names = {own_names[info.name] for layer in layers.values() for role, info in layer.tensors.items()
             if role != "weight"}  # fmt: skip
    names |= {f"{layer}{MARKER}" for layer in layers if f"{layer}{MARKER}" in keys.stored}
    names |= {name for name in keys.stored if name.split(".")[-1] == LEGACY_MARKER}
    return frozenset(names)


def _refuse_leftovers(
    header: Header, keys: NamedKeys, layers: Mapping[str, QuantizedLayer], sidecars: frozenset[str]
) -> None:
    """Every scale has a layer, and every weight that holds codes is declared."""
    endings = tuple(f".{role}" for role in _ROLES) + tuple(_LEGACY_ROLES) + (MARKER,)
    loose = [keys.stored[name] for name in keys.stored if name.endswith(endings) and name not in sidecars]
    if loose:
        raise _refusal(header, loose, "these scales belong to no declared layer")
    for name, stored in keys.stored.items():
        dtype = header.tensors[stored].dtype
        if name.endswith(".weight") and dtype in _CODES and name.removesuffix(".weight") not in layers:
            raise _refusal(header, [stored], f"it is stored as {dtype}, and nothing says in which format")


def _refuse_foreign(header: Header, keys: NamedKeys) -> None:
    for name, endings in _FOREIGN.items():
        found = [stored for own, stored in keys.stored.items() if own.endswith(endings) or ".quant_state." in own]
        if found:
            raise UnsupportedQuantization(
                header.path, [name], f"it holds {sample(found, 2)}", "Use a version in a ComfyUI format, or bf16"
            )


def _refusal(header: Header, names: list[str], why: str) -> UnsupportedQuantization:
    return UnsupportedQuantization(header.path, [sample(names, 3)], why, _KNOWN_REMEDY)
