"""The residual branch of Krea 2: absent, dormant or live, against a forward pass that is written out here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from kitchen import float8, int8
from original_layouts import Tensors, from_recipes
from test_architectures import BY_NAME, base_folder, full_config, made_of
from test_session import TestHost
from tiny_configs import TINY
from tiny_models import save, with_prefix
from tiny_pipelines import filled, krea2
from transplant import errors
from transplant.branch import State
from transplant.build import build
from transplant.fp8_storage import castable_layers, skip_patterns
from transplant.krea2_residual import Krea2ResidualTransformer2DModel
from transplant.load_plan import LoadPlan
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.slots import Override
from transplant.view import plan_json, plan_rows

SPEC = BY_NAME["Krea 2"]
CONFIG = full_config(SPEC.cls, TINY[SPEC.cls])
WIDTH = CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"]
UP, DOWN = "last.up.weight", "last.down.weight"
PLAIN = "Krea2Transformer2DModel"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


def plain(seed: int = 1) -> Any:
    """diffusers' own class with numbers of its own."""
    return filled(getattr(diffusers, PLAIN)(**CONFIG), seed)


def original(state: Tensors) -> Tensors:
    return from_recipes(made_of("krea2_raw_bf16"), state)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), SPEC, CONFIG)


@pytest.fixture
def planned_of(base: Path, tmp_path: Path) -> Callable[[Mapping[str, torch.Tensor]], LoadPlan]:
    return lambda tensors: plan(save(tmp_path / "x.safetensors", dict(tensors)), base, dtype=torch.float32)


INPUTS = {
    "hidden_states": numbers(2, 6, 4, seed=2),
    "encoder_hidden_states": numbers(2, 5, 2, 16, seed=3),
    "timestep": torch.tensor([0.3, 0.8]),
    "position_ids": torch.stack([torch.arange(11.0)] * 3, dim=1),
}


