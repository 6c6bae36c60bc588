"""FP8 storage against diffusers' own layerwise casting, and the figures of the reports that started it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import (
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN, apply_layerwise_casting

import transplant
from kitchen import int8
from test_plan import base_folder
from test_quantized_files import quantize, run
from tiny_models import manifest, random_z_image, save, tiny_z_image_config, to_comfyui
from transplant.build import build
from transplant.compute_dtype import compute_dtype
from transplant.fp8_storage import FP8, STORAGE, castable_layers, skip_patterns, store_in_fp8, support_on
from transplant.hosts.base import LoadSettings, PlainHost
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.sdnq_bridge import Compute
from transplant.slots import Override

OF_Z_IMAGE = ("t_embedder", "cap_embedder")
CONFIG = tiny_z_image_config(n_layers=2, n_refiner_layers=1)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the whole path without a GPU."""
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), CONFIG)


def network(dtype: torch.dtype = torch.bfloat16) -> ZImageTransformer2DModel:
    return random_z_image(CONFIG, seed=5, dtype=dtype).eval()


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    return save(folder / "x.safetensors", to_comfyui(network(dtype).state_dict()))


def layers_at_rest(model: torch.nn.Module) -> set[str]:
    return {n.rpartition(".")[0] for n, p in model.named_parameters() if p.dtype in FP8}


def test_layers_of_the_report() -> None:
    """37 Linears; without the class's patterns a forward fails, with them 34 rest in fp8 and it runs."""
    model = network()
    assert len(castable_layers(model, ())) == 37 - 1  # the embedder whose dtype is read is never among them
    assert sum(type(module) is torch.nn.Linear for module in model.modules()) == 37
    patterns = skip_patterns(type(model), ())
    assert len(castable_layers(model, patterns)) == 34
    assert store_in_fp8(model, (), "x") == 34
    assert run(model, CONFIG["cap_feat_dim"]).isfinite().all()
    naive = network()
    apply_layerwise_casting(naive, STORAGE, torch.bfloat16, skip_modules_pattern=DEFAULT_SKIP_MODULES_PATTERN)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        run(naive, CONFIG["cap_feat_dim"])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float16])
def test_equals_diffusers_layerwise_casting(stored: torch.dtype, base: Path, tmp_path: Path) -> None:
    """The same bytes at rest and the same output, bit for bit."""
    file = saved(tmp_path, stored)
    ours = transplant.load_transformer(file, base=base, dtype=torch.bfloat16, fp8_storage=True, use_mmap=False)
    theirs = network(stored).to(torch.bfloat16)
    theirs.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter.view(torch.uint8), expected[name].view(torch.uint8)), name
    assert torch.equal(run(ours, CONFIG["cap_feat_dim"]), run(theirs, CONFIG["cap_feat_dim"]))


def test_rest_is_the_same_tensor_after_every_forward(base: Path, tmp_path: Path) -> None:
    """The stored tensor is put back, not cast again; also after a forward that fails."""
    model = transplant.load_transformer(saved(tmp_path), base=base, dtype=torch.bfloat16, fp8_storage=True)
    before = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    run(model, CONFIG["cap_feat_dim"])
    with pytest.raises((RuntimeError, TypeError)):
        model.layers[0].feed_forward.w1(torch.zeros(3, 1, dtype=torch.bfloat16))
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before


def test_nothing_outside_weights_is_float8(base: Path, tmp_path: Path) -> None:
    """A08: whatever a consumer asks for a dtype, it hears the compute dtype; outputs and buffers too."""
    model = transplant.load_transformer(saved(tmp_path), base=base, dtype=torch.bfloat16, fp8_storage=True)
    assert model.dtype == compute_dtype(model) == torch.bfloat16
    assert all(buffer.dtype not in FP8 for buffer in model.buffers())
    seen: set[torch.dtype] = set()
    for module in model.modules():
        module.register_forward_hook(
            lambda _m, args, out: seen.update(t.dtype for t in (*args, out) if torch.is_tensor(t))
        )
    run(model, CONFIG["cap_feat_dim"])
    assert seen.isdisjoint(FP8)


def test_twice_is_once_and_off_is_a_reload(base: Path, tmp_path: Path) -> None:
    """A18."""
    file = saved(tmp_path)
    model = transplant.load_transformer(file, base=base, dtype=torch.bfloat16, fp8_storage=True)
    once = run(model, CONFIG["cap_feat_dim"])
    assert store_in_fp8(model, OF_Z_IMAGE, "again") == len(layers_at_rest(model))
    assert torch.equal(run(model, CONFIG["cap_feat_dim"]), once)
    plain = transplant.load_transformer(file, base=base, dtype=torch.bfloat16)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), network().parameters(), strict=True))


def test_planned_size_is_the_loaded_size(base: Path, tmp_path: Path) -> None:
    """Half of bf16, as predicted, cast tensor by tensor."""
    planned = plan(saved(tmp_path), base, dtype=torch.bfloat16, compute=Compute(fp8_storage=True))
    model = build(planned).transformer
    assert sum(p.nbytes for p in model.parameters()) == planned.resident_bytes
    largest = max(p.numel() for p in model.parameters())
    assert planned.peak_bytes <= planned.resident_bytes + 2 * largest


