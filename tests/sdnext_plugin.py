"""A pytest plugin: the tests run on the SDNQ that an SD.Next checkout carries, in that checkout's own Python.

What that Python lacks for testing (pytest, comfy-kitchen, ...) comes last on sys.path.
"""

import importlib
import os
import sys

CHECKOUT = os.environ["SDNEXT_FOLDER"]


def load_host_sdnq():
    """Import the host far enough for its SDNQ, as its own scripts do."""
    sys.path.insert(0, CHECKOUT)
    arguments, sys.argv = sys.argv, ["launch.py", "--use-cpu", "all", "--data-dir", os.environ["SDNEXT_DATA"]]
    try:
        return importlib.import_module("modules.sdnq")
    finally:
        sys.argv = arguments


host_sdnq = load_host_sdnq()
importlib.import_module("transplant.sdnq_package").use(host_sdnq)
