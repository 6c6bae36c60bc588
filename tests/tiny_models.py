"""Small models and files for the tests, made on the spot; what the demo makes too comes from demo/make_demo.py.

Models: `random_z_image(tiny_z_image_config(dim=96), seed, dtype)`, `tiny_base(folder, seed, dtype, **config)`,
`tiny_pipeline(seed, dtype, **config)`, `tiny_flux_bfl(seed, dtype)`.
Layouts: `to_comfyui`, `with_prefix`, `tiny_bundle(pipeline)`.
Files: `save`, and, without their weights but at any size, `write_sparse` and `write_from_manifest`.
"""

import gzip
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

import make_demo

random_z_image = make_demo.random_transformer
save = make_demo.save
tiny_base = make_demo.save_base
tiny_bundle = make_demo.make_bundle
tiny_flux_bfl = make_demo.flux_bfl
tiny_pipeline = make_demo.make_pipeline
tiny_z_image_config = make_demo.transformer_config
to_comfyui = make_demo.to_comfyui
with_prefix = make_demo.with_prefix

MANIFESTS = Path(__file__).resolve().parent / "manifests"

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one element of each safetensors dtype."""


@dataclass(frozen=True)
class Manifest:
    """What the header of a real public checkpoint says, and what diffusers makes of it."""

    metadata: dict[str, str] | None
    """The header's `__metadata__`; None where it has none."""
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """dtype and shape of every key, in the order of the file."""
    markers: dict[str, str]
    """Text in the bytes of `<layer>.comfy_quant`, by layer."""
    diffusers: dict[str, Any]
    """`class`, `config` (what differs from the class's defaults) and the name of its `converter`."""
    file_bytes: int | None
    """Size of the published file, where a file rebuilt from this manifest has the same to the byte."""
    padded: bool
    """Whether the header is padded so that the data starts at a multiple of 8; old writers did not."""


def manifest(name: str) -> Manifest:
    """Load `tests/manifests/<name>.json.gz`."""
    fields = json.loads(gzip.decompress((MANIFESTS / f"{name}.json.gz").read_bytes()))
    tensors = {key: (dtype, tuple(shape)) for key, (dtype, shape) in fields.pop("tensors").items()}
    return Manifest(tensors=tensors, **fields)


def write_sparse(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    contents: Mapping[str, bytes] | None = None,
    padded: bool = True,
) -> Path:
    """Write a safetensors file of any size that takes no disk space: a real header, and zeros that are not stored.

    Args:
        path: File to write; its folder is made.
        tensors: Safetensors dtype and shape by name; data lies in this order.
        metadata: Becomes `__metadata__`; None leaves it out, an empty mapping is written as such.
        contents: Bytes of the few tensors that are not all zeros.
        padded: Pad the header with spaces so that the data starts at a multiple of 8.

    Returns:
        The path.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BITS[dtype] * math.prod(shape) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8 if padded else 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, data in (contents or {}).items():
            begin, end = header[name]["data_offsets"]
            if len(data) != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes, not {len(data)}")
            file.seek(8 + len(text) + begin)
            file.write(data)
    return path


def write_from_manifest(path: Path, name: str) -> Path:
    """Write the real checkpoint that the manifest describes at full size: its header and markers, zeros as weights."""
    source = manifest(name)
    markers = {f"{layer}.comfy_quant": text.encode() for layer, text in source.markers.items()}
    return write_sparse(path, source.tensors, source.metadata, contents=markers, padded=source.padded)
