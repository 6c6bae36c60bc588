"""Every transformer class with FP8 storage, and the sizes that others have measured.

C01 (embedders and last layers stay), A09 (a class whose code reads a weight's dtype), A17 (no class is left out).
"""

from __future__ import annotations

import logging
import math
import re
from functools import cache

import diffusers
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import CosmosTransformer3DModel

from fp8_classes import BEGIN, DOCS, END, Found, cases, measure
from tiny_models import manifest
from transplant.architectures import SPECS
from transplant.architectures.cosmos import ANIMA
from transplant.fp8_outlook import sizes_of
from transplant.fp8_storage import FP8, castable_layers, is_unknown, skip_patterns, store_in_fp8

DECLARE_NOTHING = (
    "ErnieImageTransformer2DModel", "HiDreamImageTransformer2DModel", "PRXTransformer2DModel",
    "LongCatImageTransformer2DModel", "Kandinsky5Transformer3DModel", "BriaTransformer2DModel",
    "BriaFiboTransformer2DModel", "ConsisIDTransformer3DModel",
)  # fmt: skip
CASES = cases()

OUTSIDE_BLOCKS = {
    "ZImageTransformer2DModel": r"all_x_embedder|all_final_layer",  # the class's own list, and the report's 34 layers
    "Krea2Transformer2DModel": r"time_mod_proj|text_fusion\.projector",
    "Flux2Transformer2DModel": r"_modulation",
    "Flux3Transformer2DModel": r"_modulations",
    "QwenImage21Transformer2DModel": r"modulation",
    "LTX2VideoTransformer3DModel": r"av_cross_attn_\w+\.linear",
}
"""Layers outside the repeated blocks that are cast all the same: modulation, but for Z-Image's."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")


@cache
def found(name: str) -> Found:
    return measure(CASES[name])


def test_no_class_is_left_out() -> None:
    listed = {cls for spec in SPECS for cls in (spec.cls, *spec.other_classes)} | set(DECLARE_NOTHING)
    assert listed == {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_runs_and_stays_close(name: str) -> None:
    """Finite, near bf16, and nothing but weights is ever float8."""
    one = found(name)
    assert one.cast
    assert one.finite
    assert one.seen.isdisjoint(FP8)
    assert one.error < 0.15


@pytest.mark.parametrize("name", CASES)
def test_embedders_and_last_layers_stay(name: str) -> None:
    """What lies outside the repeated blocks is not cast; modulation is, where nobody says otherwise."""
    allowed = OUTSIDE_BLOCKS.get(name)
    inside = re.compile(r"blocks?\.(\w+\.)?\d|(layers|refiner|face_adapter)\.\d|^mid_block")
    outside = [layer for layer in found(name).cast if not inside.search(layer)]
    assert [layer for layer in outside if not (allowed and re.search(allowed, layer))] == []


@pytest.mark.parametrize("name", DECLARE_NOTHING)
def test_classes_that_declare_nothing(name: str) -> None:
    """Our own lists: no embedder, no last layer, no norm; modulation only where a list of ours leaves it out."""
    assert getattr(diffusers, name)._skip_layerwise_casting_patterns is None
    stays = re.compile(r"embed|time|caption|(img|txt|text)_in|text_proj|final|^proj_out|norm|^out_layer")
    assert [layer for layer in found(name).cast if stays.search(layer)] == []
    assert any("attn" in layer or "attention" in layer for layer in found(name).cast)


def test_skip_lists_pay() -> None:
    """Every layer in fp8: some classes do not run, and the others are further from bf16 by half on the whole."""
    ratios = [one.without_skips / one.error for one in map(found, CASES) if one.without_skips is not None]
    assert len(ratios) < len(CASES)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) > 1.5


def test_an_unknown_class_is_said_to_be_one(caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["PRXTransformer2DModel"]
    model = case.make().to(torch.bfloat16)
    assert is_unknown(type(model), case.patterns)
    assert not is_unknown(diffusers.FluxTransformer2DModel, ())
    with caplog.at_level(logging.WARNING, logger="transplant"):
        store_in_fp8(model, case.patterns, "somebody's model")  # pyright: ignore
    assert "somebody's model" in caplog.text
    assert "every embedder and last layer stays" in caplog.text


def test_docs_show_these_classes() -> None:
    """The table has a row a class, with today's number of layers; its errors are this machine's, so not compared."""
    text = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    assert {cells[0]: cells[1] for cells in rows[2:]} == {
        name: f"{len(found(name).cast)} of {found(name).layers}" for name in CASES
    }
    assert all(re.fullmatch(r"\d+\.\d%", cells[2]) for cells in rows[2:])
    assert all(re.fullmatch(r"\d+\.\d%|does not run", cells[3]) for cells in rows[2:])


# Anima


ANIMA_FILE = manifest("anima_base_v1_bf16")


def reported(*skips: str) -> float:
    """MB of an Anima file whose matrices rest in fp8, by the file's own names, conditioner and its table included."""
    wide = [len(shape) < 2 or any(skip in name for skip in skips) for name, (_, shape) in ANIMA_FILE.tensors.items()]
    counts = [math.prod(shape) for _, shape in ANIMA_FILE.tensors.values()]
    return sum(count * (1 + is_wide) for count, is_wide in zip(counts, wide, strict=True)) / 2**20


def test_reported_sizes_of_anima() -> None:
    """1994 MB with no skip list, 2010, 2012 and 2180 MB with more of it, of 3988 MB."""
    assert sum(math.prod(shape) for _, shape in ANIMA_FILE.tensors.values()) / 2**19 == pytest.approx(3988, abs=1)
    layers = ("t_embedder", "x_embedder", "final_layer", "adaln_modulation")
    assert reported() == pytest.approx(1994, abs=1)
    assert reported(*layers[:1]) == pytest.approx(2010, abs=1)
    assert reported(*layers[:3]) == pytest.approx(2012, abs=1)
    assert reported(*layers) == pytest.approx(2180, abs=1)


def test_our_size_of_anima() -> None:
    """diffusers calls the modulation norm1 to norm3, which its patterns skip; the conditioner is a model apart."""
    with init_empty_weights():
        model = CosmosTransformer3DModel(**ANIMA_FILE.diffusers["config"])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    before, after = (size / 2**20 for size in sizes_of(model, ANIMA.fp8_skip_patterns))
    conditioner = {name: shape for name, (_, shape) in ANIMA_FILE.tensors.items() if ".llm_adapter." in f".{name}"}
    count = sum(math.prod(shape) for shape in conditioner.values())
    in_fp8 = sum(math.prod(shape) * (1 if len(shape) > 1 else 2) for shape in conditioner.values()) / 2**20
    assert before == pytest.approx(3988.4 - count * 2 / 2**20, abs=0.5)
    everything = reported("t_embedder", "x_embedder", "final_layer", "adaln_modulation")
    assert after == pytest.approx(everything - in_fp8, rel=0.001)
    layers = set(castable_layers(model, ("time_embed", "patch_embed", "norm_out", "proj_out")))
    modulation = layers - set(castable_layers(model, skip_patterns(type(model), ANIMA.fp8_skip_patterns)))
    assert all(re.search(r"norm[123]\.linear_[12]$", layer) for layer in modulation)
    assert sum(model.get_submodule(layer).weight.numel() for layer in modulation) / 2**20 == pytest.approx(168, abs=0.5)
