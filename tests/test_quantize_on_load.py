"""Float files quantized by SDNQ while they load, against diffusers' own loading with an SDNQConfig."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from sdnq import SDNQConfig, quantizer
from sdnq.common import accepted_weight_dtypes
from sdnq.quantizer import sdnq_quantize_layer_weight

from kitchen import int8
from test_plan import base_folder
from test_quantized_files import quantize, run
from tiny_models import random_z_image, save, tiny_z_image_config, to_comfyui
from transplant import sdnq_rows
from transplant.build import build
from transplant.errors import OptionError
from transplant.hosts.base import compute_from
from transplant.options import OPTIONS
from transplant.plan import plan
from transplant.sdnq_bridge import Compute, InFlight, QuantizeOnLoad
from transplant.skeleton import shapes_only

CONFIG = tiny_z_image_config(dim=192, n_layers=2)
WANTED = {
    "int8": QuantizeOnLoad("int8"),
    "uint4": QuantizeOnLoad("uint4"),
    "float8_e4m3fn": QuantizeOnLoad("float8_e4m3fn"),
    "int8, a row": QuantizeOnLoad("int8", group_size=-1),
    "uint4, rotated": QuantizeOnLoad("uint4", use_hadamard=True),
    "some left out": QuantizeOnLoad("int8", modules_to_not_convert=("layers.0.attention.to_q", "feed_forward")),
    "some in uint4": QuantizeOnLoad("int8", modules_dtype_dict=(("uint4", ("layers.1.*",)),)),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder whose transformer has weights, for diffusers."""
    folder = base_folder(tmp_path_factory.mktemp("base"), CONFIG)
    network().save_pretrained(folder / "transformer")
    return folder


def network() -> ZImageTransformer2DModel:
    return random_z_image(CONFIG, seed=5, dtype=torch.bfloat16).eval()


def by_diffusers(base: Path, wanted: QuantizeOnLoad) -> ZImageTransformer2DModel:
    config = SDNQConfig(
        weights_dtype=wanted.weights_dtype, group_size=wanted.group_size, use_hadamard=wanted.use_hadamard,
        modules_to_not_convert=list(wanted.modules_to_not_convert),
        modules_dtype_dict={key: list(names) for key, names in wanted.modules_dtype_dict},
    )  # fmt: skip
    return ZImageTransformer2DModel.from_pretrained(
        base / "transformer", dtype=torch.bfloat16, quantization_config=config
    )


@pytest.mark.parametrize("name", WANTED)
def test_equals_diffusers(name: str, base: Path, tmp_path: Path) -> None:
    """The same layers, the same codes and scales, and a plan that says so before."""
    wanted = WANTED[name]
    file = save(tmp_path / "x.safetensors", to_comfyui(network().state_dict()))
    planned = plan(file, base, dtype=torch.bfloat16, compute=Compute(quantize=wanted))
    model = build(planned).transformer
    expected = by_diffusers(base, wanted).state_dict()
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert loaded[key].dtype == tensor.dtype, key
        assert torch.equal(loaded[key].view(torch.uint8), tensor.view(torch.uint8)), key
    held = sum(tensor.nbytes for tensor in loaded.values())
    assert abs(held - planned.resident_bytes) <= 0.01 * held
    assert any(target.form for target in planned.targets)
    assert model.dtype == torch.bfloat16
    assert run(model, CONFIG["cap_feat_dim"]).isfinite().all()
    with pytest.raises(ValueError, match="quantized"):
        model.to(torch.float16)


def test_already_quantized_files_stay_as_they_are(base: Path, tmp_path: Path) -> None:
    """It changes nothing, and says so."""
    stored, _ = quantize(random_z_image(CONFIG, 5, torch.float32).state_dict(), int8)
    file = save(tmp_path / "x.safetensors", stored)
    planned = plan(file, base, dtype=torch.bfloat16, compute=Compute(quantize=QuantizeOnLoad("uint4")))
    assert any("changes nothing" in warning for warning in planned.warnings)
    assert {target.form.weights_dtype for target in planned.targets if target.form} == {"int8"}


