"""The only file that knows SDNQ: codes in, SDNQ layers out.

Which SDNQ is sdnq_package's matter. Importing the PyPI package runs a test compile unless SDNQ_USE_TORCH_COMPILE says
what is wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from transplant.adapters import let_adapters_compute_in
from transplant.formats.base import Codes, Form, FormatError, Portable
from transplant.sdnq_names import Keys, check_names
from transplant.sdnq_package import choose_compilation, has_scales_of_scales, part
from transplant.sdnq_rows import is_transposed, on_meta, prepared_for_matmul, quantize_weight, values_at_once

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

_STATE = ("weight", "scale", "scale_2", "scale_zero_point", "zero_point", "zero_point_scale", "zero_point_2",
          "svd_up", "svd_down")  # fmt: skip
"""Attributes that every SDNQ layer has; None where unused. Older SDNQ knows but some of them."""

INPUT_SCALE = "pre_quant_scale"
"""Buffer of a layer whose input is multiplied before it computes."""

SECTION = "transplant"
"""Entry of a model's `quantization_config` that tells what SDNQ's own entries cannot."""

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
        modules_to_not_convert: names or patterns of modules that stay as they are, beside those that SDNQ knows.
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
        quantized_matmul: "" to dequantize and multiply in the compute dtype; else the dtype to multiply in, or "auto".
        compiled: dequantize with torch.compile.
        dequantize_fp32: keep fp32 scales and dequantize in fp32; else in the compute dtype.
        fp8_storage: let the plain weights of Linears and convolutions rest in float8_e4m3fn.
        quantize: quantize the Linears of float files while they load; None to leave them.
        runs_on: the device that computes, where weights rest on another one; None where they do not.
    """

    quantized_matmul: str = ""
    compiled: bool = False
    dequantize_fp32: bool = True
    fp8_storage: bool = False
    quantize: QuantizeOnLoad | None = None
    runs_on: torch.device | None = None


def portable_for(
    compute: Compute, device: torch.device, capability: tuple[int, int] | None, *, plain: bool = False
) -> Portable:
    """What must be held otherwise because of the GPU or of SDNQ. A pure function of what it is given.

    Triton cannot compile e4m3 loads before sm_89. SDNQ casts e4m3 codes to the scales' dtype there, also where nothing
    is compiled; with e8m0 scales that would be silently wrong (`sdnq/dequantizer.py`).

    Args:
        compute: how layers compute.
        device: where.
        capability: the CUDA compute capability; None where there is none.
        plain: SDNQ has no scales of scales and no tables.
    """
    lacks_fp8 = device.type == "cuda" and capability is not None and capability < (8, 9)
    return Portable(codes=lacks_fp8 and compute.compiled, scales=lacks_fp8, plain=plain)


def portable_on(compute: Compute, device: torch.device) -> Portable:
    """portable_for a device of this machine, where the weights rest, and the SDNQ in use."""
    device, there = compute.runs_on or device, torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if there and device.type == "cuda" else None
    return portable_for(compute, device, capability, plain=not has_scales_of_scales())


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
    choose_compilation(compute.compiled)
    linear = cast("torch.nn.Linear", module)
    shape = torch.Size((linear.out_features, linear.in_features))
    dequantizer = _dequantizer(codes, shape, dtype, compute)
    tensors: dict[str, torch.Tensor | None] = dict.fromkeys(_STATE)
    tensors["weight"] = codes.weight.flatten() if codes.form.nibbles else codes.weight
    tensors["scale"] = _scale(codes, dtype, compute)
    tensors["scale_2"], tensors["zero_point"] = codes.scale_2, codes.zero_point
    if is_transposed(dequantizer):
        tensors["weight"] = prepared_for_matmul(codes.weight.t(), codes.form.matmul_dtype)
        tensors["scale"] = codes.scale.t().contiguous()
    return _assembled(module, dequantizer, tensors, codes.input_scale)


