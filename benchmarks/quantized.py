"""Measures loading quantized files against a plain read, quantization on load against diffusers, and one block.

    python benchmarks/quantized.py [--size-gb 1.4] [--runs 3] [--only NAME ...] [--dir DIR] [--markdown FILE]

Makes its files in a temporary folder and deletes them at the end. Every figure is the median of fresh processes.
Linux only. The width is that of the real Z-Image from 1 GB on. The targets are printed with what was measured.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("modules", "tests", "demo", "benchmarks")]

import load as plain  # noqa: E402  # benchmarks/load.py: the same clock, memory and tables

FORMATS = ("int8_tensorwise", "float8_e4m3fn", "nvfp4")
ON_LOAD = ("int8", "uint4")
PARTS = (*FORMATS, *ON_LOAD, "compiled", "forward")
"""What `--only` chooses from: a format that is adopted, a dtype that is quantized to, SDNQ's compiled function beside
it, a block's forward."""
MAX_READ, MAX_SECONDS, MAX_LAYERS, MAX_DIFFUSERS, MAX_SDNQ = 1.5, 0.2, 3, 0.5, 1.15
"""The targets: adoption against the read, and seconds beside it; its peak in layers beside what stays; quantization on
load against diffusers, and against the sum of SDNQ's own time for each weight."""
QUANTIZED = ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
SIDE, TEXT = 64, 32
"""Side of the latents, two of which are a token's, and tokens of text: 1,056 tokens in a block."""
MARKERS = ("<!-- benchmarks/quantized.py begins -->", "<!-- benchmarks/quantized.py ends -->")


# The files


def config(width: int, layers: int) -> dict[str, Any]:
    """A Z-Image of this width and depth."""
    return {
        "dim": width,
        "n_heads": width // 128,
        "n_kv_heads": width // 128,
        "n_layers": layers,
        "n_refiner_layers": 1,
    }


def make_files(folder: Path, nbytes: int, names: Iterable[str]) -> None:
    """A base folder and a file of each format with random codes, or of bf16 numbers; each of `nbytes` or more."""
    from tiny_models import to_comfyui, write_sparse
    from transplant.skeleton import resolve_class, shapes_only

    width = 3840 if nbytes >= 1e9 else 768
    cls = resolve_class("ZImageTransformer2DModel")
    for name in names:
        layers, tensors = 0, {}
        while not layers or sum(size_of(*tensor) for tensor in tensors.values()) < nbytes:
            layers += 1
            model = shapes_only(cls, config(width, layers))
            state = to_comfyui(model.state_dict())
            tensors = described({key: tuple(tensor.shape) for key, tensor in state.items()}, name)
        metadata = {"_quantization_metadata": json.dumps({"layers": {
            key.removesuffix(".weight"): {"format": name} for key in tensors if is_quantized(key)}})}  # fmt: skip
        file = write_sparse(folder / name / "x.safetensors", tensors, metadata if name != "bf16" else None)
        fill(file, tensors)
        base = folder / name / "base"
        model.save_config(base / "transformer")
        index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"]}
        (base / "model_index.json").write_text(json.dumps(index), encoding="utf-8")


def is_quantized(key: str) -> bool:
    """Whether a weight is one of the blocks' Linears."""
    return key.endswith(tuple(f"{layer}.weight" for layer in QUANTIZED))