def test_unknown_dtype(base: Path, tmp_path: Path) -> None:
    file = save(tmp_path / "x.safetensors", to_comfyui(network().state_dict()))
    with pytest.raises(OptionError, match="int99"):
        plan(file, base, compute=Compute(quantize=QuantizeOnLoad("int99")))
    with pytest.raises(OptionError, match=r"^modules_dtype_dict: SDNQ has no 'int99'"):
        wanted = QuantizeOnLoad("int8", modules_dtype_dict=(("int99", ("w2",)),))
        plan(file, base, compute=Compute(quantize=wanted))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sdnq_quantize_weights_mode", "int99"), ("sdnq_modules_dtype_dict", '{"int99": ["w2"]}'),
        ("sdnq_modules_to_not_convert", "(*"),
    ],
)  # fmt: skip
def test_what_a_hand_wrote_into_the_settings_is_told_with_its_option(key: str, value: str) -> None:
    values = {known.key: known.default for known in OPTIONS} | {"sdnq_quantize_weights_mode": "int8"}
    assert compute_from(values.__getitem__).quantize == QuantizeOnLoad("int8")
    with pytest.raises(OptionError, match=f"^{key}: "):
        compute_from({**values, key: value}.__getitem__)


FEW = ("int8", "uint8", "uint4", "int3", "float8_e4m3fn")
EVERY_WIDTH = sorted(
    {f"{sign}int{bits}" for bits in range(1, 17) for sign in ("", "u")} & accepted_weight_dtypes
    | {"float16", "float8_e4m3fn", "float8_e5m2", "float6_e3m2fn", "float5_e2m2fn", "float4_e2m1fn", "float3_e1m1fn"}
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as SDNQ chooses": {},
    "a row": {"group_size": -1},
    "one scale": {"group_size": -2},
    "groups of 16": {"group_size": 16},
    "scales in bf16": {"dequantize_fp32": False},
    "quantized matmul": {"use_quantized_matmul": True},
    "quantized matmul in fp8, scales in bf16": {
        "use_quantized_matmul": True, "quantized_matmul_dtype": "float8_e4m3fn", "dequantize_fp32": False,
    },
    "groups for a quantized matmul": {"use_quantized_matmul": True, "group_size": 48},
    "rotated": {"use_hadamard": True},
    "scales of scales": {"scale_dtype": "float8_e4m3fn", "group_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", [(80, 96), (33, 320)], ids=str)
def test_some_rows_at_a_time_are_the_whole(
    shape: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of every width: the bytes, shapes and strides of SDNQ's own call for the whole weight."""
    monkeypatch.setattr(sdnq_rows, "AT_ONCE", 8 * shape[1])
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.05).bfloat16()
    cut = 0
    for dtype in FEW if options else EVERY_WIDTH:
        arguments = {"layer_class_name": "Linear", "weights_dtype": dtype, "torch_dtype": torch.bfloat16, **options}
        expected_dequantizer, expected = sdnq_quantize_layer_weight(weight.float(), **arguments)
        dequantizer, tensors = sdnq_rows.quantize_weight(weight, arguments)
        cut += sdnq_rows.values_at_once(shape, weight.device, arguments) < weight.numel()
        assert vars(dequantizer) == vars(expected_dequantizer), dtype
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            if tensor is None:
                assert tensors[key] is None, (dtype, key)
                continue
            found = tensors[key]
            assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype), dtype
            assert torch.equal(as_bytes(found), as_bytes(tensor)), (dtype, key)
    assert bool(cut) == (set(options) - {"use_hadamard", "scale_dtype"} == set(options) and -2 not in options.values())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def quantized_on_load(
    weight: torch.Tensor,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    own: Callable[..., Any] = sdnq_quantize_layer_weight,
) -> tuple[dict[str, torch.Tensor], list[torch.Size]]:
    """The tensors of a weight, 8 rows at a time, and the shapes that SDNQ's own function was called for."""
    asked: list[torch.Size] = []

    def watched(part: torch.Tensor, **arguments: Any) -> Any:
        asked.append(part.shape)
        return own(part, **arguments)

    monkeypatch.setattr(sdnq_rows, "AT_ONCE", 8 * weight.shape[1])
    monkeypatch.setattr(quantizer, "sdnq_quantize_layer_weight", watched)
    arguments = {"layer_class_name": "Linear", "weights_dtype": dtype, "torch_dtype": torch.bfloat16}
    _, tensors = sdnq_rows.quantize_weight(weight, arguments)
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}, asked


