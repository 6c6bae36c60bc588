"""docs/formats.md is true: bytes a weight before and after a load, and who loads a saved folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from test_plan import base_folder
from test_quantized_files import ALL_WRITERS, quantize
from tiny_models import random_z_image, save, tiny_z_image_config
from transplant.build import build
from transplant.conversion import needs_transplant
from transplant.formats import formats
from transplant.formats.base import Portable
from transplant.plan import plan
from transplant.view import plan_json, plan_rows

ROOT = Path(__file__).parent.parent
ROWS = {
    "`int8_tensorwise`, one scale": "int8 per tensor",
    "`int8_tensorwise`, a scale a row": "int8 per row",
    "`int8_tensorwise` with ConvRot": "int8 convrot",
    "`float8_e4m3fn`, one scale": "float8_e4m3fn",
    "`float8_e4m3fn`, a scale a row": "float8 per row",
    "`float8_e5m2`, one scale": "float8_e5m2",
    "`nvfp4`": "nvfp4",
    "`mxfp8`": "mxfp8",
    "`convrot_w4a4`": "w4a4",
    "`asym_w4a8_int8`, 4 bits": "w4a8",
    "`asym_w4a8_int8`, 6 bits": "w6a8",
    "`asym_w4a8_int8`, 4 bits, G from 64 on": "w4a8 table",
    "`awq_w4a16`": "awq",
}
GROUPS = {"w4a8 table": 64, "awq": 32}
CONFIG = tiny_z_image_config(dim=192, n_layers=1)


def table() -> dict[str, list[str]]:
    """The cells of each row by its first."""
    text = (ROOT / "docs" / "formats.md").read_text("utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def bytes_a_weight(formula: str, kind: str, columns: int) -> float:
    """A formula of the docs, in numbers."""
    assert re.fullmatch(r"`[\d. +/KG]+`", formula)
    return eval(formula.strip("`"), {}, {"K": columns, "G": GROUPS.get(kind)})


def test_every_format_is_in_the_table() -> None:
    assert list(table()) == list(ROWS)
    assert sorted(ROWS.values()) == sorted(ALL_WRITERS)
    assert {row.split("`")[1] for row in ROWS} == formats().keys() - {"gguf"}


@pytest.mark.parametrize("row", ROWS)
def test_bytes_a_weight(row: str, tmp_path: Path) -> None:
    """Within 1 %: what the docs say, what the plan prints, what is held after the load."""
    kind, cells = ROWS[row], table()[row]
    network = random_z_image(CONFIG, seed=3, dtype=torch.float32)
    file = save(tmp_path / "x.safetensors", quantize(network.state_dict(), ALL_WRITERS[kind])[0])
    planned = plan(file, base_folder(tmp_path / "base", CONFIG), dtype=torch.bfloat16)
    model = build(planned).transformer
    quantized = [target for target in planned.targets if target.form]
    assert len(quantized) >= 14
    for target in quantized:
        n, k = target.shape
        layer = model.get_submodule(target.module)
        names = ("weight", "scale", "scale_2", "zero_point")
        held = sum(getattr(layer, name).nbytes for name in names if getattr(layer, name) is not None)
        expected = bytes_a_weight(cells[2], kind, k) * n * k
        assert abs(held - expected) <= 0.01 * expected, target.name
        assert abs(held - target.nbytes) <= 0.01 * held, target.name
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert abs(total - planned.resident_bytes) <= 0.01 * total
    assert plan_json(planned)["resident_bytes"] == planned.resident_bytes
    told = dict(plan_rows(planned))["quantization"]
    ((count, printed),) = re.findall(r"held: (\d+) as \w+, ([\d.]+) bytes a weight", told)
    weights = sum(target.shape[0] * target.shape[1] for target in quantized)
    assert int(count) == len(quantized)
    assert float(printed) == pytest.approx(sum(target.nbytes for target in quantized) / weights, rel=0.001)


def test_bytes_a_weight_of_mxfp8_where_scales_become_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's third note: 1.0625, before and after."""
    for place in ("targets", "build"):
        monkeypatch.setattr(f"transplant.{place}.portable_on", lambda compute, device: Portable(scales=True))
    network = random_z_image(CONFIG, seed=3, dtype=torch.float32)
    file = save(tmp_path / "x.safetensors", quantize(network.state_dict(), ALL_WRITERS["mxfp8"])[0])
    planned = plan(file, base_folder(tmp_path / "base", CONFIG), dtype=torch.bfloat16)
    model = build(planned).transformer
    for target in (target for target in planned.targets if target.form):
        layer = model.get_submodule(target.module)
        assert layer.weight.nbytes + layer.scale.nbytes == target.nbytes == 1.0625 * target.shape[0] * target.shape[1]
    assert "1.0625 bytes" in (ROOT / "docs" / "formats.md").read_text("utf-8")


@pytest.mark.parametrize("row", ROWS)
def test_who_loads_a_saved_folder(row: str, tmp_path: Path) -> None:
    """The last column is `needs_transplant`, which test_saved.py holds against SDNQ itself."""
    network = random_z_image(CONFIG, seed=3, dtype=torch.float32)
    file = save(tmp_path / "x.safetensors", quantize(network.state_dict(), ALL_WRITERS[ROWS[row]])[0])
    base = base_folder(tmp_path / "base", CONFIG)
    fp32, bf16 = (not needs_transplant(plan(file, base, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    said = {(True, True): "with SDNQ", (True, False): "with SDNQ in fp32 only", (False, False): "no"}
    assert table()[row][5] == said[fp32, bf16]
