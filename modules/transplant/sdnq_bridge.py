"""The only file that knows SDNQ: codes in, SDNQ layers out.

SDNQ is the PyPI package. Importing it runs a test compile unless SDNQ_USE_TORCH_COMPILE says what is wanted.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from transplant.adapters import let_adapters_compute_in
from transplant.errors import OptionError
from transplant.formats.base import Codes, Form

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

_STATE = ("weight", "scale", "scale_2", "scale_zero_point", "zero_point", "zero_point_scale", "zero_point_2",
          "svd_up", "svd_down")  # fmt: skip
"""Attributes that every SDNQ layer has; None where unused."""


IN_FLIGHT = "in flight"
"""Holder of a Form that stands for a float weight which SDNQ quantizes while it loads."""


@dataclass(frozen=True)
class QuantizeOnLoad:
    """How float files are quantized while they load; the names are SDNQConfig's.

    Attributes:
        weights_dtype: SDNQ's name of the codes' dtype, for example "int8" or "uint4".
        group_size: columns that share a scale; 0 for SDNQ's choice, -1 a row.
        use_svd: keep a low-rank part of each weight unquantized.
        svd_rank: rank of that part.
        use_hadamard: rotate weights before they are quantized.
        modules_to_not_convert: names or patterns of modules that stay as they are, beside those that SDNQ
            knows of the model's class.
        modules_dtype_dict: weights_dtype → names or patterns of modules that get it instead.
    """

    weights_dtype: str
    group_size: int = 0
    use_svd: bool = False
    svd_rank: int = 32
    use_hadamard: bool = False
    modules_to_not_convert: tuple[str, ...] = ()
    modules_dtype_dict: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Compute:
    """How layers hold their weights and compute.

    Attributes:
        quantized_matmul: "" to dequantize and multiply in the compute dtype, "auto" for SDNQ's quantized
            matmul in the dtype that suits the codes, or that dtype ("int8", "float8_e4m3fn").
        compiled: dequantize with torch.compile.
        dequantize_fp32: keep fp32 scales and dequantize in fp32; else in the compute dtype.
        fp8_storage: let the plain weights of Linears and convolutions rest in float8_e4m3fn.
        quantize: quantize the Linears of float files while they load; None to leave them.
    """

    quantized_matmul: str = ""
    compiled: bool = False
    dequantize_fp32: bool = True
    fp8_storage: bool = False
    quantize: QuantizeOnLoad | None = None


def wants_portable_codes(compute: Compute, device: torch.device, capability: tuple[int, int] | None) -> bool:
    """Whether fp8 codes must be held as bytes that SDNQ decodes itself.

    Triton cannot compile e4m3 loads before sm_89. A pure function of what it is given.

    Args:
        compute: how layers compute.
        device: where.
        capability: the CUDA compute capability; None where there is none.
    """
    return compute.compiled and device.type == "cuda" and capability is not None and capability < (8, 9)


def portable_on(compute: Compute, device: torch.device) -> bool:
    """wants_portable_codes for a device of this machine."""
    present = device.type == "cuda" and torch.cuda.is_available()
    return wants_portable_codes(compute, device, torch.cuda.get_device_capability(device) if present else None)


def quantized_layer(module: torch.nn.Module, codes: Codes, dtype: torch.dtype, compute: Compute) -> torch.nn.Module:
    """An SDNQ layer in the place of a Linear, with these codes.

    Args:
        module: the Linear; its bias is kept.
        codes: [N, K] in all.
        dtype: compute dtype of the layer.
        compute: how it computes.

    Returns:
        The layer. Its codes are the tensors that were given, packed 4-bit codes as a flat view of them.
    """
    _choose_compilation(compute)
    from sdnq.forward import get_forward_func
    from sdnq.layers import get_sdnq_wrapper_class
    from sdnq.quant_utils import prepare_weight_for_matmul

    linear = cast("torch.nn.Linear", module)
    shape = torch.Size((linear.out_features, linear.in_features))
    dequantizer = _dequantizer(codes, shape, dtype, compute)
    tensors: dict[str, torch.Tensor | None] = dict.fromkeys(_STATE)
    tensors["weight"] = codes.weight.flatten() if codes.form.nibbles else codes.weight
    tensors["scale"] = _scale(codes, dtype, compute)
    tensors["scale_2"], tensors["zero_point"] = codes.scale_2, codes.zero_point
    if dequantizer.use_quantized_matmul and not dequantizer.re_quantize_for_matmul and not dequantizer.is_packed:
        tensors["weight"] = prepare_weight_for_matmul(codes.weight.t(), matmul_dtype=codes.form.matmul_dtype)
        tensors["scale"] = codes.scale.t().contiguous()
    forward = get_forward_func("Linear", dequantizer.quantized_matmul_dtype, dequantizer.use_quantized_matmul)
    layer = get_sdnq_wrapper_class(module, forward)
    layer.sdnq_dequantizer = dequantizer
    for name, tensor in tensors.items():
        value = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, value) if name != "weight" else setattr(layer, name, value)
    if codes.input_scale is not None:
        layer.register_buffer("pre_quant_scale", codes.input_scale)
        layer.register_forward_pre_hook(_scale_input)
    let_adapters_compute_in(layer, dtype)
    return layer


def decoded(codes: Codes, shape: tuple[int, int], dtype: torch.dtype, compute: Compute | None = None) -> torch.Tensor:
    """The weight that codes stand for, as [N, K] in `dtype`, computed as a dequantizing layer would."""
    compute = replace(compute or Compute(), quantized_matmul="")
    _choose_compilation(compute)
    dequantizer = _dequantizer(codes, torch.Size(shape), dtype, compute)
    weight = codes.weight.flatten() if codes.form.nibbles else codes.weight
    return dequantizer(
        weight=weight, scale=codes.scale, scale_2=codes.scale_2, zero_point=codes.zero_point, skip_compile=True
    )


def _scale(codes: Codes, dtype: torch.dtype, compute: Compute) -> torch.Tensor:
    """The scale as stored, or in the compute dtype where that is wanted and loses none to zero or infinity."""
    if compute.dequantize_fp32 or codes.form.scale_dtype is not None:
        return codes.scale
    cast = codes.scale.to(dtype)
    survives = bool(((cast != 0) | (codes.scale == 0)).all()) and bool(cast.isfinite().all())
    return cast if survives else codes.scale


def mark_quantized(model: ModelMixin, forms: Mapping[str, Form], dtype: torch.dtype, compute: Compute) -> None:
    """Make diffusers treat a model as quantized: no cast, `quantization_config` in its config.

    Args:
        model: the model with its SDNQ layers in place.
        forms: how each module is held, by module name.
        dtype: the model's compute dtype.
        compute: how it computes.
    """
    from sdnq import SDNQConfig

    held = list(forms.values())
    most_common = max(dict.fromkeys(held), key=held.count)
    plain = [name for name, module in model.named_modules() if name not in forms and hasattr(module, "weight")]
    config = SDNQConfig(
        **_form_arguments(most_common, compute),
        dequantize_fp32=compute.dequantize_fp32,
        add_skip_keys=False,
        modules_to_not_convert=[f"{name}.weight" for name in plain],
        modules_quant_config={f".{name}.": _form_arguments(form, compute) for name, form in forms.items()},
    )
    _mark(model, config, dtype)


def _mark(model: ModelMixin, config: Any, dtype: torch.dtype) -> None:
    from sdnq import QuantizationMethod, SDNQQuantizer

    quantizer = SDNQQuantizer(config, pre_quantized=True)
    quantizer.torch_dtype = dtype
    told: Any = model
    told.quantization_config, told.hf_quantizer = config, quantizer
    told.quantization_method, told.is_quantized = QuantizationMethod.SDNQ, True
    told.register_to_config(quantization_config=config.to_dict())


def _form_arguments(form: Form, compute: Compute) -> dict[str, Any]:
    return {
        "weights_dtype": form.weights_dtype,
        "scale_dtype": form.scale_dtype,
        "group_size": form.group_size,
        "use_hadamard": bool(form.hadamard),
        "hadamard_group_size": form.hadamard or 256,
        "use_codebook": form.codebook,
        "use_quantized_matmul": bool(compute.quantized_matmul),
    }


def _dequantizer(codes: Codes, shape: torch.Size, dtype: torch.dtype, compute: Compute) -> Any:
    from sdnq.dequantizer import SDNQDequantizer
    from sdnq.utils import check_quantized_matmul_is_allowed

    form = codes.form
    matmul = form.matmul_dtype if compute.quantized_matmul in ("", "auto") else compute.quantized_matmul
    grouped = form.group_size > 0
    cls = _fp32_rotation_class() if form.fp32_rotation and dtype != torch.float32 else SDNQDequantizer
    columns = shape[1]
    unpacked = torch.Size((shape[0], columns // form.group_size, form.group_size)) if grouped else shape
    return cls(
        result_dtype=dtype,
        result_shape=shape if grouped else None,
        original_shape=shape,
        original_stride=[columns, 1],
        quantized_weight_shape=unpacked,
        quantized_scale_shape=codes.scale.shape,
        quantized_zero_point_shape=None if codes.zero_point is None else codes.zero_point.shape,
        weights_dtype=form.weights_dtype,
        scale_dtype=form.scale_dtype,
        quantized_matmul_dtype=matmul,
        hadamard_group_size=form.hadamard or 256,
        group_size=form.group_size,
        use_quantized_matmul=check_quantized_matmul_is_allowed(bool(compute.quantized_matmul), *shape),
        re_quantize_for_matmul=grouped or form.codebook or form.scale_dtype is not None or _differs(form, matmul),
        use_hadamard=bool(form.hadamard),
        use_codebook=form.codebook,
        layer_class_name="Linear",
    )


def _differs(form: Form, matmul_dtype: str) -> bool:
    """Whether codes must be made anew for the matmul, by SDNQ's own rule."""
    from sdnq.common import dtype_dict

    weights: Any = dtype_dict[form.weights_dtype]
    matmul: Any = dtype_dict[matmul_dtype]
    return bool(
        weights["num_bits"] > matmul["num_bits"]
        or weights["is_integer"] != matmul["is_integer"]
        or (weights["is_unsigned"] and not matmul["is_integer"])
    )


