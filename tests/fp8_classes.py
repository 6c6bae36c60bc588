"""FP8 storage on every transformer class at tiny width: what is cast, and what it does to the output.

The inputs are those of the class's own pipeline (tiny_pipelines.py), caught at its first step, or made here for
classes whose pipeline is too large to make. `python tests/fp8_classes.py` writes the table in docs/fp8_storage.md.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from tiny_configs import TINY
from tiny_models import make_demo
from tiny_pipelines import PIPELINES
from transplant.architectures import SPECS
from transplant.fp8_storage import castable_layers, hook_fp8_layers, skip_patterns, store_in_fp8, stored

DOCS = Path(__file__).resolve().parents[1] / "docs" / "fp8_storage.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"
DTYPE = torch.bfloat16


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _flux_like(channels: int, text: int, **more: Any) -> dict[str, Any]:
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
    ids["img_ids"][:, 1], ids["img_ids"][:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    states = {"hidden_states": noise(1, 16, channels), "encoder_hidden_states": noise(1, 6, text)}
    return {**states, "timestep": torch.tensor([0.5]), **ids, **more}


def _wan(channels: int = 4) -> dict[str, Any]:
    states = {"hidden_states": noise(1, channels, 2, 8, 8), "encoder_hidden_states": noise(1, 6, 12)}
    return {**states, "timestep": torch.tensor([500.0])}


_FLUX_LIKE = {
    "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
    "joint_attention_dim": 12, "axes_dims_rope": [2, 2, 4],
}  # fmt: skip

MORE: Mapping[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "Flux3Transformer2DModel": (
        TINY["Flux3Transformer2DModel"],
        lambda: _flux_like(4, 12, img_ids=torch.ones(16, 4), txt_ids=torch.ones(6, 4)) | {
            "image_cond_hidden_states": noise(1, 8, 4), "image_cond_ids": torch.ones(8, 4),
        },
    ),
    "LTX2VideoTransformer3DModel": (
        TINY["LTX2VideoTransformer3DModel"],
        lambda: {
            "hidden_states": noise(1, 32, 4), "audio_hidden_states": noise(1, 8, 4), "num_frames": 2, "height": 4,
            "width": 4, "audio_num_frames": 8, "encoder_hidden_states": noise(1, 6, 12), "fps": 24.0,
            "audio_encoder_hidden_states": noise(1, 6, 12), "timestep": torch.tensor([500.0]),
        },
    ),
    "QwenImage21Transformer2DModel": (
        TINY["QwenImage21Transformer2DModel"],
        lambda: {
            "hidden_states": noise(1, 16, 4), "encoder_hidden_states": noise(1, 6, 12),
            "timestep": torch.tensor([0.5]), "img_shapes": [[(1, 4, 4)]],
            "img_mask": torch.arange(10)[None] >= 6,
        },
    ),
    "ErnieImageTransformer2DModel": (
        TINY["ErnieImageTransformer2DModel"],
        lambda: {
            "hidden_states": noise(1, 8, 4, 4), "timestep": torch.tensor([500.0]), "text_bth": noise(1, 6, 12),
            "text_lens": torch.tensor([6]),
        },
    ),
    "WanAnimateTransformer3DModel": (
        TINY["WanAnimateTransformer3DModel"],
        lambda: {
            "hidden_states": noise(1, 12, 3, 8, 8), "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": noise(1, 6, 12), "encoder_hidden_states_image": noise(1, 5, 4),
            "pose_hidden_states": noise(1, 4, 2, 8, 8), "face_pixel_values": noise(1, 3, 5, 512, 512),
        },
    ),
    "SkyReelsV2Transformer3DModel": (TINY["WanTransformer3DModel"], _wan),
    "ChronoEditTransformer3DModel": (TINY["WanTransformer3DModel"], _wan),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 12, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        lambda: {
            "hidden_states": noise(1, 4, 8, 8), "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 6, 12),
        },
    ),
    "LongCatImageTransformer2DModel": ({**_FLUX_LIKE, "pooled_projection_dim": 12}, lambda: _flux_like(4, 12)),
    "BriaTransformer2DModel": (_FLUX_LIKE, lambda: _flux_like(4, 12)),
    "BriaFiboTransformer2DModel": (
        {**_FLUX_LIKE, "text_encoder_dim": 8},
        lambda: _flux_like(4, 12, text_encoder_layers=[noise(1, 6, 8)] * 3),
    ),
    "Kandinsky5Transformer3DModel": (
        {
            "in_visual_dim": 4, "in_text_dim": 12, "in_text_dim2": 8, "time_dim": 16, "out_visual_dim": 4,
            "model_dim": 24, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4),
        },
        lambda: {
            "hidden_states": noise(1, 2, 4, 4, 4), "encoder_hidden_states": noise(1, 6, 12),
            "timestep": torch.tensor([500.0]), "pooled_projections": noise(1, 8),
            "visual_rope_pos": [torch.arange(2)] * 3, "text_rope_pos": torch.arange(6),
        },
    ),
    "ConsisIDTransformer3DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "time_embed_dim": 8, "text_embed_dim": 12, "sample_width": 8, "sample_height": 8, "sample_frames": 9,
            "max_text_seq_length": 6,
        },
        lambda: {
            "hidden_states": noise(1, 3, 4, 8, 8), "encoder_hidden_states": noise(1, 6, 12),
            "timestep": torch.tensor([500.0]),
        },
    ),
}  # fmt: skip
"""Configs and inputs of the classes that no pipeline of tiny_pipelines.py draws with."""


class _CaughtError(Exception):
    """Ends a pipeline's call at its first step."""