def is_same(found: dict[str, torch.Tensor], weight: torch.Tensor, dtype: str) -> bool:
    _, expected = sdnq_quantize_layer_weight(weight.float(), "Linear", dtype, torch_dtype=torch.bfloat16)
    return all(torch.equal(as_bytes(tensor), as_bytes(expected[key])) for key, tensor in found.items())


@pytest.mark.parametrize("dtype", EVERY_WIDTH)
def test_sdnqs_own_function_is_asked_for_one_part(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the shapes; of no part does it make anything else. It makes all of what is in one bit."""
    weight = torch.randn((128, 320), generator=torch.Generator().manual_seed(3)).bfloat16()
    found, asked = quantized_on_load(weight, dtype, monkeypatch)
    assert asked == [weight.shape, *[torch.Size((8, 320))] * (16 if dtype in ("int1", "uint1") else 1)]
    assert is_same(found, weight, dtype)


@pytest.mark.parametrize("dtype", FEW)
def test_rows_without_a_usual_scale_are_left_to_sdnq(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros of both signs, one value throughout, infinity: the bytes of SDNQ's own call."""
    weight = torch.randn((128, 320), generator=torch.Generator().manual_seed(4)).bfloat16()
    weight[3] = 0.0
    weight[17, ::2], weight[17, 1::2] = 0.0, -0.0
    weight[33].abs_()[::7] = -0.0
    weight[50] = 0.25
    weight[70] = 1e-40
    weight[90, 5] = torch.inf
    found, asked = quantized_on_load(weight, dtype, monkeypatch)
    assert is_same(found, weight, dtype)
    assert 1 < asked.count(torch.Size((8, 320))) < 8


@pytest.mark.parametrize("dtype", ["int8", "uint4"])
def test_an_sdnq_of_other_arithmetic_is_asked_for_all(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part that is not its bytes is enough."""
    weight = torch.randn((128, 320), generator=torch.Generator().manual_seed(5)).bfloat16()

    def other(part: torch.Tensor, **arguments: Any) -> Any:
        return sdnq_quantize_layer_weight(part * 1.01, **arguments)

    found, asked = quantized_on_load(weight, dtype, monkeypatch, other)
    assert asked.count(torch.Size((8, 320))) == 1 + 16
    assert is_same(found, weight.float() * 1.01, dtype)
    assert not is_same(found, weight, dtype)


def test_the_plan_knows_that_only_some_rows_are_in_fp32(base: Path, tmp_path: Path) -> None:
    """Of a weight of 59 MB in fp32, 68 rows, thrice; of one whose rows are rotated together, all."""
    network = shapes_only(ZImageTransformer2DModel, {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "n_layers": 1})
    module = network.layers[0].attention.to_out[0]
    told = {}
    for wanted in (QuantizeOnLoad("int8"), QuantizeOnLoad("int8", use_hadamard=True)):
        in_flight = InFlight(network, wanted, torch.bfloat16, Compute())
        told[wanted.use_hadamard] = in_flight.planned("layers.0.attention.to_out.0.weight", module, torch.device("cpu"))
    assert told[False][2] == 12 * 68 * 3840
    assert told[True][2] == 12 * 3840 * 3840
