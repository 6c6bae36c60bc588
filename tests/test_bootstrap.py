"""The way from a bare Python to a running command, and the way into a host.

Each start here is a real process on a copy of the start files, with a tiny package in place of torch. pip is real too;
it sees no configuration of this machine and no network.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
CLI = """\
import json, os, sys

def main(argv: list[str]) -> int:
    import trivial
    telemetry = [os.environ.get(name) for name in ("HF_HUB_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED")]
    print(json.dumps({"argv": argv, "prefix": sys.prefix, "trivial": trivial.VERSION, "telemetry": telemetry}))
    return 7
"""
NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tested_{name}", ROOT / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = load("extension")
install = load("install")


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


class Project:
    """A copy of the start files with requirements of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.stamp = self.venv / ".installed-requirements.txt"
        (root / "modules" / "transplant").mkdir(parents=True)
        (root / "modules" / "transplant" / "__init__.py").touch()
        (root / "modules" / "transplant" / "cli.py").write_text(CLI)
        for name in ("extension.py", "install.py"):
            shutil.copy(ROOT / name, root)
        for version in ("1.0", "2.0"):
            write_wheel(root / "wheels", "trivial", version)
        write_wheel(root / "wheels", "pytest", "1.0")
        self.require("trivial==1.0")

    def require(self, requirement: str) -> None:
        (self.root / "requirements.txt").write_text(requirement + "\n")
        (self.root / "requirements-test.txt").write_text("-r requirements.txt\npytest==1.0\n")

    def environment(self, index: dict[str, str] | None) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HF_", "GRADIO_"))}
        wheels = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.root / "wheels")}
        return {**clean, "PIP_CONFIG_FILE": os.devnull, **(wheels if index is None else index)}

    def start(self, *arguments: str, index: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts the copy in a process group of its own; its pip gets the wheels, or the `index` given."""
        return subprocess.Popen(
            [sys.executable, str(self.root / "extension.py"), *arguments],
            env=self.environment(index),
            cwd=self.root.parent,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *arguments: str, index: dict[str, str] | None = None) -> tuple[int, str, str]:
        process = self.start(*arguments, index=index)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that was started once; what it found was an environment whose making was broken off before pip."""
    project = Project(tmp_path_factory.mktemp("project"))
    command = [sys.executable, "-m", "venv", "--without-pip", str(project.venv)]
    subprocess.run(command, check=True, timeout=60)
    status, out, err = project.run("--port", "7861")
    assert status == 7, err
    assert "making the environment" in err
    assert json.loads(out) == {  # nothing else on stdout: a command's output may be read by a program
        "argv": ["serve", "--port", "7861"],
        "prefix": str(project.venv),
        "trivial": "1.0",
        "telemetry": ["1", "False"],
    }
    return project


@contextmanager
def silent_index() -> Iterator[dict[str, str]]:
    """A package index that takes a connection and never answers, to catch pip in the middle of its work."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/", "PIP_DEFAULT_TIMEOUT": "60"}


def wait_until_pip_asks(process: subprocess.Popen[str]) -> None:
    assert process.stderr
    for line in process.stderr:
        if line.startswith("Looking in indexes"):  # the first thing pip says
            return
    pytest.fail("pip was not started")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("serve", [])),
        (["--port", "7861"], ("serve", ["--port", "7861"])),
        (["serve", "--listen"], ("serve", ["--listen"])),
        (["inspect", "a.safetensors", "--json"], ("inspect", ["a.safetensors", "--json"])),
        (["test", "-k", "serve"], ("test", ["-k", "serve"])),
    ],
)
def test_without_a_command_it_serves(argv: list[str], expected: tuple[str, list[str]]) -> None:
    assert extension.split_arguments(argv) == expected


@pytest.mark.parametrize(("argv", "status"), [(["--help"], 0), (["-h"], 0), (["insepct", "x"], 1)])
def test_help_and_a_misspelt_command_install_nothing(
    argv: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extension, "_load_setup", lambda: pytest.fail("prepared an environment"))
    assert extension.main(argv) == status
    said = capsys.readouterr()
    assert all(command in said.out + said.err for command in extension.COMMANDS)
    assert ("'insepct'" in said.err) == (status == 1)


def test_an_old_python_can_parse_the_start_file() -> None:
    source = (ROOT / "extension.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "from __future__" not in source  # `annotations` is a syntax error on 3.6


def test_second_start_does_not_touch_pip(project: Project) -> None:
    status, out, err = project.run("inspect", "a b.safetensors", "--json", index=NOWHERE)
    assert (status, err) == (7, "")
    assert json.loads(out)["argv"] == ["inspect", "a b.safetensors", "--json"]


def test_its_own_python_may_start_it(project: Project) -> None:
    python = project.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [str(python), str(project.root / "extension.py"), "load"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=project.environment(NOWHERE))
    assert (done.returncode, done.stderr) == (7, "")


def test_a_changed_requirement_is_installed_and_test_includes_serve(project: Project) -> None:
    project.require("trivial==2.0")
    status, _, err = project.run("test", "tests/test_x.py", "-q")
    assert status == 0, err  # the stand-in for pytest is an empty module
    assert "Successfully installed" in err
    assert "trivial-2.0" in err
    status, out, err = project.run("load", index=NOWHERE)
    assert (status, err) == (7, "")
    assert json.loads(out)["trivial"] == "2.0"


def test_offline_says_what_to_do_and_the_next_start_goes_on(project: Project) -> None:
    project.require("trivial==1.0")
    status, out, err = project.run(index=NOWHERE)
    assert (status, out) == (1, "")
    assert "the package index cannot be reached" in err
    assert "run the same command again" in err
    assert "PIP_FIND_LINKS" in err
    assert "Traceback" not in err
    assert "ERROR" not in err  # pip would say that no such version exists
    assert not project.stamp.exists()
    status, out, _ = project.run()
    assert (status, json.loads(out)["trivial"]) == (7, "1.0")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("blow", ["SIGINT", "SIGKILL"])
def test_broken_off_while_installing(project: Project, blow: str) -> None:
    """The old requirements come back after the blow: their old stamp must not count any more."""
    project.require("trivial==1.0")
    assert project.run()[0] == 7
    project.require("absent==1.0")
    with silent_index() as index:
        process = project.start(index=index)
        wait_until_pip_asks(process)
        os.killpg(process.pid, getattr(signal, blow))
        _, err = process.communicate(timeout=30)
    if blow == "SIGINT":
        assert process.returncode == 130
        assert "Run the same command to go on" in err
        assert "Traceback" not in err
    assert not project.stamp.exists()
    project.require("trivial==1.0")
    status, _, err = project.run()
    assert status == 7
    assert "installing the packages" in err


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and locks")
def test_a_start_waits_for_the_pip_that_a_killed_start_left_behind(project: Project) -> None:
    project.require("absent==1.0")
    with silent_index() as index:
        killed = project.start(index=index)
        wait_until_pip_asks(killed)
        killed.kill()
        killed.wait()
        project.require("trivial==1.0")
        waiting = project.start()
        assert waiting.stderr
        assert "waiting for it" in waiting.stderr.readline()
        os.killpg(killed.pid, signal.SIGKILL)  # now its pip
        killed.communicate(timeout=30)
        waiting.communicate(timeout=30)
    assert waiting.returncode == 7


def test_another_python_or_requirement_is_another_fingerprint(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    venv.mkdir()
    requirements, config = tmp_path / "requirements.txt", venv / "pyvenv.cfg"
    seen = set()
    for requirement, version in (("a==1", "3.10.1"), ("a==2", "3.10.1"), ("a==2", "3.13.0")):
        requirements.write_text(requirement)
        config.write_text(f"version = {version}")
        seen.add(install.fingerprint(venv, ("requirements.txt",)))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("WARNING: Retrying (Retry(total=4)) after ... CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        ("WARNING: Retrying (Retry(total=4)) ...\nERROR: No matching distribution found for a==1", "HTTPS_PROXY"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no build of torch==2.13.0 for"),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/x'", "cannot write to"),
        ("The virtual environment was not created because ensurepip is not available.", "apt install python3-venv"),
        ("error: command 'cc' failed", "command 'cc' failed"),
    ],
)
def test_each_failure_says_what_to_do(output: str, expected: str, tmp_path: Path) -> None:
    assert expected in install.explain_failure(output, tmp_path / ".venv")


def test_a_python_without_venv_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(install.SetupError, match="apt install python3-venv"):
        install.prepare(tmp_path)


def in_host(host: Path, script: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script as a host does: `modules.shared` is there, and the working folder is the host's."""
    (host / "modules").mkdir(parents=True, exist_ok=True)
    (host / "modules" / "__init__.py").touch()
    (host / "modules" / "shared.py").write_text("NAME = 'the host'\n")
    code = (
        "import runpy, sys, modules.shared\n"
        "for _ in range(2): runpy.run_path(sys.argv[1], run_name='host_script')\n"  # registration is repeatable
        "import modules.shared; print('the host goes on', sum('transplant' in name for name in sys.modules) > 0)"
    )
    command = [sys.executable, "-c", code, str(script)]
    return subprocess.run(command, cwd=host, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The extension in a host's folder `extensions`, without any package of ours."""
    folder = tmp_path / "host" / "extensions" / "transplant"
    (folder / "scripts").mkdir(parents=True)
    for name in ("extension.py", "install.py", "scripts/transplant.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def write_adapter(folder: Path, source: str) -> None:
    hosts = folder / "modules" / "transplant" / "hosts"
    hosts.mkdir(parents=True)
    (hosts.parent / "__init__.py").touch()
    (hosts / "__init__.py").touch()
    (hosts / "sdnext.py").write_text(source)


SCRIPT = Path("extensions/transplant/scripts/transplant.py")  # relative, as a host has it


def test_a_host_registers_us(installed: Path) -> None:
    write_adapter(installed, "import modules.shared\ndef register(): print('registered in', modules.shared.NAME)\n")
    done = in_host(installed.parents[1], SCRIPT)
    assert done.stdout.splitlines() == ["registered in the host"] * 2 + ["the host goes on True"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ("def register(): raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import torch_of_another_planet", "ModuleNotFoundError: No module named 'torch_of_another_planet'"),
        ("def register(:", "SyntaxError"),
        (None, "ModuleNotFoundError: No module named 'transplant'"),
    ],
)
def test_a_fault_of_ours_is_one_line_in_the_hosts_log(installed: Path, adapter: str | None, reason: str) -> None:
    if adapter is not None:
        write_adapter(installed, adapter)
    done = in_host(installed.parents[1], SCRIPT)
    assert done.returncode == 0
    assert done.stdout.startswith("the host goes on")
    first, second = done.stderr.splitlines()  # one for each of the two runs
    assert first == second
    assert first.startswith("Transplant is off")
    assert reason in first


def test_the_real_script_runs_from_any_folder(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "transplant.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 15
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "no host is running here" in done.stderr


def test_the_install_hook_leaves_a_host_as_it_is(installed: Path) -> None:
    host = installed.parents[1]
    (host / "launch.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(host)}
    command = [sys.executable, "-X", "importtime", "install.py"]
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert not (installed / ".venv").exists()
    assert not re.search(r"\b(torch|diffusers|transplant)\b", done.stderr)


def test_modules_is_no_package_of_ours() -> None:
    assert not (ROOT / "modules" / "__init__.py").exists()  # it would hide the host's


def test_ci_runs_exactly_the_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec python3 extension.py test"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def test_every_requirement_is_pinned() -> None:
    for name in install.REQUIREMENTS:
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
        for line in filter(None, lines):
            assert line.startswith("-r ") or re.match(r"[\w-]+==[\w.]+( ; python_version [<>=]+ \"3\.\d+\")?$", line)
