"""The only file that knows diffusers' GGUF support: GGML blocks in, its layers out. Imported when first needed.

Two things differ from diffusers' own classes, both on purpose. Decoding is done in fp32 and rounded once, which
equals `gguf.quants.dequantize`; diffusers computes in fp16 and rounds again, which changes 3 to 9 per cent of the
bf16 values. And a weight keeps its type when it is copied, pickled or made anew by accelerate's offloading, where
`GGUFParameter` fails with `KeyError: None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from diffusers import GGUFQuantizationConfig
from diffusers.quantizers.gguf import GGUFQuantizer
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_functions
from diffusers.quantizers.quantization_config import QuantizationMethod
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from transplant.formats.base import Codes, Form
from transplant.sdnq_bridge import Compute

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin


class GGUFWeight(GGUFParameter):
    """Packed rows that know their type through every way of being copied."""

    quant_type: GGMLQuantizationType | None
    quant_shape: torch.Size | tuple[int, ...]

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = False,
        quant_type: GGMLQuantizationType | None = None,
    ) -> GGUFWeight:
        """Like GGUFParameter, but data that is one passes its type on, and bytes of no known type are accepted.

        Args:
            data: the packed rows.
            requires_grad: as in torch.nn.Parameter.
            quant_type: their type; by default that of `data`.
        """
        kind = quant_type if quant_type is not None else getattr(data, "quant_type", None)
        weight = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, requires_grad)
        weight.quant_type = kind
        weight.quant_shape = weight.shape
        if kind is not None and weight.ndim:
            block, nbytes = GGML_QUANT_SIZES[kind]
            weight.quant_shape = (*weight.shape[:-1], weight.shape[-1] // nbytes * block)
        return weight

    def __init__(
        self,
        data: torch.Tensor | None = None,
        requires_grad: bool = False,
        quant_type: GGMLQuantizationType | None = None,
    ) -> None:
        """Everything is done in __new__, as in torch.nn.Parameter."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GGUFWeight:
        if id(self) not in memo:
            memo[id(self)] = GGUFWeight(self.as_tensor().clone(), self.requires_grad, self.quant_type)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return GGUFWeight, (self.as_tensor(), self.requires_grad, self.quant_type)


class ExactGGUFLinear(GGUFLinear):
    """A GGUFLinear that knows its type itself and can decode in fp32.

    Attributes:
        ggml_type: type of its blocks.
        decode_dtype: dtype that it decodes in; None for diffusers' own way.
    """

    ggml_type: GGMLQuantizationType
    decode_dtype: torch.dtype | None

    def forward_native(self, inputs: torch.Tensor) -> torch.Tensor:
        """See GGUFLinear."""
        bias: Any = self.bias  # which may be None
        bias = None if bias is None else bias.to(self.compute_dtype)
        return torch.nn.functional.linear(inputs, self.decoded_weight(), bias)

    def decoded_weight(self) -> torch.Tensor:
        """The weight that it computes with, [N, K] in the compute dtype."""
        weight = self.weight.as_tensor() if isinstance(self.weight, GGUFParameter) else self.weight
        return _values(weight, self.ggml_type, self.decode_dtype).to(self.compute_dtype)


def quantized_layer(module: torch.nn.Module, codes: Codes, dtype: torch.dtype, compute: Compute) -> torch.nn.Module:
    """A GGUFLinear in the place of a Linear, with these blocks.

    Args:
        module: the Linear; its bias is kept.
        codes: [N, bytes a row]; the layer holds this very memory.
        dtype: compute dtype of the layer.
        compute: whether to decode in fp32. Quantized matmul and compilation are not for these layers.
    """
    linear: Any = module
    kind = GGMLQuantizationType[codes.form.weights_dtype]
    with torch.device("meta"):
        layer = ExactGGUFLinear(linear.in_features, linear.out_features, False, compute_dtype=dtype)
    told: Any = layer
    told.source_cls, told.bias = type(module), linear.bias
    layer.ggml_type, layer.decode_dtype = kind, torch.float32 if compute.dequantize_fp32 else None
    layer.weight = GGUFWeight(codes.weight, quant_type=kind)
    return layer


def decoded(codes: Codes, shape: tuple[int, int], dtype: torch.dtype, compute: Compute | None = None) -> torch.Tensor:
    """The values of blocks, as [N, K] in `dtype`: decoded in fp32 and rounded once."""
    return _values(codes.weight, GGMLQuantizationType[codes.form.weights_dtype], torch.float32).reshape(shape).to(dtype)


def mark_quantized(model: ModelMixin, forms: Mapping[str, Form], dtype: torch.dtype, compute: Compute) -> None:
    """Make diffusers treat a model as quantized: no cast, `quantization_config` in its config.

    Args:
        model: the model with its GGUFLinears in place.
        forms: how each module is held, by module name.
        dtype: the model's compute dtype.
        compute: how it computes.
    """
    config = GGUFQuantizationConfig(compute_dtype=dtype)
    told: Any = model
    told.quantization_config, told.hf_quantizer = config, GGUFQuantizer(config)
    told.quantization_method, told.is_quantized = QuantizationMethod.GGUF, True
    as_json = {"quant_method": QuantizationMethod.GGUF.value, "compute_dtype": str(dtype).removeprefix("torch.")}
    told.register_to_config(quantization_config=as_json)


def _values(packed: torch.Tensor, kind: GGMLQuantizationType, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of packed bytes, whose last dimension grows from bytes to values."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    count = packed.numel() // nbytes
    values = dequantize_functions[kind](packed.reshape(count, nbytes), block, nbytes, dtype=dtype)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] // nbytes * block)
