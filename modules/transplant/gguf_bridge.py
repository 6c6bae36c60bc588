"""The only file that knows diffusers' GGUF support: GGML blocks in, its layers out. Imported when first needed.

Two things differ from diffusers' own classes, both on purpose. Decoding is done in fp32 and rounded once, which
equals `gguf.quants.dequantize`; diffusers computes in fp16 and rounds again, which changes 3 to 9 per cent of the
bf16 values. And a weight keeps its type when it is copied, pickled or made anew by accelerate's offloading, where
`GGUFParameter` fails with `KeyError: None`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from diffusers import GGUFQuantizationConfig
from diffusers.quantizers.gguf import GGUFQuantizer
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_functions
from diffusers.quantizers.quantization_config import QuantizationMethod
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from transplant.formats.base import Codes, Form, FormatError
from transplant.sdnq_bridge import SECTION, Compute

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


class ExactGGUFQuantizer(GGUFQuantizer):
    """Lets a model with such layers be saved: the blocks are bytes, and its config names their types."""

    @property
    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  # which says False
        """See DiffusersQuantizer."""
        return True

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Any], safe_serialization: bool = False, **kwargs: Any
    ) -> tuple[dict[str, Any], Any]:
        """See DiffusersQuantizer; blocks as plain tensors."""
        plain = {name: value.as_tensor() if isinstance(value, GGUFParameter) else value
                 for name, value in state_dict.items()}  # fmt: skip
        return plain, {}

    @property
    def supports_safetensors_serialization(self) -> bool:
        """See DiffusersQuantizer."""
        return True


def mark_quantized(model: ModelMixin, dtype: torch.dtype, compute: Compute, full_precision: Sequence[str] = ()) -> None:
    """Make diffusers treat a model as quantized: no cast, `quantization_config` in its config.

    Args:
        model: the model with its GGUFLinears in place.
        dtype: the model's compute dtype.
        compute: how it computes.
        full_precision: not for these layers, which never multiply in low precision.
    """
    config = GGUFQuantizationConfig(compute_dtype=dtype)
    told: Any = model
    told.quantization_config, told.hf_quantizer = config, ExactGGUFQuantizer(config)
    told.quantization_method, told.is_quantized = QuantizationMethod.GGUF, True
    name = str(dtype).removeprefix("torch.")
    types: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, ExactGGUFLinear):
            types.setdefault(module.ggml_type.name, []).append(path)
    as_json = {"quant_method": QuantizationMethod.GGUF.value, "compute_dtype": name,
               SECTION: {"dtype": name, "ggml_types": types}}  # fmt: skip
    told.register_to_config(quantization_config=as_json)


class SavedLayers:
    """Layers as a saved model holds them, one at a time, for one network."""

    def __init__(self, settings: Mapping[str, Any], dtype: torch.dtype, compute: Compute, device: torch.device) -> None:
        """Raises FormatError where the settings, a model's `quantization_config`, do not tell the blocks' types."""
        types = cast("Mapping[str, Sequence[str]]", (settings.get(SECTION) or {}).get("ggml_types", {}))
        self._dtype, self._compute = dtype, compute
        self._types = {name: kind for kind, names in types.items() for name in names}
        if unknown := types.keys() - {kind.name for kind in dequantize_functions}:
            raise FormatError(
                f"its quantization_config names the GGML types {sorted(unknown)}, which are not known here"
            )

    def is_held(self, name: str, tensors: Mapping[str, Any]) -> bool:
        """Whether a module is quantized."""
        return name in self._types

    def layer(self, name: str, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The layer in the place of a Linear. Raises FormatError where its blocks are not its shape's."""
        linear: Any = module
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self._types[name]]]
        wanted, weight = (linear.out_features, linear.in_features // block * nbytes), tensors["weight"]
        if tuple(weight.shape) != wanted or weight.dtype != torch.uint8:
            raise FormatError(f"its weight is {list(weight.shape)} in {weight.dtype}, not {list(wanted)} bytes")
        codes = Codes(Form(self._types[name], holder="gguf"), weight, weight.new_empty(0))
        return quantized_layer(module, codes, self._dtype, self._compute)

    def finish(self, model: ModelMixin) -> None:
        """Make diffusers treat the model as quantized."""
        mark_quantized(model, self._dtype, self._compute)


def _values(packed: torch.Tensor, kind: GGMLQuantizationType, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of packed bytes, whose last dimension grows from bytes to values."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    count = packed.numel() // nbytes
    values = dequantize_functions[kind](packed.reshape(count, nbytes), block, nbytes, dtype=dtype)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] // nbytes * block)
