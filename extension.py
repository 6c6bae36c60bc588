"""Starts Transplant: alone with `python3 extension.py`, in a host through `register()`.

Alone it needs nothing but Python 3.10: install.py prepares `.venv` beside this file, and the command goes on in the
Python of that environment. In a host nothing is installed; scripts/transplant.py calls `register()`.
"""

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

# Up to here, and in its syntax throughout, this file is Python 3.6: an old Python must get far enough to say so.
if __name__ == "__main__" and sys.version_info < (3, 10):
    sys.exit(
        "Transplant needs Python 3.10 or newer; "
        f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}.\n"
        "Install a newer Python and start with it, for example: python3.12 extension.py"
    )

ROOT = Path(__file__).resolve().parent
COMMANDS = ("serve", "inspect", "load", "convert", "generate", "test")
USAGE = """\
usage: python3 extension.py [serve|inspect|load|convert|generate|test] ...

  serve      the WebUI on this machine; also what runs without a command
  inspect    says what a transformer file holds and whether it can be loaded
  load       loads a file over a base model, reports time and memory
  convert    writes what a file holds as a diffusers folder
  generate   makes a picture
  test       runs the tests; its arguments go to pytest, paths count from the project's folder

`python3 extension.py COMMAND --help` lists the options of a command.
The first run makes .venv and installs the packages of requirements.txt there; it needs a network."""
WHOLE_SUITE = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_ANALYTICS_ENABLED": "False"}

log = logging.getLogger("transplant")


def split_arguments(argv: list[str]) -> tuple[str, list[str]]:
    """Splits a command line into the command and its arguments.

    Nothing, or an option first (`--port 7861`), means `serve`.
    """
    if not argv or argv[0].startswith("-"):
        return "serve", list(argv)
    return argv[0], argv[1:]


def main(argv: list[str]) -> int:
    """Prepares `.venv`, goes on in its Python and runs the command.

    Returns:
        The exit status: the command's own; 1 when the call is wrong or the environment cannot be prepared; 130 when
        Ctrl-C ended the preparation.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    command, arguments = split_arguments(argv)
    if command not in COMMANDS:
        print(f"transplant: there is no command {command!r}.\n\n{USAGE}", file=sys.stderr)
        return 1
    setup = _load_setup()
    try:
        python = setup.prepare(ROOT, test=command == "test")
    except setup.SetupError as error:
        print(f"transplant: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntransplant: stopped. Run the same command to go on installing.", file=sys.stderr)
        return 130
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if command == "test":
        os.chdir(ROOT)
        return setup.run_python(python, ["-m", "pytest", *(arguments or WHOLE_SUITE)])
    if not setup.is_running_in(ROOT):
        return setup.run_python(python, [str(ROOT / "extension.py"), command, *arguments])
    _add_package_path()
    return importlib.import_module("transplant.cli").main([command, *arguments])


def register() -> None:
    """Registers Transplant in the host that runs this process; may be called again.

    Whatever goes wrong is one line in the log: the host starts without Transplant.
    """
    if "modules.shared" not in sys.modules:
        log.warning("Transplant: no host is running here; to run alone, start extension.py")
        return
    try:
        _add_package_path()
        importlib.import_module("transplant.hosts.sdnext").register()
    except Exception as error:  # the host boundary: no fault of ours may stop the host
        reason = " ".join(str(error).split())
        log.error("Transplant is off: it could not start in this host (%s: %s)", type(error).__name__, reason)
        log.debug("Transplant is off because of", exc_info=True)


def _add_package_path() -> None:
    path = str(ROOT / "modules")
    if path not in sys.path:
        sys.path.insert(0, path)


def _load_setup() -> ModuleType:
    """Loads install.py by its path: `install` is a name that others use too."""
    spec = importlib.util.spec_from_file_location("transplant_install", ROOT / "install.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {ROOT / 'install.py'}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
