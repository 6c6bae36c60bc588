"""GGUF files: real ones written by the gguf package, and headers with one fault each written by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,),
}  # fmt: skip
"""Where a block of the types that gguf cannot quantize to in Python has its fp16 scales."""


@dataclass(frozen=True)
class Quantized:
    """A tensor as a GGUF file stores it.

    Attributes:
        kind: its type.
        data: packed rows, uint8.
        shape: its true shape; another than that of `data` where it was reshaped to fit the blocks.
    """

    kind: GGMLQuantizationType
    data: np.ndarray
    shape: tuple[int, ...]

    @property
    def value(self) -> torch.Tensor:
        """What the gguf package decodes it to, in fp32."""
        return torch.from_numpy(gguf.quants.dequantize(self.data, self.kind)).reshape(self.shape)


def quantize(tensor: torch.Tensor, name: str) -> Quantized:
    """Quantize with the gguf package; where it cannot, random codes with scales near those of the tensor.

    Rows that are not whole blocks are stored as rows of one block, as ComfyUI-GGUF's converter does.
    """
    kind, shape = GGMLQuantizationType[name], tuple(tensor.shape)
    block, nbytes = GGML_QUANT_SIZES[kind]
    values = tensor.float().numpy()
    if shape[-1] % block:
        values = values.reshape(-1, block)
    if name not in SCALES:
        return Quantized(kind, gguf.quants.quantize(values, kind), shape)
    numbers = np.random.default_rng(len(name) + values.size)
    blocks = numbers.integers(0, 256, (values.size // block, nbytes), dtype=np.uint8)
    for offset in SCALES[name]:
        scales = (numbers.standard_normal(len(blocks)) * 1e-4).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return Quantized(kind, blocks.reshape(*values.shape[:-1], -1), shape)


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor | Quantized],
    architecture: str = "lumina2",
    change: Callable[[gguf.GGUFWriter], object] | None = None,
) -> Path:
    """Write a GGUF file. Plain tensors are stored in their own dtype; an empty architecture is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    if change is not None:
        change(writer)
    for name, tensor in tensors.items():
        if isinstance(tensor, Quantized):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.kind)
            stored = gguf.quant_shape_from_byte_shape(tensor.data.shape, tensor.kind)
            if stored != tensor.shape:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(tensor.shape))
        elif tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: bytes) -> bytes:
    """A text as GGUF writes it."""
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    """A metadata entry."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: Sequence[int] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; dimensions with the innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    tensors: Sequence[bytes] = (tensor(b"a"),),
    entries: Sequence[bytes] = (),
    data: int = 32,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file by hand: header, padding, `data` zeros."""
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % alignment) + bytes(data)