def _assembled(
    module: torch.nn.Module, dequantizer: Any, tensors: Mapping[str, torch.Tensor | None], input_scale: Any = None
) -> torch.nn.Module:
    """An SDNQ layer of ready parts, in the place of a Linear."""
    choose_forward = part("forward").get_forward_func
    forward = choose_forward("Linear", dequantizer.quantized_matmul_dtype, dequantizer.use_quantized_matmul)
    layer = part("layers").get_sdnq_wrapper_class(module, forward)
    layer.sdnq_dequantizer = dequantizer
    for name in _STATE:
        tensor = tensors.get(name)
        value = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, value) if name != "weight" else setattr(layer, name, value)
    if input_scale is not None:
        layer.register_buffer(INPUT_SCALE, input_scale)
        layer.register_forward_pre_hook(_scale_input)
    let_adapters_compute_in(layer, dequantizer.result_dtype)
    return layer


def decoded(codes: Codes, shape: tuple[int, int], dtype: torch.dtype, compute: Compute | None = None) -> torch.Tensor:
    """The weight that codes stand for, as [N, K] in `dtype`, computed as a dequantizing layer would."""
    compute = replace(compute or Compute(), quantized_matmul="")
    choose_compilation(compute.compiled)
    dequantizer = _dequantizer(codes, torch.Size(shape), dtype, compute)
    weight = codes.weight.flatten() if codes.form.nibbles else codes.weight
    scale_2 = {} if codes.scale_2 is None else {"scale_2": codes.scale_2}
    return dequantizer(weight=weight, scale=codes.scale, zero_point=codes.zero_point, skip_compile=True, **scale_2)


def _scale(codes: Codes, dtype: torch.dtype, compute: Compute) -> torch.Tensor:
    """The scale as stored, or in the compute dtype where that is wanted and loses none to zero or infinity."""
    if compute.dequantize_fp32 or codes.form.scale_dtype is not None:
        return codes.scale
    cast = codes.scale.to(dtype)
    survives = bool(((cast != 0) | (codes.scale == 0)).all()) and bool(cast.isfinite().all())
    return cast if survives else codes.scale