def described(shapes: dict[str, tuple[int, ...]], name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every tensor of a file in a format."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        layer = key.removesuffix(".weight")
        if name == "bf16" or not is_quantized(key):
            found[key] = ("BF16", shape)
        elif name == "nvfp4":
            n, k = shape
            found[key] = ("U8", (n, k // 2))
            found[f"{layer}.weight_scale"] = ("F8_E4M3", (-(-n // 128) * 128, -(-k // 64) * 4))
            found[f"{layer}.weight_scale_2"] = ("F32", ())
        else:
            found[key] = ("I8" if name == "int8_tensorwise" else "F8_E4M3", shape)
            found[f"{layer}.weight_scale"] = ("F32", (shape[0], 1) if name == "int8_tensorwise" else ())
    return found


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    count = 1
    for size in shape:
        count *= size
    return count * {"F32": 4, "BF16": 2}.get(dtype, 1)


def fill(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Random codes, positive scales, bf16 numbers from 1/128 to 1/32."""
    import numpy as np

    random = np.random.default_rng(0)
    with file.open("r+b") as data:
        data.seek(8 + int.from_bytes(data.read(8), "little"))
        for key, (dtype, shape) in tensors.items():
            count = size_of(dtype, shape)
            if dtype == "F32":
                data.write(np.full(count // 4, 0.001, np.float32).tobytes())
            elif dtype == "BF16":
                bits = random.integers(0, 1 << 16, count // 2, dtype=np.uint16)
                data.write((bits & 0x80FF | 0x3C00).tobytes())
            else:
                codes = random.integers(0, 0x70, count, dtype=np.uint8)
                data.write(codes.tobytes())
            assert key


# One measurement, in a process of its own


def measure(kind: str, what: str, folder: Path) -> dict[str, float]:
    """Run one kind of measurement and return its figures."""
    kinds = {"read": read, "adopt": adopt, "ours": ours, "diffusers": diffusers, "sdnq": sdnq, "compiled": compiled,
             "forward": forward}  # fmt: skip
    return kinds[kind](what, folder)


def watched(load: Any) -> dict[str, float]:
    """Seconds to load and to touch every page, anonymous bytes at most and in the end."""
    plain.import_everything()
    with plain.AnonymousMemory() as memory:
        start = time.perf_counter()
        owner, tensors = load()
        loaded = time.perf_counter()
        plain.touch(tensors)
        touched = time.perf_counter()
        after = memory.now
    figures = {"seconds": touched - start, "load": loaded - start, "peak": memory.peak, "after": after}
    del owner
    return figures


def read(what: str, folder: Path) -> dict[str, float]:
    """A plain read into one buffer."""
    return watched(lambda: plain.plain_read(folder / what / "x.safetensors", folder))


def adopt(what: str, folder: Path) -> dict[str, float]:
    """A load with the file's codes."""
    import torch

    import transplant
    from transplant.plan import plan

    file, base = folder / what / "x.safetensors", folder / what / "base"
    importlib.import_module("sdnq")
    largest = max(target.nbytes for target in plan(file, base, dtype=torch.bfloat16).targets)

    def load() -> tuple[Any, Any]:
        model = transplant.load_transformer(file, base=base, dtype=torch.bfloat16)
        return model, model.parameters()

    return {**watched(load), "largest": largest}


def ours(what: str, folder: Path) -> dict[str, float]:
    """Quantization on load."""
    import torch

    import transplant
    from transplant.sdnq_bridge import QuantizeOnLoad

    importlib.import_module("sdnq")

    def load() -> tuple[Any, Any]:
        model = transplant.load_transformer(
            folder / "bf16" / "x.safetensors", base=folder / "bf16" / "base", dtype=torch.bfloat16,
            quantize=QuantizeOnLoad(what),
        )  # fmt: skip
        return model, model.parameters()

    return watched(load)


def diffusers(what: str, folder: Path) -> dict[str, float]:
    """The same by from_pretrained with SDNQConfig, from a folder with the same weights in its own names."""
    import torch
    from diffusers import ZImageTransformer2DModel
    from sdnq import SDNQConfig

    def load() -> tuple[Any, Any]:
        model = ZImageTransformer2DModel.from_pretrained(
            folder / "bf16" / "folder", dtype=torch.bfloat16, quantization_config=SDNQConfig(weights_dtype=what)
        )
        return model, model.parameters()

    return watched(load)


def sdnq(what: str, folder: Path) -> dict[str, float]:
    """The bare sum of SDNQ's own time for every weight that it quantizes, conversion to fp32 included."""
    return arithmetic(what, folder, "sdnq_quantize_layer_weight")


def compiled(what: str, folder: Path) -> dict[str, float]:
    """The same by SDNQ's compiled function; what it takes to compile it, told apart."""
    return arithmetic(what, folder, "sdnq_quantize_layer_weight_compiled")


def arithmetic(what: str, folder: Path, name: str) -> dict[str, float]:
    """Seconds of one of SDNQ's functions over all weights, and of its first call for each shape."""
    import torch

    from transplant.plan import plan
    from transplant.sdnq_bridge import Compute, QuantizeOnLoad

    plain.import_everything()
    quantize = getattr(importlib.import_module("sdnq.quantizer"), name)
    file, base = folder / "bf16" / "x.safetensors", folder / "bf16" / "base"
    planned = plan(file, base, dtype=torch.bfloat16, compute=Compute(quantize=QuantizeOnLoad(what)))
    shapes = [target.shape for target in planned.targets if target.form]

    def seconds(shape: tuple[int, ...]) -> float:
        weight = torch.randn(shape, dtype=torch.bfloat16)
        start = time.perf_counter()
        quantize(weight.to(torch.float32), "Linear", what, torch_dtype=torch.bfloat16)
        return time.perf_counter() - start

    first = sum(seconds(shape) for shape in set(shapes))
    again = sum(seconds(shape) for shape in set(shapes))
    return {"load": sum(seconds(shape) for shape in shapes), "compiling": max(first - again, 0)}


def forward(what: str, folder: Path) -> dict[str, float]:
    """Seconds of one forward of the first block, with what the whole network gives it."""
    import torch

    import transplant

    plain.import_everything()
    model: Any = transplant.load_transformer(
        folder / what / "x.safetensors", base=folder / what / "base", dtype=torch.bfloat16
    )
    seen: list[tuple[Any, Any]] = []

    def keep(_: Any, arguments: Any, named: Any) -> None:
        seen.append((arguments, named))
        raise StopIteration

    handle = model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    image, text = torch.randn(16, 1, SIDE, SIDE), torch.randn(TEXT, model.config.cap_feat_dim)
    with torch.no_grad():
        try:
            model([image.bfloat16()], torch.tensor([0.5]), [text.bfloat16()])
        except StopIteration:
            handle.remove()
        [(arguments, named)] = seen
        times = []
        for _ in range(4):
            start = time.perf_counter()
            model.layers[0](*arguments, **named)
            times.append(time.perf_counter() - start)
    return {"load": statistics.median(times[1:]), "tokens": float(arguments[0].shape[1])}


# All of them


def run(kinds: Sequence[tuple[str, str]], folder: Path, runs: int) -> list[dict[str, float]]:
    """Medians of fresh processes, which take turns."""
    results: list[list[dict[str, float]]] = [[] for _ in kinds]
    for _ in range(runs):
        for (kind, what), found in zip(kinds, results, strict=True):
            found.append(one(kind, what, folder))
    return [{key: statistics.median(result[key] for result in found) for key in found[0]} for found in results]


def one(kind: str, what: str, folder: Path) -> dict[str, float]:
    """One measurement. SDNQ compiles where its compiled function is measured, and nowhere else."""
    plain.warm(folder / (what if what in FORMATS else "bf16") / "x.safetensors")
    environment = {**os.environ, **plain.QUIET, "SDNQ_USE_TORCH_COMPILE": str(int(kind == "compiled"))}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", kind, what, str(folder)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{kind} {what} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def adopted_table(formats: Iterable[str], folder: Path, runs: int) -> str:
    """Loads of quantized files against plain reads of them."""
    rows: list[list[str]] = []
    for name in formats:
        bare, got = run([("read", name), ("adopt", name)], folder, runs)
        limit, room = MAX_READ * bare["seconds"] + MAX_SECONDS, got["after"] + MAX_LAYERS * got["largest"]
        rows.append([
            name, f"{(folder / name / 'x.safetensors').stat().st_size / 1e9:.2f} GB", f"{bare['seconds']:.2f} s",
            f"{got['seconds']:.2f} s", reached(got["seconds"], limit, f"{limit:.2f} s"), f"{got['after'] / 1e6:.0f} MB",
            f"{got['peak'] / 1e6:.0f} MB", reached(got["peak"], room, f"{room / 1e6:.0f} MB"),
        ])  # fmt: skip
    head = ("", "file", "plain read", "load and touch", f"at most {MAX_READ} reads + {MAX_SECONDS} s",
            "stays in memory of its own", "peak", f"at most what stays + {MAX_LAYERS} layers")  # fmt: skip
    return f"Adopted, with the file's codes:\n\n{plain.markdown_table(head, rows)}"


def on_load_table(dtypes: Iterable[str], folder: Path, runs: int, with_compiled: bool) -> str:
    """Quantization on load against diffusers and against SDNQ's own arithmetic."""
    rows: list[list[str]] = []
    for name in dtypes:
        mine, theirs, bare = run([("ours", name), ("diffusers", name), ("sdnq", name)], folder, runs)
        ratios = mine["seconds"] / theirs["seconds"], mine["seconds"] / bare["load"]
        told = "not measured"
        if with_compiled:
            [fast] = run([("compiled", name)], folder, runs)
            told = f"{fast['load']:.2f} s, and {fast['compiling']:.1f} s to compile"
        rows.append([
            name, f"{mine['seconds']:.2f} s", f"{theirs['seconds']:.2f} s", f"{bare['load']:.2f} s", told,
            reached(ratios[0], MAX_DIFFUSERS, f"{ratios[0]:.2f}"), reached(ratios[1], MAX_SDNQ, f"{ratios[1]:.2f}"),
            f"{mine['peak'] / 1e6:.0f} MB", f"{theirs['peak'] / 1e6:.0f} MB", f"{mine['after'] / 1e6:.0f} MB",
        ])  # fmt: skip
    head = ("", "Transplant", "diffusers", "SDNQ's arithmetic", "its compiled function",
            f"to diffusers, at most {MAX_DIFFUSERS}", f"to SDNQ's arithmetic, at most {MAX_SDNQ}", "peak",
            "peak of diffusers", "stays")  # fmt: skip
    return f"Quantized on load from bf16:\n\n{plain.markdown_table(head, rows)}"


def forward_table(folder: Path, runs: int) -> str:
    """One block in each format against bf16."""
    names = ("bf16", *FORMATS)
    results = run([("forward", name) for name in names], folder, runs)
    base = results[0]["load"]
    rows = [
        [name, f"{got['load']:.3f} s", f"{got['load'] / base:.2f}"] for name, got in zip(names, results, strict=True)
    ]
    table = plain.markdown_table(("", "forward", "to bf16"), rows)
    return f"Forward of one block, {results[0]['tokens']:,.0f} tokens:\n\n{table}"


def reached(value: float, limit: float, text: str) -> str:
    """A figure or a limit, and whether the one is within the other."""
    return f"{text} {'yes' if value <= limit else '**no**'}"


def report(folder: Path, runs: int, only: Sequence[str]) -> str:
    """The tables as Markdown, with the targets."""
    tables: list[str] = []
    if formats := [name for name in FORMATS if name in only]:
        tables.append(adopted_table(formats, folder, runs))
    if dtypes := [name for name in ON_LOAD if name in only]:
        tables.append(on_load_table(dtypes, folder, runs, "compiled" in only))
    if "forward" in only:
        tables.append(forward_table(folder, runs))
    sdnq_version = importlib.metadata.version("sdnq")
    said = f"Measured {time.strftime('%Y-%m-%d')}: {plain.machine()}, sdnq {sdnq_version}. Medians of {runs}."
    return "\n\n".join([said, *tables])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the program where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.4, help="least size of each file (1.4)")
    parser.add_argument("--runs", type=int, default=3, help="fresh processes of each kind (3)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--dir", type=Path, help="where the temporary folder is made (the system's)")
    parser.add_argument("--markdown", type=Path, help=f"file to put the tables into, between {' and '.join(MARKERS)}")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        parser.error("this benchmark needs Linux: it reads /proc")
    if arguments.size_gb <= 0 or arguments.runs < 1:
        parser.error("--size-gb and --runs must be above zero")
    if arguments.markdown:
        try:
            plain.split_at_markers(arguments.markdown, *MARKERS)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    return arguments


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report."""
    arguments = parse(argv)
    if arguments.measure:
        kind, what, path = arguments.measure
        print(json.dumps(measure(kind, what, Path(path))))
        return 0
    signal.signal(signal.SIGTERM, plain.end)
    os.environ.update(plain.QUIET)
    only: list[str] = list(arguments.only)
    needed = FORMATS if "forward" in only else [name for name in FORMATS if name in only]
    with tempfile.TemporaryDirectory(prefix="transplant-benchmark-", dir=arguments.dir) as path:
        folder = Path(path)
        make_files(folder, int(arguments.size_gb * 1e9), (*needed, "bf16"))
        if set(only) & set(ON_LOAD):
            import torch

            import transplant

            bf16 = folder / "bf16"
            made = transplant.convert(bf16 / "x.safetensors", bf16 / "folder", base=bf16 / "base")
            assert made.plan.dtype == torch.bfloat16
        text = report(folder, arguments.runs, only)
    print(text)
    if arguments.markdown:
        plain.put_between_markers(arguments.markdown, text, *MARKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
