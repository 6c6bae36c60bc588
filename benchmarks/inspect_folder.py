"""Measures what it takes to say what the files of a folder are, against safetensors' own reading of their headers.

    python benchmarks/inspect_folder.py [--files 1000] [--dir DIR] [--runs 3]

Makes a folder of files with the names of real checkpoints (500 to 4,500 tensors each) and no data to speak of, and
deletes it at the end. Three ways take turns in fresh processes: Transplant with an empty cache, Transplant with what
that left behind, and `safetensors.safe_open(...).keys()` over the same files. Medians; imports are not counted.
"""

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("modules", "tests", "demo")]

SOURCES = (
    "krea2_raw_int8_convrot", "wan22_t2v_a14b_low_noise_fp16", "flux1_dev_bfl_bf16", "z_image_turbo_comfy_int8_convrot",
    "hunyuan_video_t2v_bf16", "aio_sd15_fp32", "flux1_dev_fp8_scaled", "qwen_image_bf16", "aio_sdxl_fp16",
    "qwen_image_fp8mixed",
)  # fmt: skip
MAX_COLD, MAX_CACHED = 10.0, 0.3
"""The targets for 1,000 files, in seconds."""

WAYS = ("cold", "cached", "safetensors")


def make_files(folder: Path, count: int) -> int:
    """Write the files. Gives the number of their tensors."""
    from tiny_models import manifest, write_sparse

    sources = [manifest(name) for name in SOURCES]
    tensors = 0
    for number in range(count):
        source = sources[number % len(sources)]
        small = {name: (dtype, (min(shape[0], 2),) if shape else ()) for name, (dtype, shape) in source.tensors.items()}
        write_sparse(folder / f"{number % 7}" / f"{number:05d}.safetensors", small, source.metadata)
        tensors += len(small)
    return tensors


def measure(way: str, folder: Path, cache: Path) -> dict[str, Any]:
    """One way, in this process."""
    if way == "safetensors":
        from safetensors import safe_open

        files = sorted(folder.rglob("*.safetensors"))
        start = time.perf_counter()
        for file in files:
            with safe_open(file, "np") as opened:
                opened.keys()
        return {"seconds": time.perf_counter() - start, "files": len(files)}
    from transplant.inventory import Inventory, checkpoints_in

    if way == "cold":
        cache.unlink(missing_ok=True)
    start = time.perf_counter()
    entries = Inventory(cache).look_at(checkpoints_in(folder))
    seconds = time.perf_counter() - start
    if not all(entry.architecture for entry in entries.values()):
        raise SystemExit("a file was not recognised")
    return {"seconds": seconds, "files": len(entries)}


def run_apart(way: str, folder: Path, cache: Path) -> dict[str, Any]:
    """One way in a fresh process."""
    command = [sys.executable, __file__, "--measure", way, "--dir", str(folder), "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def report(results: dict[str, Sequence[float]], files: int, tensors: int) -> str:
    """The table."""
    median = {way: statistics.median(seconds) for way, seconds in results.items()}
    names = {
        "cold": "Transplant, nothing cached",
        "cached": "Transplant, from its cache",
        "safetensors": f"safetensors {importlib.metadata.version('safetensors')}, names only",
    }
    lines = [f"{files:,} files, {tensors:,} tensors.", "", "| | seconds | against safetensors |", "|---|---|---|"]
    for way in WAYS:
        lines.append(f"| {names[way]} | {median[way]:.3f} | {median[way] / median['safetensors']:.2f} |")
    share = files / 1000
    lines += [
        "", f"Targets for as many files: {MAX_COLD * share:.2f} s and {MAX_CACHED * share:.3f} s; "
        f"cold {'met' if median['cold'] <= MAX_COLD * share else 'missed'}, "
        f"cached {'met' if median['cached'] <= MAX_CACHED * share else 'missed'}.",
    ]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where the temporary folder is made")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.measure:
        print(json.dumps(measure(given.measure, given.dir, given.cache)))
        return 0
    with tempfile.TemporaryDirectory(prefix="transplant-inspect-", dir=given.dir) as place:
        folder, cache = Path(place) / "files", Path(place) / "cache.json"
        tensors = make_files(folder, given.files)
        results: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.runs):
            for way in WAYS:
                measured = run_apart(way, folder, cache)
                if measured["files"] != given.files:
                    raise SystemExit(f"{way} saw {measured['files']} of {given.files} files")
                results[way].append(measured["seconds"])
        print(report(results, given.files, tensors))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
