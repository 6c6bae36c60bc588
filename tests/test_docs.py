"""The code blocks of README.md and CONTRIBUTING.md run as they stand."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from test_architectures import shapes_of
from tiny_models import write_sparse
from transplant.architectures import SPECS

ROOT = Path(__file__).parent.parent
DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/design.md",
    "docs/benchmarks.md",
    "docs/fp8_storage.md",
    "docs/formats.md",
    "docs/sdnext.md",
    "benchmarks/README.md",
)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    Attributes:
        language: what it is written in.
        settings: what its first line says beside that: where the code belongs.
        code: the code.
    """

    language: str
    settings: dict[str, str]
    code: str


def blocks(document: str, language: str) -> list[Block]:
    """The code blocks of one language in a document, in order."""
    found: list[Block] = []
    text = (ROOT / document).read_text("utf-8")
    for info, code in re.findall(r"^```([^\n]+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        name, *settings = shlex.split(info)
        found.append(Block(name, dict(setting.split("=", 1) for setting in settings), code))
    return [block for block in found if block.language == language]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command and return what it prints; a failure shows all of it."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def as_here(line: str) -> list[str]:
    """A documented command line with the Python that runs this test."""
    words = shlex.split(line)
    if words[0] in ("python3", ".venv/bin/python"):
        return [sys.executable, *words[1:]]
    assert words[0].startswith(".venv/bin/"), line
    return [sys.executable, "-m", words[0].removeprefix(".venv/bin/"), *words[1:]]


# CONTRIBUTING.md


@pytest.fixture(scope="module")
def with_pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which somebody did what CONTRIBUTING.md says."""
    copy = tmp_path_factory.mktemp("project")
    skip = shutil.ignore_patterns("__pycache__", "models", "artefacts")
    for folder in ("modules", "tests", "demo"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for block in blocks("CONTRIBUTING.md", "python"):
        if "file" in block.settings:
            (copy / block.settings["file"]).write_text(block.code, "utf-8")
        elif "into" in block.settings:
            insert(copy / block.settings["into"], block.settings["after"], block.code)
    published_pixart(copy / "pixart-sigma-1024.safetensors")
    code = next(block.code for block in blocks("CONTRIBUTING.md", "python") if block.settings.get("run") == "manifest")
    run([sys.executable, "-c", code], copy, PYTHONPATH="modules")
    return copy


def insert(file: Path, after: str, code: str) -> None:
    """Put code below the first line that begins with `after`."""
    lines = file.read_text("utf-8").splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if line.startswith(after))
    file.write_text("".join([*lines[: index + 1], code, *lines[index + 1 :]]), "utf-8")


def published_pixart(file: Path) -> None:
    """PixArt-Σ's 1024 pixel transformer in its authors' names, in bf16, at full size and sparse."""
    shapes = shapes_of("PixArtTransformer2DModel", {"caption_channels": 4096, "use_additional_conditions": False})
    tensors = {"pos_embed": (1, 4096, 1152), "y_embedder.y_embedding": (300, 4096)}
    for name, (rows, *columns) in shapes.items():
        if re.search(r"attn1\.to_[kv]|attn2\.to_v", name):
            continue  # below their to_q and to_k
        count = 3 if "attn1.to_q" in name else 2 if "attn2.to_k" in name else 1
        for part, whole in {
            "transformer_blocks": "blocks", "attn1.to_q": "attn.qkv", "attn2.to_k": "cross_attn.kv_linear",
            "attn2.to_q": "cross_attn.q_linear", "attn1.to_out.0": "attn.proj", "attn2.to_out.0": "cross_attn.proj",
            "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2", "pos_embed.proj": "x_embedder.proj",
            "caption_projection.linear_": "y_embedder.y_proj.fc", "adaln_single.linear": "t_block.1",
            "adaln_single.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
            "adaln_single.emb.timestep_embedder.linear_2": "t_embedder.mlp.2", "proj_out": "final_layer.linear",
        }.items():  # fmt: skip
            name = name.replace(part, whole)
        tensors["final_layer.scale_shift_table" if name == "scale_shift_table" else name] = (count * rows, *columns)
    write_sparse(file, {name: ("BF16", shape) for name, shape in tensors.items()})


def test_worked_architecture_passes_all_tests(with_pixart: Path) -> None:
    """Detected under every prefix, planned at full size, loaded bit for bit in both layouts."""
    told = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_pixart.py",
         "tests/test_architectures.py", "-k", "pixart or PixArt or manifest_has_an_expected or spec_is_unique"],
        with_pixart,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", told)
    assert passed and int(passed[1]) >= 7, told
    assert "skipped" not in told


def test_worked_architecture_is_the_one_that_inspect_names(with_pixart: Path) -> None:
    code = "import sys; from transplant.cli import main; sys.exit(main(['inspect', 'pixart-sigma-1024.safetensors']))"
    told = run([sys.executable, "-c", code], with_pixart, PYTHONPATH="modules")
    assert re.search(r"^architecture\s+PixArt$", told, re.MULTILINE)
    assert re.search(r"^layout\s+original$", told, re.MULTILINE)


def test_worked_architecture_is_clean(with_pixart: Path) -> None:
    """The files of the example meet the rules that the page states."""
    files = [block.settings["file"] for block in blocks("CONTRIBUTING.md", "python") if "file" in block.settings]
    assert len(files) == 2
    for command in (["check"], ["format", "--check"]):
        run([sys.executable, "-m", "ruff", *command, *files], with_pixart)


def test_commands_of_contributing() -> None:
    """Each exists; the tests themselves are only collected, for they are running."""
    for block in blocks("CONTRIBUTING.md", "sh"):
        for line in block.code.splitlines():
            more = ["--collect-only", "-q"] if line == "python3 extension.py test" else []
            if not line.startswith((".venv/bin/ruff", ".venv/bin/pyright")):  # test_layering runs those
                assert "test_docs.py" in run([*as_here(line), *more], ROOT)


# README.md


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the project's to a command line, and may be written to."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "extension.py").symlink_to(ROOT / "extension.py")
    (folder / "modules").symlink_to(ROOT / "modules")
    (folder / "demo").mkdir()
    (folder / "demo" / "trained").symlink_to(ROOT / "demo" / "trained")
    return folder


@pytest.fixture(scope="module")
def used(checkout: Path) -> Path:
    """The same after the commands of README.md, but for the server."""
    for line in commands():
        if not is_server(line) and line != "python3 extension.py test":
            run(as_here(line), checkout)
    return checkout


def commands() -> Iterator[str]:
    for block in blocks("README.md", "sh"):
        yield from block.code.replace("\\\n", "").strip().splitlines()


def is_server(line: str) -> bool:
    return line == "python3 extension.py" or line.startswith("python3 extension.py --")


def test_command_lines_of_readme(used: Path) -> None:
    """All of them run, and leave what they promise."""
    assert {"demo", "picture.png"} <= {path.name for path in used.iterdir()}
    assert (used / "demo" / "converted").is_dir()
    assert sum("extension.py inspect" in line for line in commands()) >= 1
    assert sum("extension.py generate" in line for line in commands()) == 1


def test_library_use_of_readme(used: Path) -> None:
    (used / "picture.png").unlink(missing_ok=True)
    (example,) = blocks("README.md", "python")
    run([sys.executable, "-c", example.code], used, PYTHONPATH="modules")
    assert (used / "picture.png").is_file()


@pytest.mark.parametrize("line", [line for line in commands() if is_server(line)])
def test_server_of_readme(line: str, tmp_path: Path) -> None:
    """It answers with the page."""
    options = ["--port", "0", "--no-browser", "--data-dir", str(tmp_path)]
    log = tmp_path / "log"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache")}  # whatever lies in the user's own
    with log.open("w") as output:
        server = subprocess.Popen(
            [*as_here(line), *options], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            with urllib.request.urlopen(wait_for_address(server, log), timeout=60) as answer:
                assert b"Transplant" in answer.read()
        finally:
            server.terminate()
            server.wait(60)


def wait_for_address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"runs at (http://\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.2)
    pytest.fail(f"no server: {log.read_text()}")


def test_options_page_is_what_the_options_say() -> None:
    """docs/options.md is made by docs/make_options.py."""
    made = runpy.run_path(str(ROOT / "docs" / "make_options.py"))["markdown"]()
    assert (ROOT / "docs" / "options.md").read_text("utf-8") == made


def test_architectures_page_is_what_the_specs_say() -> None:
    """docs/architectures.md is made by docs/make_architectures.py."""
    made = runpy.run_path(str(ROOT / "docs" / "make_architectures.py"))["markdown"]()
    assert (ROOT / "docs" / "architectures.md").read_text("utf-8") == made


def test_readme_lists_every_architecture() -> None:
    (sentence,) = re.findall(r"^Recognised by name: (.+)\.$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(sentence.split(", ")) == sorted(spec.name for spec in SPECS)


# All of them


@pytest.mark.parametrize("document", DOCS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("https://"):
            assert (ROOT / document).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("document", DOCS)
def test_files_that_are_named_exist(document: str) -> None:
    """Paths in code marks are those of the project."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`((?:modules|tests|benchmarks|docs|demo|scripts)/[\w./-]+\.(?:py|md|json))`", text):
        assert (ROOT / path).exists() or "pixart" in path, path


def test_tests_that_the_design_names_exist() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (ROOT / "docs" / "design.md").read_text("utf-8"))
    assert len(named) > 20
    for file, function in named:
        assert f"\ndef {function}(" in (ROOT / file).read_text("utf-8"), f"{file}::{function}"
