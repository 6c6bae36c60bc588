"""What is told of a file: the map of its formats against its header, and what other settings would change."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from kitchen import int8
from tiny_models import (
    MANIFESTS,
    manifest,
    random_z_image,
    save,
    tiny_base,
    tiny_z_image_config,
    to_comfyui,
    write_from_manifest,
)
from transplant.base_model import read_base
from transplant.errors import OverrideArchMismatch
from transplant.hosts.base import default_settings
from transplant.hosts.standalone.report import report
from transplant.inspection import inspect_file, inspect_over_base
from transplant.layer_map import layer_maps
from transplant.plan import plan
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

NAMES = [path.name.removesuffix(".json.gz") for path in sorted(MANIFESTS.glob("*.json.gz"))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "one")


def layout(dim: int = 48) -> dict[str, torch.Tensor]:
    return to_comfyui(random_z_image(tiny_z_image_config(dim=dim), 5, torch.bfloat16).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_the_map_of_every_real_file_is_its_header(name: str, tmp_path: Path) -> None:
    """Each cell is the dtype of that tensor in the header, or the format that its marker, scales or header name."""
    found = inspect_file(write_from_manifest(tmp_path / "x.safetensors", name))
    real = manifest(name).tensors
    assert found.refusal is None
    for one in found.maps:
        for (block, kind), stored in one.formats.items():
            own = f"{one.stem}.{block}.{kind}"
            keys = [key for key in (own, f"{own}.weight") if key in found.keys.stored]
            assert keys, own
            dtype = real[found.keys.stored[keys[-1]]][0]
            is_code = dtype in ("I8", "U8", "F8_E4M3", "F8_E5M2")
            assert stored == dtype or (is_code and stored not in ("BF16", "F16", "F32"))
    counted = Counter(stored for one in found.maps for stored in one.formats.values())
    assert sum(counted.values()) > 40 or "PARTIAL" in name
    parsed = Structure(report(found.as_json()))
    assert parsed.cells == sum(len(one.blocks) * len(one.kinds) for one in found.maps)


class Structure(HTMLParser):
    """Counts the coloured cells, and sees that every tag that is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells, self.open = 0, []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.cells += tag == "td" and any(name == "style" for name, _ in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_other_settings_would_change_is_what_their_plans_say(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "wide", dim=192)  # SDNQ leaves the smallest layers alone
    file = save(tmp_path / "x.safetensors", layout(192))
    settings = default_settings("cpu", "bf16")
    found = inspect_over_base(file, read_base(base), "transformer", settings)
    assert found.plan is not None
    fp8, *quantized = found.alternatives
    assert fp8.resident_bytes is None and "CUDA" in fp8.reason
    for one, mode in zip(quantized, ("int8", "uint4"), strict=True):
        real = plan(file, base, dtype=torch.bfloat16, compute=Compute(quantize=QuantizeOnLoad(mode)))
        assert one.resident_bytes == real.resident_bytes < found.plan.resident_bytes
    told = found.as_json()
    assert (told["verdict"], told["resident_bytes"]) == ("can be loaded", found.plan.resident_bytes)
    assert told["available_bytes"] > 0


def test_fp8_storage_is_told_where_it_acts(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")
    file = save(tmp_path / "x.safetensors", layout())
    found = inspect_over_base(file, read_base(base), "transformer", default_settings("cpu", "bf16"))
    assert found.plan is not None
    real = plan(file, base, dtype=torch.bfloat16, compute=Compute(fp8_storage=True))
    assert found.alternatives[0].resident_bytes == real.resident_bytes < found.plan.resident_bytes


def test_a_quantized_file_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    tensors = layout()
    for name in [name for name in tensors if name.endswith("attention.qkv.weight")]:
        tensors |= int8(tensors.pop(name)).stored(name.removesuffix(".weight"))
    file = save(tmp_path / "x.safetensors", tensors)
    found = inspect_over_base(file, read_base(base), "transformer", default_settings("cpu", "bf16"))
    assert all(one.resident_bytes is None and "quantized already" in one.reason for one in found.alternatives)
    layers = next(one for one in found.maps if one.stem == "layers")
    assert {layers.formats[block, "attention.qkv"] for block in layers.blocks} == {"int8_tensorwise"}
    assert not any("comfy_quant" in kind or "scale" in kind for kind in layers.kinds)


def test_a_refusal_is_told_and_a_broken_file_is_an_error(base: Path, tmp_path: Path) -> None:
    file = write_from_manifest(tmp_path / "x.safetensors", "flux1_dev_bfl_bf16")
    found = inspect_over_base(file, read_base(base), "transformer", default_settings("cpu", "bf16"))
    told = found.as_json()
    assert (told["verdict"], told["reason"]) == ("refused", "WrongArchitecture")
    assert "resident_bytes" not in told and "alternatives" not in told
    (tmp_path / "y.safetensors").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(OverrideArchMismatch, match="web page"):
        inspect_file(tmp_path / "y.safetensors")


def test_names_are_escaped_in_the_report(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    tensors = {f"layers.{block}.{evil}{kind}.weight": torch.zeros(2) for block in range(2) for kind in "ab"}
    found = inspect_file(save(tmp_path / "x.safetensors", tensors))
    assert len(found.maps) == 1
    assert evil not in report(found.as_json())


def test_maps_are_of_blocks() -> None:
    formats = {
        "a.0.x.weight": "F32",
        "a.0.y.weight": "I8",
        "a.2.x.weight": "BF16",
        "a.2.x.bias": "F32",
        "b.weight": "F32",
    }
    (one,) = layer_maps(formats)
    assert (one.stem, one.blocks, one.kinds) == ("a", (0, 2), ("x", "y"))
    assert one.as_json()["formats"] == {"x": ["F32", "BF16"], "y": ["I8", None]}
