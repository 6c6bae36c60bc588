"""Measures FP8 storage on Z-Image: the memory of a load, and with a GPU memory and time of a step.

    python benchmarks/fp8_storage.py [--layers 30] [--dir DIR] [--markdown FILE]
    python benchmarks/fp8_storage.py --device cuda [--layers 30] [--steps 10] [--markdown FILE]

The first writes a sparse bf16 file of full size (it takes no disk space) and loads it, each time in a fresh process.
The second makes the network with random weights on the device. benchmarks/README.md says what is measured and how.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from load import QUIET, ROOT, AnonymousMemory, from_single_file, import_everything, machine, markdown_table

BEGIN, END = "<!-- benchmarks/fp8_storage.py begins -->", "<!-- benchmarks/fp8_storage.py ends -->"
MARGIN = 600_000_000
"""The target: a load with FP8 storage may take this much more than the weights that it leaves."""

Measured = dict[str, Any]


# The load, in a process of its own


def make_file(folder: Path, layers: int) -> tuple[Path, Path]:
    """A sparse Z-Image file in ComfyUI layout, bf16, with this many layers, and the base folder for it."""
    import torch

    from tiny_models import to_comfyui, write_sparse
    from transplant.skeleton import resolve_class, shapes_only

    config = {"n_layers": layers, "n_refiner_layers": min(layers, 2)}
    model = shapes_only(resolve_class("ZImageTransformer2DModel"), config).to(torch.bfloat16)
    tensors = {name: ("BF16", tuple(tensor.shape)) for name, tensor in to_comfyui(model.state_dict()).items()}
    model.save_config(folder / "base" / "transformer")
    index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"]}
    (folder / "base" / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return write_sparse(folder / "z_image.safetensors", tensors), folder / "base"


def _transplant(use_mmap: bool) -> Callable[[Path, Path], Any]:
    def load(file: Path, base: Path) -> Any:
        import torch

        import transplant

        os.environ["TRANSPLANT_FP8_ON_CPU"] = "1"
        return transplant.load_transformer(file, base=base, dtype=torch.bfloat16, use_mmap=use_mmap, fp8_storage=True)

    return load


def _diffusers(disable_mmap: bool) -> Callable[[Path, Path], Any]:
    def load(file: Path, base: Path) -> Any:
        import torch

        model = from_single_file(file, base, disable_mmap=disable_mmap)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        return model

    return load


LOADS: Mapping[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "mapped": ("Transplant, mapped (its default)", _transplant(use_mmap=True)),
    "read": ("Transplant, `use_mmap=False`", _transplant(use_mmap=False)),
    "diffusers": ("diffusers `from_single_file`, then `enable_layerwise_casting`", _diffusers(disable_mmap=False)),
    "diffusers-read": ("the same with `disable_mmap=True`", _diffusers(disable_mmap=True)),
}


def measure_load(which: str, file: Path, base: Path) -> Measured:
    """Load the file; seconds, peak anonymous memory, and the bytes of the parameters that are left."""
    import torch

    import_everything()
    with AnonymousMemory() as memory:
        start = time.perf_counter()
        model = LOADS[which][1](file, base)
        seconds = time.perf_counter() - start
    fp8 = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float8_e4m3fn)
    return {"seconds": seconds, "peak": memory.peak, "size": sum(p.nbytes for p in model.parameters()), "fp8": fp8}


def load_report(layers: int, folder: Path, which: Sequence[str]) -> str:
    """The loads as Markdown."""
    file, base = make_file(folder, layers)
    rows: list[Sequence[str]] = []
    for name in which:
        command = [sys.executable, __file__, "--measure", name, str(file), str(base)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == -signal.SIGKILL and "diffusers" in name:
            rows.append((LOADS[name][0], "killed: more memory than this machine has", "", "", "", ""))
            continue
        if done.returncode != 0:
            raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr}")
        found: Measured = json.loads(done.stdout.splitlines()[-1])
        above = found["peak"] - found["size"]
        reached = ("yes" if above <= MARGIN else "**no**") if "diffusers" not in name else ""
        rows.append((
            LOADS[name][0], f"{found['size'] / 1e6:.0f} MB", f"{found['peak'] / 1e6:.0f} MB", f"{above / 1e6:+.0f} MB",
            reached, f"{found['seconds']:.1f} s",
        ))  # fmt: skip
    head = ("", "parameters", "peak anonymous memory", "above them", f"at most +{MARGIN / 1e6:.0f} MB", "time")
    return (
        f"Loading a sparse Z-Image file of {file.stat().st_size / 1e9:.2f} GB (bf16, {layers} layers) with FP8 storage "
        f"on the CPU, one fresh process each.\n\n{markdown_table(head, rows)}"
    )


# Memory and time of a step, on a device


def make_network(layers: int, device: str) -> Any:
    """Z-Image with random weights, bf16, made on the device."""
    import torch
    from diffusers import ZImageTransformer2DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return ZImageTransformer2DModel(n_layers=layers, n_refiner_layers=min(layers, 2)).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def _bf16(_: Any) -> None:
    """As it is."""


def _ours(model: Any) -> None:
    from transplant.architectures.z_image import Z_IMAGE
    from transplant.fp8_storage import store_in_fp8

    store_in_fp8(model, Z_IMAGE.fp8_skip_patterns, "Z-Image")


def _theirs(model: Any) -> None:
    import torch

    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


STEPS: Mapping[str, tuple[str, Callable[[Any], None]]] = {
    "bf16": ("bf16", _bf16),
    "ours": ("FP8 storage", _ours),
    "theirs": ("diffusers `enable_layerwise_casting`", _theirs),
}


def measure_step(which: str, layers: int, device: str, side: int, steps: int) -> Measured:
    """One forward over and over: median seconds, and on CUDA what the weights and a step take of the device."""
    import torch

    cuda = torch.device(device).type == "cuda"
    model = make_network(layers, device)
    STEPS[which][1](model)
    size = sum(p.nbytes for p in model.parameters())
    latents = [torch.randn(16, 1, side // 8, side // 8, device=device).to(torch.bfloat16)]
    caption = [torch.randn(128, 2560, device=device).to(torch.bfloat16)]
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated() if cuda else size
    times: list[float] = []
    with torch.no_grad():
        for _ in range(steps + 2):  # the first two warm up
            start = time.perf_counter()
            model(latents, torch.tensor([0.5], device=device), caption)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"seconds": statistics.median(times[2:]), "resident": resident, "peak": peak, "size": size}


def step_report(layers: int, device: str, side: int, steps: int) -> str:
    """The steps as Markdown; the ratio is of the same run."""
    import torch

    found: dict[str, Measured] = {}
    for name in STEPS:
        command = [sys.executable, __file__, "--measure-step", name, str(layers), device, str(side), str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    rows = [
        (
            STEPS[name][0], f"{one['size'] / 1e6:.0f} MB", f"{one['resident'] / 1e6:.0f} MB",
            f"{one['peak'] / 1e6:.0f} MB" if one["peak"] else "", f"{1000 * one['seconds']:.1f} ms",
            f"{one['seconds'] / found['bf16']['seconds']:.2f}",
        )
        for name, one in found.items()
    ]  # fmt: skip
    head = ("", "parameters", "resident", "peak of a step", "a step", "to bf16")
    where = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else device
    return (
        f"One step of Z-Image with {layers} layers and random weights at {side} x {side} pixels on {where}, "
        f"median of {steps}.\n\n{markdown_table(head, rows)}"
    )


# All of it


def put_between_markers(file: Path, text: str) -> None:
    """Replace what stands between the two markers in a Markdown file. Raises ValueError where it lacks them."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{file} lacks the lines {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures FP8 storage on Z-Image.")
    parser.add_argument("--layers", type=int, default=30, help="of the real one's 30")
    parser.add_argument("--only", nargs="+", choices=tuple(LOADS), default=tuple(LOADS), help="which loads")
    parser.add_argument("--dir", type=Path, help="where the temporary folder is made (the system's)")
    parser.add_argument("--device", help="measure steps there instead: cuda, cuda:1, cpu")
    parser.add_argument("--side", type=int, default=1024, help="pixels (1024)")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed (10)")
    parser.add_argument("--markdown", type=Path, help=f"file to put the table into, between {BEGIN} and {END}")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--measure-step", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report."""
    arguments = parse(argv)
    if arguments.measure:
        which, file, base = arguments.measure
        print(json.dumps(measure_load(which, Path(file), Path(base))))
        return 0
    if arguments.measure_step:
        which, layers, device, side, steps = arguments.measure_step
        os.environ["TRANSPLANT_FP8_ON_CPU"] = "1"
        print(json.dumps(measure_step(which, int(layers), device, int(side), int(steps))))
        return 0
    os.environ.update(QUIET)
    if arguments.device:
        text = step_report(arguments.layers, arguments.device, arguments.side, arguments.steps)
    else:
        with tempfile.TemporaryDirectory(prefix="transplant-benchmark-", dir=arguments.dir) as folder:
            text = load_report(arguments.layers, Path(folder), arguments.only)
    text = f"Measured {time.strftime('%Y-%m-%d')}: {machine()}.\n\n{text}"
    print(text)
    if arguments.markdown:
        put_between_markers(arguments.markdown, text)
    return 0


assert ROOT.name  # load.py has put the project's folders on the path

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