def last_layer_by_hand(model: Any, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`linear(norm(x)·(1 + scale) + shift + up(down(x)))` in float64, on what reaches the last layer of `model`."""
    seen: list[torch.Tensor] = []
    hook = model.final_layer.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    with torch.no_grad():
        model(**INPUTS)
    hook.remove()
    x, temb = (tensor.double() for tensor in seen)
    held = {name: tensor.double() for name, tensor in model.final_layer.state_dict().items()}
    scale, shift = (temb + held["scale_shift_table"]).chunk(2, dim=1)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["norm_eps"]).sqrt() * (1 + held["norm.weight"])
    inner = normed * (1 + scale) + shift + (x @ down.double().T) @ up.double().T
    return inner @ held["linear.weight"].T + held["linear.bias"]


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**INPUTS, return_dict=False)[0]


def shown(planned: LoadPlan) -> str:
    assert planned.branch is not None
    assert plan_json(planned)["branch"] == {"title": "residual branch", "state": planned.branch.state.value}
    return dict(plan_rows(planned))["residual branch"]


def test_absent(planned_of: Callable[..., LoadPlan]) -> None:
    model = plain()
    planned = planned_of(original(model.state_dict()))
    built = build(planned).transformer
    assert type(built).__name__ == PLAIN
    assert shown(planned) == "absent"
    assert torch.equal(output(built), output(model))
    none = torch.zeros(WIDTH, WIDTH)
    assert torch.allclose(output(built).double(), last_layer_by_hand(model, none, none), atol=1e-5)


@pytest.mark.parametrize("up", [torch.zeros(WIDTH, WIDTH), torch.full((WIDTH, WIDTH), -0.0)], ids=["0", "-0"])
def test_dormant(up: torch.Tensor, planned_of: Callable[..., LoadPlan]) -> None:
    """It is left out because its weights say that it does nothing, and the plan says so."""
    model, down = plain(), numbers(WIDTH, WIDTH)
    planned = planned_of(original(model.state_dict()) | {UP: up, DOWN: down})
    assert shown(planned) == "dormant: last.up.weight is all zeros, it is left out"
    assert set(planned.dropped) == {UP, DOWN}
    built = build(planned).transformer
    assert type(built).__name__ == PLAIN
    assert torch.equal(output(built), output(model))
    assert torch.allclose(output(built).double(), last_layer_by_hand(model, up, down), atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_live(layout: str, prefix: str, planned_of: Callable[..., LoadPlan]) -> None:
    model, up, down = plain(), numbers(WIDTH, WIDTH, seed=5), numbers(WIDTH, WIDTH, seed=6)
    if layout == "original":
        tensors = original(model.state_dict()) | {UP: up, DOWN: down}
    else:
        tensors = model.state_dict() | {"final_layer.up.weight": up, "final_layer.down.weight": down}
    planned = planned_of(with_prefix(tensors, prefix))
    assert shown(planned) == "live: the model runs with it"
    assert planned.dropped == ()
    built = build(planned).transformer
    assert isinstance(built, Krea2ResidualTransformer2DModel)
    by_hand = last_layer_by_hand(model, up, down)
    assert torch.allclose(output(built).double(), by_hand, atol=1e-5)
    assert not torch.allclose(output(model).double(), by_hand, atol=1e-3)


def test_one_last_value_makes_it_live(planned_of: Callable[..., LoadPlan]) -> None:
    up = torch.zeros(WIDTH, WIDTH)
    up[-1, -1] = 1e-30
    planned = planned_of(original(plain().state_dict()) | {UP: up, DOWN: numbers(WIDTH, WIDTH)})
    assert planned.branch is not None
    assert planned.branch.state is State.LIVE


@pytest.mark.parametrize("write", [int8, float8])
def test_live_and_quantized(write: Callable[..., Any], planned_of: Callable[..., LoadPlan]) -> None:
    """Its codes stay codes, and are worth what comfy-kitchen says."""
    model, up, down = plain(), write(numbers(WIDTH, WIDTH, seed=5)), write(numbers(WIDTH, WIDTH, seed=6))
    tensors = original(model.state_dict()) | up.stored("last.up") | down.stored("last.down")
    planned = planned_of(tensors)
    assert {t.name for t in planned.targets if t.form} == {"final_layer.up.weight", "final_layer.down.weight"}
    by_hand = last_layer_by_hand(model, up.value(torch.float32), down.value(torch.float32))
    assert torch.allclose(output(build(planned).transformer).double(), by_hand, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize(("dtype", "write"), [(torch.int8, int8), (torch.float8_e4m3fn, float8)])
def test_dormant_and_quantized(
    dtype: torch.dtype, write: Callable[..., Any], scale: float, planned_of: Callable[..., LoadPlan]
) -> None:
    """Zeros are written with a scale of any kind, zero among them, which is refused everywhere else."""
    model, down = plain(), write(numbers(WIDTH, WIDTH))
    up = down.stored("last.up")
    up[UP], up[f"{UP}_scale"] = torch.zeros(WIDTH, WIDTH, dtype=dtype), torch.full_like(up[f"{UP}_scale"], scale)
    planned = planned_of(original(model.state_dict()) | up | down.stored("last.down"))
    assert planned.branch is not None
    assert planned.branch.state is State.DORMANT
    assert planned.layers == {}
    assert torch.equal(output(build(planned).transformer), output(model))


@pytest.mark.parametrize(("lone", "missing"), [(DOWN, "final_layer.up.weight"), (UP, "final_layer.down.weight")])
def test_half_a_branch_is_refused(lone: str, missing: str, planned_of: Callable[..., LoadPlan]) -> None:
    with pytest.raises(errors.MissingTensors) as refusal:
        planned_of(original(plain().state_dict()) | {lone: numbers(WIDTH, WIDTH)})
    assert refusal.value.names == (missing,)


@pytest.mark.parametrize("up", [torch.zeros(WIDTH, WIDTH), numbers(WIDTH, WIDTH)], ids=["dormant", "live"])
def test_a_part_that_is_not_known_is_refused(up: torch.Tensor, planned_of: Callable[..., LoadPlan]) -> None:
    tensors = {UP: up, DOWN: numbers(WIDTH, WIDTH), "last.up.bias": numbers(WIDTH)}
    with pytest.raises(errors.UnexpectedTensors, match=r"last\.up\.bias"):
        planned_of(original(plain().state_dict()) | tensors)


def test_fp8_storage_leaves_it_out() -> None:
    network = Krea2ResidualTransformer2DModel(**CONFIG)
    cast = castable_layers(network, skip_patterns(type(network), SPEC.fp8_skip_patterns))
    assert "transformer_blocks.0.attn.to_q" in cast
    assert not [name for name in cast if name.startswith(("final_layer.up", "final_layer.down"))]


def test_a_new_branch_does_nothing() -> None:
    """As in training: `up` begins at zero."""
    network = Krea2ResidualTransformer2DModel(**CONFIG).eval()
    assert not network.final_layer.up.weight.any()
    assert dict(network.config) == dict(getattr(diffusers, PLAIN)(**CONFIG).config)


def test_in_a_pipeline_that_is_saved_and_loaded_again(tmp_path: Path) -> None:
    """Chosen, saved with diffusers, loaded as a base model, and back to a file without the branch."""
    krea2().save_pretrained(str(tmp_path / "base"))
    session = Session(TestHost())
    session.load_base(tmp_path / "base")
    state = filled(getattr(diffusers, PLAIN).from_config(session.transformer.config), 4).state_dict()
    branch = {UP: numbers(WIDTH, WIDTH, seed=5), DOWN: numbers(WIDTH, WIDTH, seed=6)}
    file = Override("live", save(tmp_path / "live.safetensors", original(state) | branch))
    assert session.choose(file).changed
    assert isinstance(session.transformer, Krea2ResidualTransformer2DModel)
    live = output(session.transformer)
    session.pipeline.save_pretrained(str(tmp_path / "saved"))  # type: ignore[union-attr]

    again = Session(TestHost())
    again.load_base(tmp_path / "saved")
    assert isinstance(again.transformer, Krea2ResidualTransformer2DModel)
    assert torch.equal(output(again.transformer), live)
    assert again.choose(Override("plain", save(tmp_path / "plain.safetensors", original(state)))).changed
    assert type(again.transformer).__name__ == PLAIN
    assert again.choose(file).changed
    assert torch.equal(output(again.transformer), live)