def sdnq_layers(model: torch.nn.Module) -> dict[str, Any]:
    """A model's SDNQ layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "sdnq_dequantizer")}


def mark_quantized(model: ModelMixin, dtype: torch.dtype, compute: Compute, full_precision: Sequence[str] = ()) -> None:
    """Make diffusers treat a model as quantized: no cast, `quantization_config` in its config.

    Args:
        model: the model with its SDNQ layers in place.
        dtype: the model's compute dtype.
        compute: how it computes.
        full_precision: names of the layers that never multiply in low precision.
    """
    held = {name: _arguments(layer.sdnq_dequantizer) for name, layer in sdnq_layers(model).items()}
    every = list(held.values())
    config = part().SDNQConfig(
        **max(every, key=every.count),
        dequantize_fp32=compute.dequantize_fp32,
        add_skip_keys=False,
        modules_to_not_convert=_plain_weights(model),
        modules_to_not_use_matmul=[f"{name}.weight" for name in full_precision],
        modules_quant_config={f".{name}.": arguments for name, arguments in held.items()},
    )
    _mark(model, config, dtype)


def _plain_weights(model: torch.nn.Module) -> list[str]:
    """Weights that are not quantized; SDNQ takes every other Linear of a saved model for a quantized one."""
    layers = sdnq_layers(model)
    return [
        f"{name}.weight" for name, module in model.named_modules() if name not in layers and hasattr(module, "weight")
    ]


def _mark(model: ModelMixin, config: Any, dtype: torch.dtype) -> None:
    quantizer = part().SDNQQuantizer(config, pre_quantized=True)
    quantizer.torch_dtype = dtype
    told: Any = model
    told.quantization_config, told.hf_quantizer = config, quantizer
    told.quantization_method, told.is_quantized = part().QuantizationMethod.SDNQ, True
    rotated = [name for name, layer in sdnq_layers(model).items() if hasattr(layer.sdnq_dequantizer, "rotates_in_fp32")]
    section = {"dtype": str(dtype).removeprefix("torch."), "fp32_rotation": rotated}
    told.register_to_config(quantization_config={**config.to_dict(), SECTION: section})


def _arguments(dequantizer: Any) -> dict[str, Any]:
    """What SDNQ must be told of a layer to make room for its tensors when it loads a saved model."""
    told = (
        "weights_dtype", "scale_dtype", "group_size", "use_hadamard", "hadamard_group_size", "use_codebook",
        "use_quantized_matmul", "quantized_matmul_dtype",
    )  # fmt: skip
    return {name: getattr(dequantizer, name) for name in told if hasattr(dequantizer, name)}


def _dequantizer(codes: Codes, shape: torch.Size, dtype: torch.dtype, compute: Compute) -> Any:
    form = codes.form
    matmul = form.matmul_dtype if compute.quantized_matmul in ("", "auto") else compute.quantized_matmul
    grouped = form.group_size > 0
    cls = _fp32_rotation_class() if form.fp32_rotation else part("dequantizer").SDNQDequantizer
    columns = shape[1]
    unpacked = torch.Size((shape[0], columns // form.group_size, form.group_size)) if grouped else shape
    arguments: dict[str, Any] = {
        "result_dtype": dtype,
        "result_shape": shape if grouped else None,
        "original_shape": shape,
        "original_stride": [columns, 1],
        "quantized_weight_shape": unpacked,
        "quantized_scale_shape": codes.scale.shape,
        "quantized_zero_point_shape": None if codes.zero_point is None else codes.zero_point.shape,
        "weights_dtype": form.weights_dtype,
        "scale_dtype": form.scale_dtype,
        "quantized_matmul_dtype": matmul,
        "hadamard_group_size": form.hadamard or 256,
        "group_size": form.group_size,
        "svd_rank": 32,
        "svd_steps": 8,
        "use_quantized_matmul": _multiplies_quantized(compute, shape, matmul),
        "re_quantize_for_matmul": grouped
        or form.codebook
        or form.scale_dtype is not None
        or _differs(form.weights_dtype, matmul),
        "use_stochastic_rounding": False,
        "use_hadamard": bool(form.hadamard),
        "use_codebook": form.codebook,
        "layer_class_name": "Linear",
    }
    known = inspect.signature(cls).parameters  # older SDNQ knows fewer, and what it does not know is not used
    return cls(**{key: value for key, value in arguments.items() if key in known})


def _multiplies_quantized(compute: Compute, shape: Sequence[int], matmul_dtype: str) -> bool:
    """Whether a layer's matmul is quantized: wanted, of a shape that SDNQ can, in a dtype that the GPU can."""
    possible = part("kernel_wrappers").is_fp8_mm_supported or matmul_dtype != "float8_e4m3fn"
    return possible and part("utils").check_quantized_matmul_is_allowed(bool(compute.quantized_matmul), *shape)


def _differs(weights_dtype: str, matmul_dtype: str) -> bool:
    """Whether codes must be made anew for the matmul, by SDNQ's own rule."""
    dtypes = part("common").dtype_dict
    weights, matmul = dtypes[weights_dtype], dtypes[matmul_dtype]
    return bool(
        weights["num_bits"] > matmul["num_bits"]
        or weights["is_integer"] != matmul["is_integer"]
        or (weights["is_unsigned"] and not matmul["is_integer"])
    )


def _fp32_rotation_class() -> type:
    from transplant.sdnq_fp32_rotation import Fp32RotationDequantizer

    return Fp32RotationDequantizer