@dataclass(frozen=True)
class Case:
    """A class, made small, with something to compute.

    Attributes:
        make: makes it.
        call: positional and keyword arguments of its forward in bf16.
        patterns: its architecture's skip patterns.
    """

    make: Callable[[], torch.nn.Module]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """What FP8 storage did to a class.

    Attributes:
        layers: Linears and convolutions.
        cast: names of those that rest in fp8.
        error: relative error of the output against bf16.
        without_skips: the same with every layer in fp8 whose dtype nobody is known to read; None where it fails.
        seen: dtypes of everything that went in and out of a module.
        finite: whether the output was.
    """

    layers: int
    cast: tuple[str, ...]
    error: float
    without_skips: float | None
    seen: frozenset[torch.dtype]
    finite: bool


def cases() -> dict[str, Case]:
    """Every class of the architecture list, and those that declare nothing, by name."""
    patterns = {cls: spec.fp8_skip_patterns for spec in reversed(SPECS) for cls in (spec.cls, *spec.other_classes)}
    found: dict[str, Case] = {}
    for name, tiny in PIPELINES.items():
        pipeline = tiny.make
        cls = {"SDXL": "UNet2DConditionModel, SDXL"}.get(name)
        model = {s.name: s.cls for s in SPECS}[tiny.architecture]
        key = cls or model
        if key not in found:
            found[key] = Case(*_from_pipeline(name, pipeline), patterns=_patterns_of(tiny.architecture))
    for cls, (config, inputs) in MORE.items():
        found[cls] = Case(
            _maker(cls, config), lambda inputs=inputs: ((), _narrowed(inputs())), patterns=patterns.get(cls, ())
        )
    return dict(sorted(found.items()))


def _patterns_of(architecture: str) -> tuple[str, ...]:
    return next(spec.fp8_skip_patterns for spec in SPECS if spec.name == architecture)


def _maker(cls: str, config: Mapping[str, Any]) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        model = getattr(diffusers, cls)(**config)
        make_demo.fill(model, 0, torch.float32)
        return model.eval()

    return make


