"""Measures loading quantized files against a plain read, quantization on load against diffusers, and one forward.

    python benchmarks/quantized.py [--size-gb 1.4] [--runs 3] [--dir DIR]

Makes its files in a temporary folder and deletes them at the end. Every figure is the median of fresh processes.
Linux only. The width is that of the real Z-Image from 1 GB on. The targets are printed with what was measured.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("modules", "tests", "demo", "benchmarks")]

import load as plain  # noqa: E402  # benchmarks/load.py: the same clock, memory and tables

FORMATS = ("int8_tensorwise", "float8_e4m3fn", "nvfp4")
ON_LOAD = ("int8", "uint4")
MAX_READ, MAX_SECONDS, MAX_LAYERS, MAX_DIFFUSERS, MAX_SDNQ = 1.5, 0.2, 3, 0.5, 1.15
QUANTIZED = ("attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


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


def make_files(folder: Path, nbytes: int) -> None:
    """A base folder, a bf16 file, and a file of each format with random codes; each of `nbytes` or more."""
    from tiny_models import to_comfyui, write_sparse
    from transplant.skeleton import resolve_class, shapes_only

    width = 3840 if nbytes >= 1e9 else 768
    cls = resolve_class("ZImageTransformer2DModel")
    for name in (*FORMATS, "bf16"):
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
    return {"read": read, "adopt": adopt, "ours": ours, "diffusers": diffusers, "sdnq": sdnq, "forward": forward}[kind](
        what, folder
    )


def watched(load: Any) -> dict[str, float]:
    """Seconds to load and to touch every page, anonymous bytes at most and in the end."""
    plain.import_everything()
    with plain.AnonymousMemory() as memory:
        start = time.perf_counter()
        owner, tensors = load()
        loaded = time.perf_counter()
        plain.touch(tensors)
        touched = time.perf_counter()
        after = memory._now() - memory._baseline
    figures = {"load": loaded - start, "touch": touched - loaded, "peak": memory.peak, "after": after}
    del owner
    return figures


def read(what: str, folder: Path) -> dict[str, float]:
    """A plain read into one buffer."""
    return watched(lambda: plain._plain_read(folder / what / "x.safetensors", folder))


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
    """The bare sum of SDNQ's own time for every weight that it quantizes."""
    import torch
    from diffusers import ZImageTransformer2DModel

    from transplant.plan import plan
    from transplant.sdnq_bridge import Compute, QuantizeOnLoad

    assert ZImageTransformer2DModel
    quantize = importlib.import_module("sdnq.quantizer").sdnq_quantize_layer_weight
    file, base = folder / "bf16" / "x.safetensors", folder / "bf16" / "base"
    planned = plan(file, base, dtype=torch.bfloat16, compute=Compute(quantize=QuantizeOnLoad(what)))
    seconds = 0.0
    for target in planned.targets:
        if target.form:
            weight = torch.randn(target.shape, dtype=torch.bfloat16)
            start = time.perf_counter()
            quantize(weight.float(), "Linear", what, torch_dtype=torch.bfloat16)
            seconds += time.perf_counter() - start
    return {"load": seconds, "touch": 0.0, "peak": 0.0, "after": 0.0}


def forward(what: str, folder: Path) -> dict[str, float]:
    """One forward of the first block's Linears, 1,024 tokens: seconds."""
    import torch

    import transplant

    model: Any = transplant.load_transformer(
        folder / what / "x.safetensors", base=folder / what / "base", dtype=torch.bfloat16
    )
    block = model.layers[0].feed_forward
    tokens = torch.randn(1024, model.config.dim, dtype=torch.bfloat16)
    with torch.no_grad():
        block(tokens)
        start = time.perf_counter()
        block(tokens)
    return {"load": time.perf_counter() - start, "touch": 0.0, "peak": 0.0, "after": 0.0}


# All of them