def _scale_input(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: AWQ-style scales multiply the input in its own dtype."""
    first, *rest = inputs
    return (first * layer.pre_quant_scale.to(first.dtype), *rest)


class InFlight:
    """SDNQ's own quantization, one weight at a time, for one network."""

    def __init__(self, network: ModelMixin, wanted: QuantizeOnLoad, dtype: torch.dtype, compute: Compute) -> None:
        """Raises OptionError where SDNQ does not know a dtype or a pattern."""
        check_names(wanted, Keys(), compute.compiled)
        self._dtype = dtype
        config = part().SDNQConfig(
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
        self._config: Any = part("utils").add_module_skip_keys(network, config)[1]

    def takes(self, name: str, module: torch.nn.Module) -> bool:
        """Whether SDNQ quantizes this weight: a Linear, large enough, on no skip list."""
        if type(module) is not torch.nn.Linear or not name.endswith(".weight"):
            return False
        listed = part("utils").check_param_name_in(name, self._config.modules_to_not_convert)
        return listed is None and part("utils").check_quant_is_allowed("Linear", module.weight, self._config)

    def planned(self, name: str, module: torch.nn.Module, device: torch.device) -> tuple[Form, int, int]:
        """How a weight will be held, in how many bytes, and bytes beside it meanwhile. Computed on meta tensors."""
        dequantizer, tensors = _meta_layer(name, module, self._config, self._dtype)
        nbytes = sum(tensor.nbytes for tensor in tensors.values() if tensor is not None)
        arguments = _weight_arguments(name, module, self._config, self._dtype)
        transient = 3 * 4 * values_at_once(dequantizer.original_shape, device, arguments)
        return Form(dequantizer.weights_dtype, dequantizer.group_size, holder=IN_FLIGHT), nbytes, transient

    def layer(self, name: str, module: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
        """The quantized layer in the place of a Linear, from its float weight: what sdnq_quantize_layer makes of it."""
        arguments = _weight_arguments(name, module, self._config, self._dtype)
        dequantizer, tensors = quantize_weight(weight, arguments)
        if arguments["use_quantized_matmul"] and not dequantizer.use_quantized_matmul:
            excluded = self._config.modules_to_not_use_matmul
            if part("utils").check_param_name_in(name, excluded) is None:
                excluded.append(name)
        return _assembled(module, dequantizer, tensors)

    def finish(self, model: ModelMixin) -> None:
        """Make diffusers treat the model as quantized."""
        self._config.modules_to_not_convert = sorted({*self._config.modules_to_not_convert, *_plain_weights(model)})
        _mark(model, self._config, self._dtype)


class SavedLayers:
    """Layers as SDNQ saves them, one at a time, for one network.

    SDNQ's and diffusers' own loading casts scales to the compute dtype, forgets a config's `scale_dtype`, has no
    scale of scales a row, and no rotation in fp32. Here the saved tensors are taken as they are.
    """

    def __init__(self, settings: Mapping[str, Any], dtype: torch.dtype, compute: Compute, device: torch.device) -> None:
        """Raises FormatError where the settings, a model's `quantization_config`, are not SDNQ's."""
        choose_compilation(compute.compiled)
        section: Mapping[str, Any] = settings.get(SECTION) or {}
        self._rotated = frozenset(cast("Sequence[str]", section.get("fp32_rotation", ())))
        self._dtype, self._compute, self._portable = dtype, compute, portable_on(compute, device)
        try:
            self._config: Any = part().SDNQConfig(**{key: value for key, value in settings.items() if key != SECTION})
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"its quantization_config cannot be used: {error}") from error

    def is_held(self, name: str, tensors: Mapping[str, Any]) -> bool:
        """Whether a module is quantized."""
        return "scale" in tensors

    def layer(self, name: str, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The layer in the place of a Linear.

        Args:
            name: its name in the model.
            module: the Linear; its bias is kept.
            tensors: what was saved for it, by attribute.

        Raises:
            FormatError: the tensors are not those that the config asks for.
        """
        dequantizer, expected = _meta_layer(f"{name}.weight", module, self._config, self._dtype)
        held = {key: tensor for key, tensor in tensors.items() if key in _STATE}
        held = _multiplied_out(held) if self._portable.plain else held
        _check_saved(held, {key: tensor for key, tensor in expected.items() if tensor is not None})
        if name in self._rotated:
            dequantizer.__class__ = _fp32_rotation_class()
        self._choose_matmul(f"{name}.weight", dequantizer, held)
        held = _portable(dequantizer, held, self._portable)
        if is_transposed(dequantizer):
            held["weight"] = prepared_for_matmul(held["weight"], dequantizer.quantized_matmul_dtype)
        if "svd_up" in held:
            held["svd_up"], held["svd_down"] = part("quant_utils").prepare_svd_for_matmul(
                held["svd_up"], held["svd_down"], dequantizer.use_quantized_matmul
            )
        return _assembled(module, dequantizer, held, tensors.get(INPUT_SCALE))

    def _choose_matmul(self, param_name: str, dequantizer: Any, held: dict[str, torch.Tensor]) -> None:
        """Let a layer multiply as is wanted now, whatever was wanted when it was saved."""
        listed = part("utils").check_param_name_in(param_name, self._config.modules_to_not_use_matmul)
        compute = replace(self._compute, quantized_matmul="") if listed else self._compute
        matmul = dequantizer.quantized_matmul_dtype
        matmul = matmul if compute.quantized_matmul in ("", "auto") else compute.quantized_matmul
        wanted = _multiplies_quantized(compute, dequantizer.original_shape, matmul)
        was_transposed = is_transposed(dequantizer)
        if matmul != dequantizer.quantized_matmul_dtype and _differs(dequantizer.weights_dtype, matmul):
            dequantizer.re_quantize_for_matmul = True
        if wanted != dequantizer.use_quantized_matmul:
            held.update({key: held[key].t() for key in ("svd_up", "svd_down") if key in held})
        dequantizer.quantized_matmul_dtype, dequantizer.use_quantized_matmul = matmul, wanted
        if is_transposed(dequantizer) != was_transposed:
            held.update({key: held[key].t().contiguous() for key in ("weight", "scale", "zero_point") if key in held})

    def finish(self, model: ModelMixin) -> None:
        """Make diffusers treat the model as quantized, and let its layers multiply as is wanted now."""
        config, layers = self._config, sdnq_layers(model)
        config.use_quantized_matmul = bool(self._compute.quantized_matmul)
        config.modules_quant_config = {
            **config.modules_quant_config,
            **{f".{name}.": _arguments(layer.sdnq_dequantizer) for name, layer in layers.items()},
        }
        _mark(model, config, self._dtype)


def _meta_layer(
    param_name: str, module: torch.nn.Module, config: Any, dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """The dequantizer of a Linear's weight and the tensors beside it, on meta: what SDNQ makes of it by a config."""
    linear = cast("torch.nn.Linear", module)
    return on_meta((linear.out_features, linear.in_features), _weight_arguments(param_name, module, config, dtype))


def _weight_arguments(param_name: str, module: torch.nn.Module, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """How SDNQ quantizes one weight by a config."""
    arguments = part("utils").get_quant_kwargs(module, config, torch_dtype=dtype, param_name=param_name)
    for key in ("return_device", "quantization_device", "non_blocking", "use_dynamic_quantization"):
        arguments.pop(key)
    return arguments


def _check_saved(held: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Every tensor is there, of the shape and codes that the config says; SVD has none on meta."""
    missing = [key for key in expected if key not in held]
    unused = [key for key in held if key not in expected and not key.startswith("svd_")]
    if missing or unused:
        what = f"lacks its {', '.join(missing)}" if missing else f"has no use for its {', '.join(unused)}"
        raise FormatError(f"by the folder's quantization_config it {what}")
    for key, tensor in expected.items():
        found = held[key]
        a_row = key == "scale_2" and tuple(found.shape) == (len(expected["scale"]), 1, 1)
        if (found.shape != tensor.shape and not a_row) or (key == "weight" and found.dtype != tensor.dtype):
            raise FormatError(
                f"its {key} is {list(found.shape)} in {found.dtype}, by the folder's quantization_config it is "
                f"{list(tensor.shape)} in {tensor.dtype}"
            )


def _multiplied_out(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Saved tensors for an SDNQ without scales of scales and tables. Raises FormatError where there is a table."""
    held = dict(tensors)
    if held["scale"].dtype == torch.int8:
        raise FormatError("it holds a table of values, which this host's SDNQ is too old for")
    if "scale_2" in held:
        held["scale"] = held["scale"].to(torch.float32) * held.pop("scale_2").to(torch.float32)
    return held


def _portable(dequantizer: Any, tensors: Mapping[str, torch.Tensor], portable: Portable) -> dict[str, torch.Tensor]:
    """Saved tensors in the form that the device can compute with."""
    held = dict(tensors)
    if portable.scales and "scale_2" in held and dequantizer.scale_dtype == "float8_e8m0fnu":
        dequantizer.scale_dtype = None
        held["scale"] = held["scale"].to(torch.bfloat16) * held.pop("scale_2").to(torch.bfloat16)
    elif portable.codes and dequantizer.weights_dtype == "float8_e4m3fn":
        dequantizer.weights_dtype = "float8_e4m3fn_sdnq"
        dequantizer.is_packed = True
        held["weight"] = held["weight"].view(torch.uint8)
    return held