def _from_pipeline(name: str, make: Callable[[], Any]) -> tuple[Callable[[], torch.nn.Module], Any]:
    """The model that a pipeline draws with, and the arguments of its first call."""
    tiny = PIPELINES[name]
    made: dict[str, Any] = {}

    def model() -> torch.nn.Module:
        made["pipeline"] = make().to(DTYPE)
        return getattr(made["pipeline"], tiny.slots[0]).eval()

    def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
        pipeline, caught = made["pipeline"], {}

        def catch(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught["call"] = copy.deepcopy((args, kwargs))
            raise _CaughtError

        for key, value in tiny.attributes.items():
            setattr(pipeline, key, value)
        handle = getattr(pipeline, tiny.slots[0]).register_forward_pre_hook(catch, with_kwargs=True)
        try:
            pipeline(**tiny.call)
        except _CaughtError:
            pass
        finally:
            handle.remove()
        return caught["call"]

    return model, call


def measure(case: Case) -> Found:
    """Run one class in bf16, with FP8 storage, and with every layer in fp8."""
    torch.manual_seed(0)
    model = case.make()
    args, kwargs = case.call()
    _to_bf16(model)
    layers = castable_layers(model, ())
    count = sum(
        type(m) in (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d) for m in model.modules()
    )
    expected = _output(model, args, kwargs)
    everything = copy.deepcopy(model)
    cast = castable_layers(model, skip_patterns(type(model), case.patterns))
    store_in_fp8(model, case.patterns, "x")
    for layer in layers:
        for parameter in everything.get_submodule(layer).parameters(recurse=False):
            parameter.data = stored(parameter.data)
    hook_fp8_layers(everything, DTYPE, "x")
    seen = _watched(model)
    output = _output(model, args, kwargs)
    try:
        without = _distance(_output(everything, args, kwargs), expected)
    except RuntimeError:
        without = None
    return Found(count, cast, _distance(output, expected), without, frozenset(seen), bool(output.isfinite().all()))


def _to_bf16(model: torch.nn.Module) -> None:
    """As diffusers loads it in bf16: all but the modules that it keeps in fp32."""
    kept: Any = getattr(model, "_keep_in_fp32_modules", None) or []
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if any(part in kept for part in name.split(".")) else DTYPE)


def _narrowed(value: Any) -> Any:
    """bf16 as a pipeline in bf16 would give it; timesteps stay as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(DTYPE) if value.is_floating_point() and value.ndim > 1 else value
    if isinstance(value, dict):
        return {key: _narrowed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_narrowed(item) for item in value)
    return value


def _output(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return _first(model(*copy.deepcopy(args), **copy.deepcopy(kwargs))).float()


def _first(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return _first(next(iter(value.values())) if isinstance(value, dict) else value[0])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _watched(model: torch.nn.Module) -> set[torch.dtype]:
    """A set that fills with the dtypes of what goes in and out of modules."""
    seen: set[torch.dtype] = set()

    def watch(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        flat = torch.utils._pytree.tree_leaves((args, kwargs, output))
        seen.update(leaf.dtype for leaf in flat if isinstance(leaf, torch.Tensor))

    for module in model.modules():
        module.register_forward_hook(watch, with_kwargs=True)
    return seen


def row(name: str, found: Found) -> str:
    without = "does not run" if found.without_skips is None else f"{found.without_skips:.1%}"
    return f"| {name} | {len(found.cast)} of {found.layers} | {found.error:.1%} | {without} |"


def table() -> str:
    """The table of docs/fp8_storage.md."""
    lines = ["| class | layers in fp8 | error | error with every layer in fp8 |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(row(name, measure(case)) for name, case in cases().items())])


if __name__ == "__main__":
    import os

    os.environ["TRANSPLANT_FP8_ON_CPU"] = "1"
    if sys.argv[1:] == ["--print"]:
        for name, case in cases().items():
            try:
                print(row(name, measure(case)), flush=True)
            except Exception as error:
                import traceback

                print(name, type(error).__name__, str(error)[:300])
                traceback.print_exc(limit=-2)
    else:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