@functools.cache
def _fp32_rotation_class() -> type:
    from sdnq.dequantizer import SDNQDequantizer

    class Fp32RotationDequantizer(SDNQDequantizer):
        """Rotates in fp32 and rounds once, as ComfyUI does; stock SDNQ rotates in the result's dtype."""

        def __call__(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
            """See SDNQDequantizer."""
            return super().__call__(*args, dtype=torch.float32, **kwargs).to(dtype or self.result_dtype)

    return Fp32RotationDequantizer


def _scale_input(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: AWQ-style scales multiply the input in its own dtype."""
    first, *rest = inputs
    return (first * layer.pre_quant_scale.to(first.dtype), *rest)


def _choose_compilation(compute: Compute) -> None:
    """Tell SDNQ, before its first import in this process, whether to compile. It cannot be told again later."""
    os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "1" if compute.compiled else "0")


class InFlight:
    """SDNQ's own quantization, one weight at a time, for one network."""

    def __init__(self, network: ModelMixin, wanted: QuantizeOnLoad, dtype: torch.dtype, compute: Compute) -> None:
        """Raises OptionError where SDNQ does not know a dtype."""
        _choose_compilation(compute)
        from sdnq import SDNQConfig
        from sdnq.common import accepted_weight_dtypes
        from sdnq.utils import add_module_skip_keys

        for name in (wanted.weights_dtype, *(key for key, _ in wanted.modules_dtype_dict)):
            if name not in accepted_weight_dtypes:
                raise OptionError(
                    "weights_dtype", name, f"SDNQ has no {name!r}; it has {', '.join(sorted(accepted_weight_dtypes))}"
                )
        self._dtype = dtype
        config = SDNQConfig(
            weights_dtype=wanted.weights_dtype,
            group_size=wanted.group_size,
            use_svd=wanted.use_svd,
            svd_rank=wanted.svd_rank,
            use_hadamard=wanted.use_hadamard,
            use_quantized_matmul=bool(compute.quantized_matmul),
            quantized_matmul_dtype=None if compute.quantized_matmul in ("", "auto") else compute.quantized_matmul,
            dequantize_fp32=compute.dequantize_fp32,
            modules_to_not_convert=list(wanted.modules_to_not_convert),
            modules_dtype_dict={key: list(names) for key, names in wanted.modules_dtype_dict},
        )
        self._config: Any = add_module_skip_keys(network, config)[1]

    def takes(self, name: str, module: torch.nn.Module) -> bool:
        """Whether SDNQ quantizes this weight: a Linear, large enough, on no skip list."""
        from sdnq.utils import check_param_name_in, check_quant_is_allowed

        if type(module) is not torch.nn.Linear or not name.endswith(".weight"):
            return False
        listed = cast("str | None", check_param_name_in(name, self._config.modules_to_not_convert))
        return listed is None and check_quant_is_allowed("Linear", module.weight, self._config)

    def planned(self, name: str, module: torch.nn.Module) -> tuple[Form, int]:
        """How a weight will be held, and in how many bytes. Computed on meta tensors."""
        from sdnq.quantizer import sdnq_quantize_layer_weight
        from sdnq.utils import get_quant_kwargs

        arguments = get_quant_kwargs(module, self._config, torch_dtype=self._dtype, param_name=name)
        for key in ("return_device", "quantization_device", "non_blocking", "use_dynamic_quantization"):
            arguments.pop(key)
        linear = cast("torch.nn.Linear", module)
        weight = torch.empty(linear.out_features, linear.in_features, dtype=torch.float32, device="meta")
        dequantizer, tensors = sdnq_quantize_layer_weight(weight, **arguments)
        nbytes = sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
        return Form(dequantizer.weights_dtype, dequantizer.group_size, holder=IN_FLIGHT), nbytes

    def layer(self, name: str, module: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
        """The quantized layer in the place of a Linear, from its float weight."""
        from sdnq.quantizer import sdnq_quantize_layer

        module.weight = torch.nn.Parameter(weight.to(torch.float32), requires_grad=False)
        layer, self._config = sdnq_quantize_layer(module, self._config, torch_dtype=self._dtype, param_name=name)
        let_adapters_compute_in(layer, self._dtype)
        return layer

    def finish(self, model: ModelMixin) -> None:
        """Make diffusers treat the model as quantized."""
        _mark(model, self._config, self._dtype)
