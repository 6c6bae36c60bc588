"""The extension inside a host: in the stand-in, always; in a real SD.Next, where SDNEXT_FOLDER names one.

tests/sdnext_stand_in/checks.py holds what is checked; it runs once, in a process of its own, and each of its checks is
a test here.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = Path(__file__).parent / "sdnext_stand_in"
CHECKS = [
    node.name
    for node in ast.parse((STAND_IN / "checks.py").read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


def make_host(folder: Path) -> Path:
    """The stand-in with our extension, another one that has files of the same names, and SDNQ as its own package."""
    shutil.copytree(STAND_IN, folder)
    (folder / "extensions").mkdir()
    (folder / "extensions" / "transplant").symlink_to(ROOT)
    other = folder / "extensions" / "another"
    for name in ("scripts/another.py", "modules/transplant_other.py", "extension.py", "install.py"):
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text("OF = 'another extension'\n")
    (other / "scripts" / "another.py").write_text("import extension, install\nassert extension.OF == install.OF\n")
    spec = importlib.util.find_spec("sdnq")
    assert spec and spec.submodule_search_locations
    (folder / "modules" / "sdnq").symlink_to(spec.submodule_search_locations[0])
    return folder


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By check, what went wrong; an empty list where nothing did."""
    host = make_host(tmp_path_factory.mktemp("sdnext") / "host")
    paths = os.pathsep.join([str(host), str(ROOT / "tests"), str(ROOT / "demo")])
    command = [sys.executable, "-m", "pytest", "checks.py", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
               "--rootdir", str(host), "--junitxml", "result.xml", "--tb=short", "--durations=8"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": paths, "SDNQ_USE_TORCH_COMPILE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=host, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert (host / "result.xml").is_file(), done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for case in xml.parse(host / "result.xml").iter("testcase"):
        wrong = [f"{case.get('name')}\n{part.text}" for part in case if part.tag in ("failure", "error", "skipped")]
        found.setdefault((case.get("name") or "").partition("[")[0], []).extend(wrong)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_stand_in(check: str, outcome: dict[str, list[str]]) -> None:
    """See the check of that name in sdnext_stand_in/checks.py."""
    assert check in outcome, f"it did not run: {sorted(outcome)}"
    assert not outcome[check], "\n".join(outcome[check])
