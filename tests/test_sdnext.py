"""The extension inside a host: in the stand-in, always; in a real SD.Next, where one is named.

tests/sdnext_stand_in/checks.py holds what is checked; it runs once, in a process of its own, and each of its checks is
a test here. The real one: SDNEXT_FOLDER is its checkout, SDNEXT_PYTHON the Python of its environment.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as xml
from contextlib import closing
from pathlib import Path
from typing import Any

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


@pytest.mark.skipif("SDNEXT_FOLDER" not in os.environ, reason="SDNEXT_FOLDER names no checkout of SD.Next")
def test_in_the_real_host(tmp_path: Path) -> None:
    """It starts with us, has our options and routes, and its log holds no complaint of ours."""
    data = tmp_path / "data"
    (data / "extensions").mkdir(parents=True)
    (data / "extensions" / "transplant").symlink_to(ROOT)
    settings = {"offline_mode": True, "sd_checkpoint_autoload": False, "theme_type": "Standard"}
    (data / "config.json").write_text(json.dumps(settings))
    write_wrong(data / "models" / "UNET" / "wrong.safetensors")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        os.environ.get("SDNEXT_PYTHON", sys.executable), "launch.py", "--skip-all", "--skip-git", "--skip-env",
        "--use-cpu", "all", "--insecure", "--server-name", "127.0.0.1", "--port", str(port), "--data-dir", str(data),
        "--models-dir", str(data / "models"), "--extensions-dir", str(data / "extensions"), "--log",
        str(data / "log.txt"),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SDNQ_USE_TORCH_COMPILE": "0"}
    environment.pop("PYTHONPATH", None)
    with (data / "console.txt").open("w") as console:
        host = subprocess.Popen(
            command, cwd=os.environ["SDNEXT_FOLDER"], env=environment, stdout=console, stderr=subprocess.STDOUT
        )
        try:
            slots = when_it_answers(host, f"http://127.0.0.1:{port}/transplant/v1/slots")
            assert [slot["option"] for slot in slots] == ["sd_unet", "sd_unet_secondary"]
            assert {slot["selected"] for slot in slots} == {"Default"}
            with pytest.raises(urllib.error.HTTPError, match="422"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/transplant/v1/inspect?file=wrong", timeout=60)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as page:
                text = page.read().decode()
            assert all(f"setting_{key}" in text for key in ("transplant_loader", "transplant_gguf", "transplant_swap"))
            assert "transplant_refresh" in text
        finally:
            host.terminate()
            host.wait(60)
    told = (data / "log.txt").read_text("utf-8", errors="replace")
    assert "Transplant:" not in told and "Transplant is off" not in told


def write_wrong(file: Path) -> None:
    """A web page where a checkpoint should be."""
    file.parent.mkdir(parents=True)
    file.write_text("<!DOCTYPE html>")


def when_it_answers(host: subprocess.Popen[bytes], address: str) -> Any:
    """The answer of a host that is starting."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline and host.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(1)
    pytest.fail("the host does not answer")
