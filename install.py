"""Keeps the Python environment that Transplant runs in.

In a host (`python install.py`) there is nothing to do: every library that Transplant uses there is the host's own, in
the version the host pins. Alone, extension.py calls `prepare()`, which keeps `.venv` in step with the requirements.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

REQUIREMENTS = ("requirements.txt", "requirements-test.txt")  # each includes the ones before it


class SetupError(Exception):
    """The environment cannot be prepared; the message says what is wrong and what to do."""


def prepare(root: Path, *, test: bool = False) -> Path:
    """Makes `root/.venv` hold what the requirements name, and returns its Python.

    When the stamps say that nothing changed, this only reads a few small files. A start that was stopped or killed
    half-way is made good by the next one.

    Args:
        root: the project's folder.
        test: install requirements-test.txt too.

    Raises:
        SetupError: no network, a full disk, a Python without `venv`, or whatever else pip stumbles over.
    """
    venv = root / ".venv"
    names = REQUIREMENTS if test else REQUIREMENTS[:1]
    os.environ.pop("PYTHONHOME", None)  # it would send the environment's Python to another library folder
    try:
        if not _is_prepared(venv, names):
            with _locked(root / ".venv.lock"):
                if not _is_prepared(venv, names):  # another start may have done it meanwhile
                    _make_prepared(venv, names)
    except OSError as error:
        raise SetupError(explain_failure(str(error), venv)) from error
    return _python_of(venv)


def is_running_in(root: Path) -> bool:
    """Tells whether this process runs in the Python of `root/.venv`."""
    venv = root / ".venv"
    return venv.exists() and os.path.samefile(sys.prefix, venv)


def run_python(python: Path, arguments: list[str]) -> int:
    """Runs a Python in place of this process and returns its exit status (on POSIX it never returns)."""
    command = [str(python), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform != "win32":
        os.execv(command[0], command)
    process = subprocess.Popen(command)  # exec on Windows would give the console back at once
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the child got the same Ctrl-C and decides what it means
            continue


def fingerprint(venv: Path, names: tuple[str, ...]) -> str:
    """Returns a hash of requirement files and of the Python in `venv`; another hash means install again."""
    digest = hashlib.sha256()
    for path in (*(venv.parent / name for name in names), venv / "pyvenv.cfg"):
        digest.update(path.read_text(encoding="utf-8").encode() + b"\0")
    digest.update(os.path.realpath(_python_of(venv)).encode())  # moves when the system's Python is replaced
    return digest.hexdigest()


def explain_failure(output: str, venv: Path) -> str:
    """Turns what pip or venv wrote into one message: what is wrong, what to do."""
    if re.search(r"No space left on device|Errno 28\b|not enough space on the disk|Disk quota exceeded", output):
        return _full_disk(venv)
    if "ensurepip is not available" in output:
        return _NO_VENV
    if "CERTIFICATE_VERIFY_FAILED" in output:
        return (
            "the package index was reached, but its certificate is not trusted. Check this machine's clock; behind a "
            "proxy with a certificate of its own set PIP_CERT to that certificate. Then run the same command again."
        )
    if re.search(r"Retrying \(|ConnectionError|NameResolutionError|ProxyError|ReadTimeoutError|IncompleteRead", output):
        return _OFFLINE
    missing = re.search(r"No matching distribution found for (.+)", output)
    if missing:
        return (
            f"pip finds no build of {missing[1].strip()} for this system and the Python in {venv}. Transplant runs on "
            "64-bit Python 3.10 to 3.13: delete that folder and start with one of these. If PIP_NO_INDEX, "
            "PIP_INDEX_URL or PIP_FIND_LINKS is set, check that the place it names holds the package."
        )
    if re.search(r"Permission denied|Access is denied|Read-only file system", output):
        return f"cannot write to {venv}. Give yourself write access to that folder and run again:{_tail(output)}"
    return f"{venv} could not be prepared. Mend what is said here and run the same command again:{_tail(output)}"


_NO_VENV = (
    f"this Python ({sys.executable}) cannot make environments: its venv or ensurepip module is missing. On Debian or "
    "Ubuntu run `sudo apt install python3-venv`; elsewhere use a Python from python.org. Then run this command again."
)
_OFFLINE = (
    "the package index cannot be reached, so the packages that Transplant needs are not installed yet.\n"
    "Connect this machine to the internet and run the same command again; what was downloaded already is used.\n"
    "Behind a proxy, set HTTPS_PROXY first. For a machine that stays offline, run on a connected one with the same\n"
    "system and Python version `python3 -m pip download -r requirements-test.txt -d wheels`, copy the folder over,\n"
    "and run with PIP_NO_INDEX=1 and PIP_FIND_LINKS=/path/to/wheels."
)


def _full_disk(venv: Path) -> str:
    free = {str(folder): shutil.disk_usage(folder).free for folder in (venv.parent, Path(tempfile.gettempdir()))}
    listed = ", ".join(f"{size / 1e9:.1f} GB free in {folder}" for folder, size in free.items())
    return (
        f"the disk is full ({listed}). Make room (torch with CUDA can take 10 GB while it installs), or set TMPDIR "
        "to a folder on a larger disk if only the temporary folder is small. Then run the same command again."
    )


def _tail(output: str) -> str:
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return "".join(f"\n  {line}" for line in lines[-12:])


def _say(text: str) -> None:
    """Tells the user; on stderr, because a command's own output may be read by a program."""
    print(f"transplant: {text}", file=sys.stderr, flush=True)


