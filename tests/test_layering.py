"""Who may import whom, measured in fresh interpreters, and how long functions and files may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modules" / "transplant"
FILES = sorted(PACKAGE.rglob("*.py"))
CORE = [f for f in FILES if "hosts" not in f.relative_to(PACKAGE).parts[:1] and f.name != "cli.py"]
WITHOUT_TORCH = (
    "transplant", "transplant.errors", "transplant.checkpoint.header", "transplant.checkpoint.naming",
    "transplant.architectures.detect", "transplant.base_model", "transplant.slots", "transplant.options",
    "transplant.view", "transplant.formats.containers", "transplant.cli",
)  # fmt: skip


def imports(file: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", CORE, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_core_imports_no_host_and_no_gradio(file: Path) -> None:
    """Of the hosts the core knows the contract only (hosts/base.py)."""
    foreign = [
        name
        for name in imports(file)
        if name.split(".")[0] in ("gradio", "modules", "fastapi", "uvicorn", "launch")
        or (name.startswith("transplant.hosts") and name != "transplant.hosts.base")
        or name.startswith("transplant.cli")
    ]
    assert not foreign


def test_reading_a_header_needs_no_torch() -> None:
    """Header, naming, detection, options and the command line's own start."""
    code = f"import sys, importlib; [importlib.import_module(n) for n in {WITHOUT_TORCH!r}]; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "modules")
    loaded = {name.split(".")[0] for name in out.stdout.split()}
    assert loaded.isdisjoint({"torch", "diffusers", "transformers", "gradio", "numpy"})


def test_core_loads_without_gradio() -> None:
    """Planning, building and swapping import no gradio, not even through a library."""
    code = "import sys, transplant.pipeline, transplant.generate; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "modules")
    assert "gradio" not in out.stdout.split()


def test_modules_is_a_namespace() -> None:
    """With an __init__.py our folder would shadow the host's package of that name."""
    assert not (ROOT / "modules" / "__init__.py").exists()


@pytest.mark.parametrize("file", [*FILES, ROOT / "extension.py", ROOT / "install.py"], ids=lambda f: f.name)
def test_size(file: Path) -> None:
    """Functions under 60 lines, files under 500."""
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["pyright"]], ids=" ".join)
def test_lint(command: list[str]) -> None:
    """ruff and pyright (strict on the package) are clean."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
