"""FP8 storage beside what else is done to a model: offloading of every kind, compilation, casts.

All on the CPU, where every hook runs as it does with a GPU but for the device it moves to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from diffusers import ZImageTransformer2DModel

from test_fp8_storage import layers_at_rest
from test_quantized_files import run
from tiny_models import random_z_image, tiny_z_image_config
from transplant import fp8_storage
from transplant.errors import TransplantError
from transplant.fp8_storage import store_in_fp8, triton_reads_e4m3

CONFIG = tiny_z_image_config(n_layers=2, n_refiner_layers=1)
CAPTION = CONFIG["cap_feat_dim"]
OF_Z_IMAGE = ("t_embedder", "cap_embedder")
CPU = torch.device("cpu")
Model = ZImageTransformer2DModel


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")


def plain() -> Model:
    return random_z_image(CONFIG, seed=5, dtype=torch.bfloat16).eval()


def resting() -> Model:
    model = plain()
    store_in_fp8(model, OF_Z_IMAGE, "x")
    return model


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return run(resting(), CAPTION)


def whole(model: Model, _: Path) -> None:
    accelerate.cpu_offload_with_hook(model, execution_device=CPU)


def sequential(model: Model, _: Path) -> None:
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)


def on_disk(model: Model, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder), execution_device=CPU)


def grouped(**options: object) -> Callable[[Model, Path], None]:
    return lambda model, _: model.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)  # pyright: ignore


def groups_on_disk(model: Model, folder: Path) -> None:
    grouped(offload_type="leaf_level", offload_to_disk_path=str(folder))(model, folder)


OFFLOADING = {
    "whole model": whole,
    "sequential": sequential,
    "disk": on_disk,
    "groups of layers": grouped(offload_type="leaf_level"),
    "groups of blocks": grouped(offload_type="block_level", num_blocks_per_group=1),
    "groups on disk": groups_on_disk,
}


@pytest.mark.parametrize("kind", OFFLOADING)
def test_offloading_after_it(kind: str, expected: torch.Tensor, tmp_path: Path) -> None:
    """The same output, twice over, and weights that are still fp8 while they rest."""
    model = resting()
    layers = layers_at_rest(model)
    OFFLOADING[kind](model, tmp_path)
    assert torch.equal(run(model, CAPTION), expected)
    assert torch.equal(run(model, CAPTION), expected)
    assert layers_at_rest(model) == layers


@pytest.mark.parametrize("kind", OFFLOADING)
def test_offloading_before_it(kind: str, expected: torch.Tensor, tmp_path: Path) -> None:
    """Where offloading keeps weights of its own it is refused, with nothing changed; else it is the same."""
    model = plain()
    before = run(model, CAPTION)
    OFFLOADING[kind](model, tmp_path)
    if kind == "whole model":
        store_in_fp8(model, OF_Z_IMAGE, "x")
        assert torch.equal(run(model, CAPTION), expected)
        return
    with pytest.raises(TransplantError, match="x: its weights are offloaded already; switch FP8 storage on before"):
        store_in_fp8(model, OF_Z_IMAGE, "x")
    assert not layers_at_rest(model)
    assert torch.equal(run(model, CAPTION), before)


def test_offloading_is_taken_off_again(expected: torch.Tensor) -> None:
    model = resting()
    layers = layers_at_rest(model)
    sequential(model, Path())
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(run(model, CAPTION), expected)
    assert layers_at_rest(model) == layers


@pytest.mark.parametrize("capable", [True, False])
def test_compiled(capable: bool, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the cast is kept out of the compiled code, for GPUs whose Triton cannot read e4m3 (C09)."""
    monkeypatch.setattr(fp8_storage, "triton_reads_e4m3", lambda _: capable)
    fp8_storage._cast_for_here.cache_clear()
    torch.compiler.reset()
    try:
        model = resting()
        stored = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        model.layers[0].feed_forward.compile(backend="aot_eager")
        for _ in range(2):
            assert torch.equal(run(model, CAPTION), expected)
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == stored
    finally:
        fp8_storage._cast_for_here.cache_clear()
        torch.compiler.reset()


def test_what_triton_reads() -> None:
    assert triton_reads_e4m3([])
    assert triton_reads_e4m3([(8, 9), (9, 0), (12, 0)])
    assert not triton_reads_e4m3([(9, 0), (8, 6)])


def test_moved_in_the_compute_dtype(expected: torch.Tensor) -> None:
    """A host that casts the model to its own dtype gets that much memory, and the same output."""
    model = resting().to(torch.bfloat16)
    assert not layers_at_rest(model)
    assert torch.equal(run(model, CAPTION), expected)