def _python_of(venv: Path) -> Path:
    return venv / "Scripts" / "python.exe" if sys.platform == "win32" else venv / "bin" / "python"


def _stamp_of(venv: Path, name: str) -> Path:
    return venv / f".installed-{name}"


def _is_prepared(venv: Path, names: tuple[str, ...]) -> bool:
    stamp = _stamp_of(venv, names[-1])
    if not (stamp.exists() and (venv / "pyvenv.cfg").exists() and _python_of(venv).exists()):
        return False
    return stamp.read_text(encoding="utf-8") == fingerprint(venv, names)


def _make_prepared(venv: Path, names: tuple[str, ...]) -> None:
    for name in REQUIREMENTS:  # from here until pip is through, the environment is in no known state
        _stamp_of(venv, name).unlink(missing_ok=True)
    if not _has_pip(_python_of(venv)):
        _make_venv(venv)
    _say(f"installing the packages of {names[-1]} into {venv} (the first time this takes minutes; Ctrl-C is safe)")
    status, output = _run_pip(_python_of(venv), venv.parent / names[-1])
    if status != 0:
        raise SetupError(explain_failure(output, venv))
    for count, name in enumerate(names, start=1):
        _write_whole(_stamp_of(venv, name), fingerprint(venv, names[:count]))


def _has_pip(python: Path) -> bool:
    """Tells whether pip can install; `pip --version` works even where half of pip is missing."""
    if not python.exists():
        return False
    command = [str(python), "-I", "-m", "pip", "install", "--help"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _make_venv(venv: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetupError(_NO_VENV)
    if is_running_in(venv.parent):
        raise SetupError(f"pip in {venv} is broken. Start with the system's Python instead: python3 extension.py")
    _say(f"making the environment {venv}")
    for command in (
        [sys.executable, "-I", "-m", "venv", "--clear", "--without-pip", os.path.realpath(venv)],
        [str(_python_of(venv)), "-I", "-m", "ensurepip", "--default-pip"],  # apart, because venv hides why it fails
    ):
        made = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if made.returncode != 0:
            raise SetupError(explain_failure(made.stdout + made.stderr, venv))


def _run_pip(python: Path, requirements: Path) -> tuple[int, str]:
    """Installs a requirements file, pip's progress going to stderr; returns the exit status and pip's complaints."""
    command = [str(python), "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["--requirement", str(requirements)]
    environment = {**os.environ, "PIP_USER": "0"}
    complaints: list[str] = []
    # close_fds=False hands the lock on: should this process be killed, pip keeps it until it ends too.
    with subprocess.Popen(
        command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, close_fds=False
    ) as process:
        try:
            for line in process.stderr or ():
                if "Retrying (" in line and not any("Retrying (" in earlier for earlier in complaints):
                    _say("the package index does not answer; trying again for a while")
                complaints.append(line)
            return process.wait(), "".join(complaints)
        except KeyboardInterrupt:
            _let_end(process)
            raise


def _let_end(process: subprocess.Popen[str]) -> None:
    """Waits for a pip that got the same Ctrl-C, so that it can tidy up; ends one that did not."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.terminate()


def _write_whole(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Keeps two starts from installing into one environment at the same time."""
    with path.open("a+") as file:
        os.set_inheritable(file.fileno(), True)
        if not _try_lock(file):
            _say("another start is installing into the same environment; waiting for it")
            while not _try_lock(file):
                time.sleep(0.2)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # a file system without locks: go on
    return True


if __name__ == "__main__":
    print("Transplant: nothing to install in a host. To run alone: python3 extension.py")
