"""What FP8 storage says before and while it acts: in the core, in a session, and beside the control of the WebUI.

A17: a toggle that acts, or says why it does not. A18: a change of it, in every order and at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import ZImageTransformer2DModel

from kitchen import int8
from test_fp8_storage import layers_at_rest
from test_quantized_files import quantize
from test_standalone import DEMO_BASE, ME, Studio, pixels
from tiny_models import make_demo, random_z_image, save, tiny_z_image_config
from transplant.fp8_outlook import outlook, sizes_of
from transplant.fp8_storage import store_in_fp8
from transplant.hosts.base import LoadSettings, PlainHost
from transplant.hosts.standalone.models import BASE
from transplant.pipeline import Session
from transplant.request import make_request
from transplant.sdnq_bridge import Compute
from transplant.slots import Override

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OF_Z_IMAGE = ("t_embedder", "cap_embedder")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, and its transformer once more in int8."""
    out = tmp_path_factory.mktemp("models")
    make_demo.make_demo(out)
    network = random_z_image(tiny_z_image_config(), 3, torch.float32)
    save(out / "UNET" / "int8.safetensors", quantize(network.state_dict(), int8)[0])
    return out


def session_of(models: Path, fp8_storage: bool = False, dtype: torch.dtype = torch.bfloat16) -> Session:
    session = Session(PlainHost(LoadSettings(CPU, dtype, True, Compute(fp8_storage=fp8_storage))))
    session.load_base(models / make_demo.BASE)
    return session


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_prediction_is_what_it_becomes() -> None:
    model = random_z_image(tiny_z_image_config(), 3, torch.bfloat16)
    before, after = sizes_of(model, OF_Z_IMAGE)
    assert before == parameter_bytes(model)
    store_in_fp8(model, OF_Z_IMAGE, "x")
    assert parameter_bytes(model) == after
    assert sizes_of(model, OF_Z_IMAGE) == (before, after)


def test_real_sizes_in_the_sentence() -> None:
    with init_empty_weights():
        model = ZImageTransformer2DModel().to(torch.bfloat16)
    told = outlook({"transformer": model}, {"transformer": OF_Z_IMAGE}, CUDA)
    assert (told.state, told.text) == ("acts", "11740 MB → 5880 MB.")
    told = outlook({"transformer": model}, {"transformer": OF_Z_IMAGE}, CUDA, wanted=True)
    assert told.text == "5880 MB instead of 11740 MB."


def test_reasons_to_do_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(models)
    told = session.fp8_outlook()
    assert told.state == "no device"
    assert "needs CUDA or XPU, the models run on cpu" in told.text
    assert not told.possible
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")
    assert session.fp8_outlook().state == "acts"
    session.choose(Override("int8", models / "UNET" / "int8.safetensors"))
    told = session.fp8_outlook()
    assert (told.state, told.possible) == ("quantized", True)
    assert "already quantized" in told.text
    session.unload()
    assert session.fp8_outlook().state == "nothing loaded"


def test_one_of_two_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (random_z_image(tiny_z_image_config(), seed, torch.bfloat16) for seed in (1, 2))
    second.is_quantized = True
    told = outlook({"transformer": first, "transformer_2": second}, {}, CUDA)
    assert told.state == "acts"
    assert told.before == parameter_bytes(first)
    assert "transformer_2 is already quantized and stays as it is" in told.text


# The standalone host


@pytest.fixture
def studio(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")
    studio = Studio(models, tmp_path, **{BASE: DEMO_BASE, "cuda_dtype": "bf16"})
    studio.settle()
    yield studio
    studio.close()


def transformer(studio: Studio) -> torch.nn.Module:
    session = studio.worker.models.session()
    assert session is not None and session.transformer is not None
    return session.transformer


def weights(studio: Studio) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in transformer(studio).named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(
        a.dtype == other[name].dtype and torch.equal(a.view(torch.uint8), other[name].view(torch.uint8))
        for name, a in one.items()
    )


@pytest.mark.parametrize("unet", ["Default", "demo-comfyui-bf16"])
def test_on_off_and_on_again(studio: Studio, unet: str) -> None:
    """Off is a reload, bit for bit; the next picture after a change uses it, for the base's own and for a file."""
    studio.set(sd_unet=unet)
    plain, picture = weights(studio), pixels(studio.draw())
    note = studio.worker.notes["fp8_storage"]
    assert note.enabled and "→" in note.text
    studio.set(fp8_storage=True)
    resting, changed = weights(studio), pixels(studio.draw())
    assert layers_at_rest(transformer(studio))
    assert changed != picture
    assert "instead of" in studio.worker.notes["fp8_storage"].text
    loaded = transformer(studio)
    assert studio.worker.set_options(ME, {"fp8_storage": True}) == []
    assert transformer(studio) is loaded
    studio.set(fp8_storage=False)
    assert same(plain, weights(studio))
    assert pixels(studio.draw()) == picture
    studio.set(fp8_storage=True)
    assert same(resting, weights(studio))
    assert pixels(studio.draw()) == changed


def test_a_change_during_a_picture_applies_after_it(studio: Studio) -> None:
    expected = pixels(studio.draw(seed=5))
    job = studio.worker.generate(ME, make_request("a cat", "", 60, 1, 64, 64, 5, 1))
    while "Step" not in (job.text or ""):
        assert not job.is_over
    during = transformer(studio)
    studio.worker.set_options(ME, {"fp8_storage": True})
    later = studio.worker.generate(ME, make_request("a cat", "", 2, 1, 64, 64, 5, 1))
    assert not job.is_over and not layers_at_rest(during)
    assert job.wait(60) and job.status == "finished"
    assert later.wait(60) and later.status == "finished"
    assert layers_at_rest(transformer(studio))
    assert pixels(later) != expected


def test_note_without_a_gpu(models: Path, tmp_path: Path) -> None:
    studio = Studio(models, tmp_path, **{BASE: DEMO_BASE})
    try:
        studio.settle()
        note = studio.worker.notes["fp8_storage"]
        assert not note.enabled
        assert "needs CUDA or XPU" in note.text
    finally:
        studio.close()
