"""The demo's files as other people's tools write them, through Transplant; and the training's conventions and loop."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

import assemble
import make_demo
import measure
import network
import published
import shapes
import tasks
import tiny_models
import train
import transplant

FORMATS = {"bf16": 0.0, "int8-convrot": 0.01, "fp8-bundle": 0.03, "nvfp4": 0.12, "gguf-q8_0": 0.006}
"""Largest root mean square error of a quantized weight, as a share of its own root mean square."""


def some_latents() -> network.Latents:
    return network.fit_latents(0, pictures=50)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    transformer = network.new_transformer(0)
    make_demo.fill(transformer, 3, torch.bfloat16)
    tokenizer = network.new_tokenizer()
    text_encoder = network.new_text_encoder(0, len(tokenizer)).to(torch.bfloat16)
    return network.pipeline(transformer, text_encoder, network.new_vae(some_latents()).to(torch.bfloat16), tokenizer)


@pytest.fixture(scope="module")
def base(pipeline: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    pipeline.save_pretrained(folder)
    return folder


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The Linears' weights as numbers: what they do to the unit vectors."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "in_features"):
            unit = torch.eye(layer.in_features)
            bias = getattr(layer, "bias", None)
            found[name] = (layer(unit) - (0 if bias is None else bias.float())).T
    return found


def relative_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((value - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("name", published.WRITERS)
def test_every_kind_of_file_loads_and_is_near(name: str, pipeline: Any, base: Path, tmp_path: Path) -> None:
    tensors = make_demo.to_comfyui(pipeline.transformer.state_dict())
    file = published.WRITERS[name](tmp_path / name, tensors, {"vae.x": torch.zeros(1)})
    with torch.no_grad():
        loaded = weights(transplant.load_transformer(file, base=base, dtype=torch.float32))
    wanted = {key: value.float() for key, value in pipeline.transformer.state_dict().items()}
    assert len(loaded) > 40
    worst = max(relative_error(value, wanted[f"{key}.weight"]) for key, value in loaded.items())
    assert worst <= max(FORMATS[name], 1e-5)
    assert worst > 0.2 * FORMATS[name] or name == "bf16"


def test_int8_files_quantize_what_the_real_one_does(pipeline: Any, tmp_path: Path) -> None:
    tensors = make_demo.to_comfyui(pipeline.transformer.state_dict())
    file = published.WRITERS["int8-convrot"](tmp_path / "x", tensors, {})

    def patterns(names: Any) -> set[str]:
        return {re.sub(r"(layers|refiner)\.\d+\.", r"\1.N.", name) for name in names}

    real = tiny_models.manifest("z_image_turbo_comfy_int8_convrot").tensors
    assert patterns(load_file(file)) == patterns(real)


def test_the_gguf_file_is_read_by_the_gguf_package(pipeline: Any, tmp_path: Path) -> None:
    tensors = make_demo.to_comfyui(pipeline.transformer.state_dict())
    file = published.WRITERS["gguf-q8_0"](tmp_path / "x", tensors, {})
    reader = gguf.GGUFReader(file)
    assert {tensor.name for tensor in reader.tensors} == tensors.keys()
    name = "layers.0.attention.qkv.weight"
    (stored,) = [tensor for tensor in reader.tensors if tensor.name == name]
    value = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert (value - tensors[name].float()).abs().max() < 0.01


def test_the_trained_direction_is_what_the_pipeline_follows(pipeline: Any) -> None:
    """A network that is right about picture minus noise at time 1 - sigma leads to the picture."""
    picture = torch.randn(16, 16, 16, generator=torch.Generator().manual_seed(5))

    def right(x: list[torch.Tensor], t: torch.Tensor, *_: Any, **__: Any) -> tuple[list[torch.Tensor]]:
        return ([(picture[:, None] - one) / (1 - time) for one, time in zip(x, t, strict=True)],)

    own = pipeline.transformer
    oracle = type(
        "Oracle", (), {"in_channels": 16, "dtype": torch.float32, "__call__": lambda _, *a, **k: right(*a, **k)}
    )
    pipeline.register_modules(transformer=None)
    pipeline.transformer = oracle()
    try:
        result = pipeline(
            "a red circle", width=128, height=128, num_inference_steps=4, guidance_scale=0.0, output_type="latent"
        )
    finally:
        pipeline.register_modules(transformer=own)
    torch.testing.assert_close(result.images[0], picture, atol=1e-4, rtol=1e-4)


def test_a_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"mean": torch.zeros(192), "matrix": torch.zeros(14, 192)}, tmp_path / "latents.pt")
    command = [sys.executable, train.__file__, "text", "--steps", "2", "--workers", "1"]
    subprocess.run(command, env={**os.environ, "TRANSPLANT_DEMO_TRAINING": str(tmp_path)}, check=True)
    state = torch.load(tmp_path / "text.pt")
    assert state["step"] == 2
    monkeypatch.setattr(train, "FOLDER", tmp_path / "empty")
    fresh = train.Run("text")
    assert fresh.step == 0
    monkeypatch.setattr(train, "FOLDER", tmp_path)
    run = train.Run("text")
    assert run.step == 2
    assert all(torch.equal(value, state["weights"][name]) for name, value in run.parameters.items())
    assert any(not torch.equal(value, fresh.parameters[name]) for name, value in run.parameters.items())
    assert all(optimizer.state for optimizer in run.optimizers)
    assert not any(optimizer.state for optimizer in fresh.optimizers)


def test_the_rate_rises_and_falls() -> None:
    assert train.rate(0, 1000) == 0.01
    assert train.rate(300, 1000) == 1
    assert train.rate(800, 1000) == pytest.approx(0.5)
    assert train.rate(1000, 1000) == 0


def save_untrained(folder: Path, task: str) -> None:
    """The state that a training of a task would leave, of untrained weights."""
    part = "text_encoder" if task == "text" else "transformer"
    modules = {
        "text_encoder": network.new_text_encoder(0, len(network.new_tokenizer())),
        "transformer": network.new_transformer(len(task)),
    }
    average = {f"{part}.{name}": value for name, value in modules[part].named_parameters()}
    torch.save({"average": average}, folder / f"{task}.pt")


def test_what_is_trained_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    monkeypatch.setattr(tasks, "get_latents", some_latents)
    for task in ("text", "base", "outlines", "pastel"):
        save_untrained(tmp_path, task)
    base, other, *files = assemble.assemble(tmp_path / "models")
    assert other.name == "demo-flux.safetensors"
    assert [path.name for path in files] == [
        "demo-outlines-bf16.safetensors", "demo-outlines-nvfp4.safetensors",
        "demo-pastel-int8-convrot.safetensors", "demo-pastel-gguf-q8_0.gguf",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in (tmp_path / "models").rglob("*") if path.is_file()) < 33_000_000
    pipeline = DiffusionPipeline.from_pretrained(base, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer = transplant.load_transformer(files[2], base=base, dtype=torch.float32)
    drawn = measure.draw(pipeline, shapes.held_out()[:2], 1)
    assert [picture.size for picture in drawn.pictures] == [(shapes.SIZE, shapes.SIZE)] * 2
    row = measure.judge("x", drawn, drawn, shapes.held_out()[:2], 1)
    assert (row.right, row.of, row.psnr) == (0, 2, 99)
