"""What an SD.Next-style host runs: hands over to extension.py.

It is loaded by its path, because every extension may have an `extension`.
"""

import importlib.util
from pathlib import Path

path = Path(__file__).resolve().parent.parent / "extension.py"
spec = importlib.util.spec_from_file_location("transplant_extension", path)
if spec and spec.loader:
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    extension.register()
