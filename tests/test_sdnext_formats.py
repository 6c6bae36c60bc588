"""Every quantized format on the SDNQ of a real SD.Next, in its Python, against comfy-kitchen.

Opt-in: SDNEXT_FOLDER names a checkout, SDNEXT_PYTHON the Python that it runs in, of the same version as this one.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
FILES = ("test_formats.py", "test_formats_blocks.py", "test_formats_4bit.py")
OF_THE_NEWER_FORM = (
    "bytes_a_weight", "reinterpreted", "rows_and_joins", "keeps_one_scale", "compiled", "without_e4m3_conversion",
    "table",
)  # fmt: skip
"""Tests of how the PyPI package holds block scales and tables, which older SDNQ does not have, and of compilation."""

IN_THE_HOST = """
import sys
sys.path[:0] = sys.argv.pop(1).split("|")
sys.path.append(sys.argv.pop(1))
import pytest
sys.exit(pytest.main(["-p", "sdnext_plugin", "-p", "no:cacheprovider", "-q", "--tb=short", *sys.argv[1:]]))
"""


@pytest.mark.skipif("SDNEXT_PYTHON" not in os.environ, reason="SDNEXT_FOLDER and SDNEXT_PYTHON name no SD.Next")
def test_formats_on_the_hosts_sdnq(tmp_path: Path) -> None:
    folders = "|".join(str(TESTS.parent / name) for name in ("modules", "tests", "demo"))
    command = [
        os.environ["SDNEXT_PYTHON"], "-c", IN_THE_HOST, folders, sysconfig.get_path("purelib"),
        *(str(TESTS / name) for name in FILES), "-k", " and ".join(f"not {name}" for name in OF_THE_NEWER_FORM),
    ]  # fmt: skip
    environment = {**os.environ, "SDNEXT_DATA": str(tmp_path), "SDNQ_USE_TORCH_COMPILE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
