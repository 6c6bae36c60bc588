"""Runs the scripts of extensions: their folder is on sys.path meanwhile, and nothing that they add stays there."""

import importlib.util
import sys
from pathlib import Path

from modules.logger import log

failed = []


def load_scripts():
    for script in sorted(Path("extensions").glob("*/scripts/*.py")):
        before = list(sys.path)
        sys.path = [str(script.parent.parent), *sys.path]
        try:
            spec = importlib.util.spec_from_file_location(script.name, script)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:
            failed.append(error)
            log.error(f"Module load: {script} {error}")
        finally:
            sys.path = before