def test_quantized_files_are_left_as_they_are(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A19: one sentence, no change."""
    stored, _ = quantize(network(torch.float32).state_dict(), int8)
    file = save(tmp_path / "x.safetensors", stored)
    planned = plan(file, base, dtype=torch.bfloat16, compute=Compute(fp8_storage=True))
    assert any("already quantized" in warning for warning in planned.warnings)
    assert not layers_at_rest(build(planned).transformer)
    with caplog.at_level(logging.INFO, logger="transplant"):
        assert store_in_fp8(build(planned).transformer, OF_Z_IMAGE, "x") == 0
    assert "already quantized" in caplog.text


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_raw_fp8_files_are_kept_as_stored(stored: torch.dtype, base: Path, tmp_path: Path) -> None:
    """A15: an fp8 file without scales stays at its size, code for code."""
    state = {name: tensor.to(stored) for name, tensor in to_comfyui(network().state_dict()).items()}
    planned = plan(
        save(tmp_path / "x.safetensors", state), base, dtype=torch.bfloat16, compute=Compute(fp8_storage=True)
    )
    model = build(planned).transformer
    weight = model.layers[0].feed_forward.w1.weight
    assert weight.dtype == stored
    assert torch.equal(weight.view(torch.uint8), state["layers.0.feed_forward.w1.weight"].view(torch.uint8))
    assert run(model, CONFIG["cap_feat_dim"]).isfinite().all()


def test_values_beyond_fp8_stay(base: Path, tmp_path: Path) -> None:
    """448 is the largest; a larger weight would become NaN."""
    state = to_comfyui(network().state_dict())
    state["layers.0.feed_forward.w1.weight"][3, 4] = 500.0
    file = save(tmp_path / "x.safetensors", state)
    model = transplant.load_transformer(file, base=base, dtype=torch.bfloat16, fp8_storage=True)
    assert model.layers[0].feed_forward.w1.weight.dtype == torch.bfloat16
    assert model.layers[0].feed_forward.w2.weight.dtype == STORAGE
    assert run(model, CONFIG["cap_feat_dim"]).isfinite().all()


def test_cpu_without_the_variable(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A17: a toggle that cannot act says so."""
    monkeypatch.delenv("TRANSPLANT_FP8_ON_CPU")
    assert not support_on(torch.device("cpu")).possible
    assert support_on(torch.device("cuda")).possible
    planned = plan(saved(tmp_path), base, dtype=torch.bfloat16, compute=Compute(fp8_storage=True))
    assert any("needs CUDA or XPU" in warning for warning in planned.warnings)
    assert not layers_at_rest(build(planned).transformer)


def test_base_and_override_through_a_session(tmp_path: Path) -> None:
    """The option covers the base model's own transformer and files alike, and swaps keep it."""
    from tiny_models import make_demo

    make_demo.make_demo(tmp_path)
    settings = LoadSettings(torch.device("cpu"), torch.bfloat16, True, Compute(fp8_storage=True))
    session = Session(PlainHost(settings))
    session.load_base(tmp_path / make_demo.BASE)
    own = layers_at_rest(session.transformer)
    session.choose(Override("x", tmp_path / make_demo.COMFYUI))
    assert layers_at_rest(session.transformer) == own
    session.choose(None)
    assert layers_at_rest(session.transformer) == own
    assert own


def cast_by_patterns(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Linears and convolutions of which no part of the path matches: the reports counted these."""

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(re.search(p, ".".join(parts[: i + 1])) for p in patterns for i in range(len(parts)))

    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and not matches(name)]


FIGURES = [
    # class, config, parameters in millions that leave fp8 beyond diffusers' defaults
    (WanTransformer3DModel, manifest("wan22_t2v_a14b_high_noise_fp16").diffusers["config"], 232),
    (Krea2Transformer2DModel, manifest("krea2_raw_bf16").diffusers["config"], 39),
    (FluxTransformer2DModel, manifest("flux1_dev_bfl_bf16").diffusers["config"], 0),
    (QwenImageTransformer2DModel, manifest("qwen_image_bf16").diffusers["config"], 0),
]


@pytest.mark.parametrize(("cls", "config", "millions"), FIGURES, ids=lambda x: getattr(x, "__name__", ""))
def test_parameters_that_leave_fp8(cls: type, config: dict, millions: int) -> None:
    """The report's table, derived from the classes at their real configs."""
    with init_empty_weights():
        model = cls(**config)
    leaving = set(cast_by_patterns(model, DEFAULT_SKIP_MODULES_PATTERN)) - set(
        castable_layers(model, skip_patterns(cls, ()))
    )
    count = sum(p.numel() for layer in leaving for p in model.get_submodule(layer).parameters(recurse=False))
    assert round(count / 1e6) == millions or abs(count / 1e6 - millions) < 0.01 * millions


def test_size_of_z_image() -> None:
    """5880 MB at the real config, within one per cent."""
    with init_empty_weights():
        model = ZImageTransformer2DModel()
    cast = set(castable_layers(model, skip_patterns(type(model), OF_Z_IMAGE)))
    size = sum(p.numel() * (1 if n.rpartition(".")[0] in cast else 2) for n, p in model.named_parameters())
    assert abs(size / 2**20 - 5880) < 1
