"""Writes docs/architectures.md from the specs and the headers of real files: `python docs/make_architectures.py`."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "modules"))

from transplant.architectures import SPECS  # noqa: E402
from transplant.architectures.detect import identify  # noqa: E402
from transplant.architectures.spec import TransformerSpec  # noqa: E402
from transplant.checkpoint.naming import normalise  # noqa: E402

MANIFESTS = DOCS.parent / "tests" / "manifests"
LEGACY = "scaled_fp8"

INTRO = """\
# Architectures

What is recognised by name, in which layouts of keys, and what the headers of real files that the tests go through
hold. Every other class of diffusers' single-file table loads in diffusers' own names and through its converter. This
page is made from the specs and from `tests/manifests` by `python docs/make_architectures.py`.

"follows the file" means that depth or width of the network are taken from the file where they differ from the base
model's. Quantized layouts are those of the files at hand: every format loads in every architecture.
"""


def markdown() -> str:
    """The page."""
    seen = {spec.name: [] for spec in SPECS}
    files: list[str] = []
    for path in sorted(MANIFESTS.glob("*.json.gz")):
        name, manifest = path.name.removesuffix(".json.gz"), json.loads(gzip.decompress(path.read_bytes()))
        found = identify(normalise(path, manifest["tensors"]), metadata=manifest["metadata"])
        held = _quantized(manifest)
        seen[str(found.architecture)] += [text for text in held if text not in seen[str(found.architecture)]]
        layout = found.layout.name if found.layout else ""
        cells = (name, found.kind, str(found.architecture), layout, str(len(manifest["tensors"])), ", ".join(held))
        files.append(_row(*cells))
    head = _head("architecture", "diffusers class", "component", "layouts", "config", "quantized files seen")
    table = "\n".join(_row(*_cells(spec), ", ".join(seen[spec.name])) for spec in SPECS)
    listed = _head("file", "kind", "architecture", "layout", "tensors", "stored as") + "\n".join(files)
    return f"{INTRO}\n{head}{table}\n\n## Real files\n\n{listed}\n"


def _cells(spec: TransformerSpec) -> tuple[str, ...]:
    classes = ", ".join(f"`{cls}`" for cls in (spec.cls, *spec.other_classes))
    layouts = ", ".join(layout.name for layout in spec.layouts)
    return spec.name, classes, spec.component, layouts, "follows the file" if spec.infer_config else "the base's"


def _quantized(manifest: dict[str, Any]) -> list[str]:
    """Formats that markers or the header declare; else the dtypes of the large tensors."""
    declared = Counter(json.loads(text).get("format") for text in manifest["markers"].values())
    header = json.loads((manifest["metadata"] or {}).get("_quantization_metadata", "{}")).get("layers", {})
    declared |= Counter(entry["format"] for entry in header.values())
    if declared:
        return [f"{count} {name}" for name, count in sorted(declared.items())]
    sizes: Counter[str] = Counter()
    for dtype, shape in manifest["tensors"].values():
        sizes[dtype] += len(shape) > 1
    scaled = any(name.endswith(LEGACY) for name in manifest["tensors"])
    dtype = sizes.most_common(1)[0][0]
    return [f"{dtype} with scales" if scaled else dtype]


def _head(*titles: str) -> str:
    return f"{_row(*titles)}\n|{'---|' * len(titles)}\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    (DOCS / "architectures.md").write_text(markdown(), encoding="utf-8")