def run(kind: str, what: str, folder: Path, runs: int, compiled: bool = False) -> dict[str, float]:
    """Medians of fresh processes."""
    results = []
    for _ in range(runs):
        plain.warm(folder / (what if what in FORMATS else "bf16") / "x.safetensors")
        environment = {**os.environ, **plain.QUIET, "SDNQ_USE_TORCH_COMPILE": str(int(compiled))}
        done = subprocess.run(
            [sys.executable, __file__, "--measure", kind, what, str(folder)],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{kind} {what} failed:\n{done.stderr}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def report(folder: Path, runs: int) -> str:
    """Three tables as Markdown, with the targets."""
    adopted: list[list[str]] = []
    for name in FORMATS:
        bare, got = run("read", name, folder, runs), run("adopt", name, folder, runs)
        seconds, limit = got["load"] + got["touch"], MAX_READ * (bare["load"] + bare["touch"]) + MAX_SECONDS
        room = got["after"] + MAX_LAYERS * got["largest"]
        adopted.append([
            name, f"{(folder / name / 'x.safetensors').stat().st_size / 1e9:.2f} GB", f"{bare['load']:.2f} s",
            f"{seconds:.2f} s", f"{limit:.2f} s {'yes' if seconds <= limit else '**no**'}",
            f"{got['peak'] / 1e6:.0f} MB",
            f"{room / 1e6:.0f} MB {'yes' if got['peak'] <= room else '**no**'}",
        ])  # fmt: skip
    on_load: list[list[str]] = []
    for name in ON_LOAD:
        mine, theirs, bare = (run(kind, name, folder, runs) for kind in ("ours", "diffusers", "sdnq"))
        ratios = mine["load"] / theirs["load"], mine["load"] / bare["load"]
        on_load.append([
            name, f"{mine['load']:.2f} s", f"{theirs['load']:.2f} s", f"{bare['load']:.2f} s",
            f"{ratios[0]:.2f} {'yes' if ratios[0] <= MAX_DIFFUSERS else '**no**'}",
            f"{ratios[1]:.2f} {'yes' if ratios[1] <= MAX_SDNQ else '**no**'}",
            f"{mine['peak'] / 1e6:.0f} MB", f"{theirs['peak'] / 1e6:.0f} MB",
        ])  # fmt: skip
    base = run("forward", "bf16", folder, runs)["load"]
    forwards = [[n, f"{(t := run('forward', n, folder, runs)['load']):.3f} s", f"{t / base:.2f}"] for n in FORMATS]
    heads = (
        ("adopted", "file", "plain read", "load and touch", f"at most {MAX_READ} reads + {MAX_SECONDS} s", "peak",
         f"at most what stays + {MAX_LAYERS} layers"),
        ("quantized on load", "Transplant", "diffusers", "SDNQ's arithmetic", f"to diffusers, at most {MAX_DIFFUSERS}",
         f"to SDNQ, at most {MAX_SDNQ}", "peak", "peak of diffusers"),
        ("one forward, 1,024 tokens", "seconds", f"to bf16 ({base:.3f} s)"),
    )  # fmt: skip
    tables = [plain.markdown_table(head, rows) for head, rows in zip(heads, (adopted, on_load, forwards), strict=True)]
    sdnq_version = importlib.metadata.version("sdnq")
    return "\n\n".join([f"Measured {time.strftime('%Y-%m-%d')}: {plain.machine()}, sdnq {sdnq_version}.", *tables])


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        kind, what, path = arguments.measure
        print(json.dumps(measure(kind, what, Path(path))))
        return 0
    with tempfile.TemporaryDirectory(prefix="transplant-benchmark-", dir=arguments.dir) as path:
        folder = Path(path)
        make_files(folder, int(arguments.size_gb * 1e9))
        import torch

        import transplant

        made = transplant.convert(
            folder / "bf16" / "x.safetensors", folder / "bf16" / "folder", base=folder / "bf16" / "base"
        )
        assert made.plan.dtype == torch.bfloat16
        print(report(folder, arguments.runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
