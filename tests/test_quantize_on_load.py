"""Float files quantized by SDNQ while they load, against diffusers' own loading with an SDNQConfig."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from sdnq import SDNQConfig

from kitchen import int8
from test_plan import base_folder
from test_quantized_files import quantize, run
from tiny_models import random_z_image, save, tiny_z_image_config, to_comfyui
from transplant.build import build
from transplant.errors import OptionError
from transplant.plan import plan
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

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
