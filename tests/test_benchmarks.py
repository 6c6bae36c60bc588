"""The benchmark runs, its tables have the shape that the docs promise, and what they say of memory and bytes holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARK = ROOT / "benchmarks" / "load.py"
MARKERS = ("<!-- benchmarks/load.py begins -->", "<!-- benchmarks/load.py ends -->")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark reads /proc")

Table = list[dict[str, str]]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def tables(text: str) -> list[Table]:
    """Every Markdown table, each row by its column titles."""
    found: list[Table] = []
    for block in text.split("\n\n"):
        lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in block.strip().splitlines()]
        if block.strip().startswith("|"):
            head = ["what", *lines[0]]
            assert all(len(line) == len(head) for line in lines[2:])
            found.append([dict(zip(head, line, strict=True)) for line in lines[2:]])
    return found


def number(text: str) -> float:
    """The number that a cell begins with."""
    return float(text.split()[0].rstrip("%"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text that a small run puts between the markers of a file."""
    folder = tmp_path_factory.mktemp("benchmark")
    page = folder / "page.md"
    page.write_text(f"before\n{MARKERS[0]}\nold figures\n{MARKERS[1]}\nafter\n")
    work = folder / "work"
    work.mkdir()
    done = run("--size-gb", 0.1, "--runs", 1, "--dir", work, "--markdown", page)
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "the benchmark leaves files behind"
    before, begin, rest = page.read_text().partition(MARKERS[0])
    inside, end, after = rest.partition(MARKERS[1])
    assert (before, begin, end, after) == ("before\n", *MARKERS, "\nafter\n")
    assert inside.strip() == done.stdout.strip()
    assert str(folder) not in inside
    return inside


def test_tables_have_their_rows(report: str) -> None:
    """Five loads, two refusals, five targets."""
    loads, refusals, targets = tables(report)
    assert [len(table) for table in (loads, refusals, targets)] == [5, 2, 5]
    assert [row["what"].split(",")[0].split(" `")[0] for row in loads] == [
        "Transplant", "diffusers", "Transplant", "diffusers", "a plain read into one buffer",
    ]  # fmt: skip
    for row in loads:
        assert number(row["load"]) >= 0
        assert number(row["to the plain read"]) > 0
    assert number(loads[-1]["to the plain read"]) == 1
    assert number(loads[1]["to diffusers, same way of reading"]) == 1


def test_memory_claims(report: str) -> None:
    """Mapped: under 5 % of the file. Read: the model once, diffusers' twice."""
    mapped, _, read, diffusers_read, plain = (number(row["of the file"]) for row in tables(report)[0])
    assert mapped < 5
    assert read < 110
    assert read < diffusers_read
    assert 90 < plain < 110


def test_refusal_claims(report: str) -> None:
    """Few bytes, the reason, and the loaded model alive."""
    ours, theirs = tables(report)[1]
    assert number(ours["read from files"]) < 5
    said = "WrongArchitecture: wrong.safetensors: holds a transformer of the FLUX.1"
    assert ours["what the user is told"].startswith(said)
    assert ours["the loaded model"] == "still there, draws the same picture"
    assert theirs["what the user is told"]


def test_targets_say_what_was_reached(report: str) -> None:
    """Those that do not depend on the machine are reached."""
    reached = {row["what"]: row["reached"] for row in tables(report)[2]}
    assert reached["peak anonymous memory, of the file"] == "yes"
    assert reached["bytes read to refuse"] == "yes"
    assert reached["the loaded model survives a refusal"] == "yes"


def test_wrong_calls(tmp_path: Path) -> None:
    """Told at once, before anything is measured."""
    page = tmp_path / "page.md"
    page.write_text("no markers")
    for arguments in (["--runs", 0], ["--size-gb", 0], ["--markdown", page], ["--markdown", tmp_path / "none.md"]):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_docs_hold_the_markers() -> None:
    """The command that the docs name can bring them up to date."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.count(MARKERS[0]) == page.count(MARKERS[1]) == 1
    assert page.index(MARKERS[0]) < page.index(MARKERS[1])


def test_fp8_storage_at_small_size() -> None:
    """A load with FP8 storage takes its fp8 size and a layer; less than the bf16 file, and within the target."""
    program = ROOT / "benchmarks" / "fp8_storage.py"
    done = subprocess.run(
        [sys.executable, str(program), "--layers", "1", "--only", "mapped", "read", "diffusers"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [table] = tables(done.stdout)
    for row in table[:2]:
        assert number(row["peak anonymous memory"]) <= number(row["parameters"]) + 150  # the largest layer is 79 MB
        assert row["at most +600 MB"] == "yes"
    assert len({row["parameters"] for row in table}) == 1  # the same as diffusers' layerwise casting leaves


def test_quantized_at_small_size(tmp_path: Path) -> None:
    """An adopted format and a dtype to quantize to: the tables between the markers, and what they say of memory."""
    program = ROOT / "benchmarks" / "quantized.py"
    begin, end = (f"<!-- benchmarks/quantized.py {word} -->" for word in ("begins", "ends"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold figures\n{end}\nafter\n")
    done = subprocess.run(
        [sys.executable, str(program), "--size-gb", "0.05", "--runs", "1", "--only", "nvfp4", "int8",
         "--dir", str(tmp_path), "--markdown", str(page)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"], "the benchmark leaves files behind"
    assert page.read_text() == f"before\n{begin}\n\n{done.stdout.strip()}\n\n{end}\nafter\n"
    [adopted], [on_load] = tables(done.stdout)
    assert adopted["what"] == "nvfp4"
    assert adopted["at most what stays + 3 layers"].endswith(" yes")
    assert on_load["what"] == "int8"
    assert number(on_load["stays"]) <= number(on_load["peak"])
    assert (ROOT / "docs" / "benchmarks.md").read_text().count(begin) == 1
