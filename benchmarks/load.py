"""Measures loading a single-file transformer, and refusing a wrong one, against diffusers and against a plain read.

    python benchmarks/load.py [--size-gb 3.2] [--runs 5] [--dir DIR] [--markdown FILE]

Makes its files in a temporary folder and deletes them at the end. Every figure is the median of fresh processes.
Linux only: memory and file reads are taken from /proc. benchmarks/README.md says what is measured and how.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("modules", "tests", "demo")]

BEGIN, END = "<!-- benchmarks/load.py begins -->", "<!-- benchmarks/load.py ends -->"
FLUX = "flux1_dev_bfl_bf16"
WIDTH, NARROW = 3840, 768
"""Width of the real Z-Image, and of files too small to hold a layer of it."""

MAX_TIME, MAX_MEMORY, MAX_REFUSAL_SECONDS, MAX_REFUSAL_BYTES = 1.1, 0.05, 0.3, 5_000_000
"""The targets: time against diffusers, anonymous memory against the file, and what a refusal may cost."""

QUIET = {"HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}

Measured = dict[str, Any]


# The files


@dataclass(frozen=True)
class Files:
    """What is measured.

    Attributes:
        good: a Z-Image file in ComfyUI layout, bf16, every byte of its data random.
        base: a base model's folder with the config of `good`, without weights.
        wrong: a FLUX.1 file of full size whose data is sparse.
        demo: a models folder with the built-in demo.
    """

    good: Path
    base: Path
    wrong: Path
    demo: Path


def make_files(folder: Path, nbytes: int) -> Files:
    """Write everything into `folder`; the good file has at least `nbytes`."""
    import torch

    import make_demo
    from tiny_models import to_comfyui, write_from_manifest, write_sparse
    from transplant.skeleton import resolve_class, shapes_only

    def network(layers: int) -> Any:
        width = WIDTH if nbytes >= 1_500_000_000 else NARROW
        sizes = {"dim": width, "n_heads": width // 128, "n_kv_heads": width // 128}
        config = {**sizes, "n_layers": layers, "n_refiner_layers": 1}
        return shapes_only(resolve_class("ZImageTransformer2DModel"), config).to(torch.bfloat16)

    one, two = (sum(p.nbytes for p in network(layers).parameters()) for layers in (1, 2))
    model = network(1 + max(0, -(-(nbytes - one) // (two - one))))
    tensors = {name: ("BF16", tuple(tensor.shape)) for name, tensor in to_comfyui(model.state_dict()).items()}
    good = write_sparse(folder / "good.safetensors", tensors)
    fill(good)
    model.save_config(folder / "base" / "transformer")
    index = {"_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"]}
    (folder / "base" / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    make_demo.make_demo(folder / "demo")
    return Files(good, folder / "base", write_from_manifest(folder / "wrong.safetensors", FLUX), folder / "demo")


def fill(file: Path) -> None:
    """Write random bf16 numbers of sizes from 1/128 to 1/32 over all data of a safetensors file."""
    import numpy as np

    random, size = np.random.default_rng(0), file.stat().st_size
    with file.open("r+b") as data:
        data.seek(8 + int.from_bytes(data.read(8), "little"))
        while (left := size - data.tell()) > 0:
            bits = random.integers(0, 1 << 16, min(left // 2, 1 << 25), dtype=np.uint16)
            data.write((bits & 0x80FF | 0x3C00).tobytes())


def warm(file: Path) -> None:
    """Read a file once, so that the system's page cache holds it."""
    block = bytearray(1 << 24)
    with file.open("rb", buffering=0) as data:
        while data.readinto(block):
            pass


# One load, in a process of its own


@dataclass(frozen=True)
class Variant:
    """One way to load.

    Attributes:
        title: its row in the table.
        load: gives the tensors, or the bytes, of a file over a base folder, and their owner.
        rival: the variant of diffusers that reads the same way.
    """

    title: str
    load: Callable[[Path, Path], tuple[Any, Iterable[Any]]]
    rival: str | None = None


def _transplant(use_mmap: bool) -> Callable[[Path, Path], tuple[Any, Iterable[Any]]]:
    def load(file: Path, base: Path) -> tuple[Any, Iterable[Any]]:
        import torch

        import transplant

        model = transplant.load_transformer(file, base=base, dtype=torch.bfloat16, use_mmap=use_mmap)
        return model, model.parameters()

    return load


def _diffusers(disable_mmap: bool) -> Callable[[Path, Path], tuple[Any, Iterable[Any]]]:
    def load(file: Path, base: Path) -> tuple[Any, Iterable[Any]]:
        model = from_single_file(file, base, disable_mmap=disable_mmap)
        return model, model.parameters()

    return load


def plain_read(file: Path, base: Path) -> tuple[Any, Iterable[Any]]:
    """Read a file into one buffer."""
    import torch

    buffer = torch.empty(file.stat().st_size, dtype=torch.uint8)
    target = memoryview(buffer.numpy())
    with file.open("rb", buffering=0) as data:
        while target and (count := data.readinto(target)):
            target = target[count:]
    return buffer, [buffer]


VARIANTS: Mapping[str, Variant] = {
    "transplant": Variant("Transplant, mapped (its default)", _transplant(use_mmap=True), "diffusers"),
    "diffusers": Variant("diffusers `from_single_file`", _diffusers(disable_mmap=False), "diffusers"),
    "transplant-read": Variant("Transplant, `use_mmap=False`", _transplant(use_mmap=False), "diffusers-read"),
    "diffusers-read": Variant("diffusers, `disable_mmap=True`", _diffusers(disable_mmap=True), "diffusers-read"),
    "plain": Variant("a plain read into one buffer", plain_read),
}


def from_single_file(file: Path, base: Path, **kwargs: Any) -> Any:
    """diffusers' own loader, with the base model's config."""
    import torch
    from diffusers import ZImageTransformer2DModel

    major, minor = (int(part) for part in importlib.metadata.version("diffusers").split(".")[:2])
    dtype = {"dtype" if (major, minor) >= (0, 42) else "torch_dtype": torch.bfloat16}
    return ZImageTransformer2DModel.from_single_file(str(file), config=str(base / "transformer"), **dtype, **kwargs)


def import_everything() -> None:
    """What all variants use, so that no import runs on the clock."""
    for module in ("accelerate", "safetensors.torch", "transplant.build", "transplant.pipeline"):
        importlib.import_module(module)
    _ = importlib.import_module("diffusers").ZImageTransformer2DModel  # diffusers imports a class when it is asked for


def touch(tensors: Iterable[Any]) -> int:
    """Read one byte of every page of every tensor, and add them up."""
    import torch

    pages = (tensor.detach().flatten().view(torch.uint8)[::4096] for tensor in tensors)
    return sum(int(page.sum(dtype=torch.int64)) for page in pages)


class AnonymousMemory:
    """Watches this process's anonymous memory (RssAnon) from a thread, every 2 ms."""

    def __enter__(self) -> "AnonymousMemory":
        gc.collect()
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._baseline = self._peak = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._peak = max(self._peak, self._now())
        os.close(self._status)

    @property
    def peak(self) -> int:
        """Bytes at most above the beginning."""
        return self._peak - self._baseline

    @property
    def now(self) -> int:
        """Bytes above the beginning."""
        return self._now() - self._baseline

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        status = os.pread(self._status, 8192, 0)
        return int(status.partition(b"RssAnon:")[2].split(maxsplit=1)[0]) * 1024


def measure_load(variant: str, files: Files) -> Measured:
    """Load the good file; wall time, time to touch every page of the result, peak anonymous memory."""
    import_everything()
    with AnonymousMemory() as memory:
        start = time.perf_counter()
        owner, tensors = VARIANTS[variant].load(files.good, files.base)
        loaded = time.perf_counter()
        checksum = touch(tensors)
        touched = time.perf_counter()
    del owner
    return {"load": loaded - start, "touch": touched - loaded, "memory": memory.peak, "checksum": checksum}


# One refusal, in a process of its own


def measure_refusal(who: str, files: Files) -> Measured:
    """Try the wrong file while a model with an override is loaded; time, bytes read, and what is left."""
    import make_demo
    from transplant.hosts.base import PlainHost, default_settings
    from transplant.pipeline import Session
    from transplant.slots import Override

    import_everything()
    session = Session(PlainHost(default_settings("cpu", "fp32")))
    session.load_base(files.demo / make_demo.BASE)
    session.choose(Override("loaded before", files.demo / make_demo.COMFYUI))
    before, picture = session.transformer, draw(session)
    read, start = bytes_read(), time.perf_counter()
    if who == "transplant":
        refused = session.choose(Override("wrong", files.wrong)).refused
        found = f"{type(refused).__name__}: {refused}" if refused else "no error"
    else:
        found = diffusers_says(files)
    seconds, read = time.perf_counter() - start, bytes_read() - read
    alive = session.transformer is before and draw(session) == picture
    return {"seconds": seconds, "read": read, "found": found, "alive": alive}


def diffusers_says(files: Files) -> str:
    """What comes of giving the wrong file to diffusers."""
    try:
        from_single_file(files.wrong, files.base)
    except Exception as error:  # whichever it is, it is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def draw(session: Any) -> bytes:
    """The pixels of one small picture."""
    from transplant.generate import Request, generate

    return next(generate(session.pipeline, Request("a red circle", steps=2, width=64, height=64))).image.tobytes()


def bytes_read() -> int:
    """Bytes that this process has read with read calls; what it touches in maps is not among them."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").partition("rchar:")[2].split(maxsplit=1)[0])


# All of them


def run_apart(kind: str, which: str, files: Files) -> Measured:
    """Run one measurement in a fresh Python and return its figures."""
    paths = json.dumps({name: str(path) for name, path in vars(files).items()})
    command = [sys.executable, __file__, "--measure", kind, which, paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{kind} {which} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(files: Files, runs: int) -> tuple[dict[str, list[Measured]], dict[str, list[Measured]]]:
    """All loads and refusals, `runs` times; the variants take turns, each round beginning with another one."""
    loads: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    refusals: dict[str, list[Measured]] = {"transplant": [], "diffusers": []}
    names = list(VARIANTS)
    for number in range(runs):
        print(f"round {number + 1} of {runs}", file=sys.stderr, flush=True)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            warm(files.good)
            loads[name].append(run_apart("load", name, files))
        for who, results in refusals.items():
            results.append(run_apart("refusal", who, files))
    models = {name: results[0]["checksum"] for name, results in loads.items() if name != "plain"}
    if len(set(models.values())) > 1:
        raise SystemExit(f"the loaded weights differ: {models}")
    return loads, refusals


# The report


def report(files: Files, loads: Mapping[str, Sequence[Measured]], refusals: Mapping[str, Sequence[Measured]]) -> str:
    """Everything as Markdown."""
    nbytes, runs = files.good.stat().st_size, len(loads["plain"])
    sections = [
        f"Measured {time.strftime('%Y-%m-%d')}: {machine()}.",
        f"Loading a Z-Image file of {nbytes / 1e9:.2f} GB (bf16, ComfyUI layout), page cache warm, "
        f"medians of {runs} fresh {'process' if runs == 1 else 'processes'}:",
        load_table(loads, nbytes),
        f"Refusing a FLUX.1 file of {files.wrong.stat().st_size / 1e9:.1f} GB while a Z-Image pipeline with an "
        "override is loaded:",
        refusal_table(refusals),
        "Targets:",
        target_table(loads, refusals, nbytes),
    ]
    return "\n\n".join(sections)


def load_table(loads: Mapping[str, Sequence[Measured]], nbytes: int) -> str:
    """A row a variant: times, ratios of the totals, memory."""
    totals = {name: median(results, "load", "touch") for name, results in loads.items()}
    rows: list[Sequence[str]] = []
    for name, variant in VARIANTS.items():
        results = loads[name]
        memory = median(results, "memory")
        rows.append((
            variant.title, f"{median(results, 'load'):.2f} s", f"{median(results, 'touch'):.2f} s",
            f"{totals[name]:.2f} s ({spread(results, 'load', 'touch')})", f"{totals[name] / totals['plain']:.2f}",
            f"{totals[name] / totals[variant.rival]:.2f}" if variant.rival else "",
            f"{memory / 1e6:.0f} MB", f"{memory / nbytes:.1%}",
        ))  # fmt: skip
    head = (
        "", "load", "touch every page", "both (least-most)", "to the plain read", "to diffusers, same way of reading",
        "peak anonymous memory", "of the file",
    )  # fmt: skip
    return markdown_table(head, rows)


def refusal_table(refusals: Mapping[str, Sequence[Measured]]) -> str:
    """A row each for Transplant and diffusers."""
    titles = {"transplant": "Transplant", "diffusers": "diffusers `from_single_file`"}
    rows = [
        (
            titles[who], f"{median(results, 'seconds'):.3f} s ({spread(results, 'seconds')})",
            f"{median(results, 'read') / 1e6:.2f} MB", shorten(results[0]["found"], 250).replace("|", "\\|"),
            "still there, draws the same picture" if all(result["alive"] for result in results) else "lost",
        )
        for who, results in refusals.items()
    ]  # fmt: skip
    return markdown_table(
        ("", "time (least-most)", "read from files", "what the user is told", "the loaded model"), rows
    )


def target_table(
    loads: Mapping[str, Sequence[Measured]], refusals: Mapping[str, Sequence[Measured]], nbytes: int
) -> str:
    """A row a target, with what was measured."""
    mapped, refusal = loads["transplant"], refusals["transplant"]
    time_ratio = median(mapped, "load", "touch") / median(loads["diffusers"], "load", "touch")
    memory = median(mapped, "memory") / nbytes
    seconds, read = median(refusal, "seconds"), median(refusal, "read")
    alive = all(result["alive"] for result in refusal)
    checks = [
        ("time of a mapped load, to diffusers", f"at most {MAX_TIME}", f"{time_ratio:.2f}", time_ratio <= MAX_TIME),
        ("peak anonymous memory, of the file", f"under {MAX_MEMORY:.0%}", f"{memory:.1%}", memory < MAX_MEMORY),
        ("time to refuse", f"under {MAX_REFUSAL_SECONDS} s", f"{seconds:.3f} s", seconds < MAX_REFUSAL_SECONDS),
        ("bytes read to refuse", f"under {MAX_REFUSAL_BYTES / 1e6:.0f} MB", f"{read / 1e6:.2f} MB",
         read < MAX_REFUSAL_BYTES),
        ("the loaded model survives a refusal", "yes", "yes" if alive else "no", alive),
    ]  # fmt: skip
    rows = [(what, target, found, "yes" if reached else "**no**") for what, target, found, reached in checks]
    return markdown_table(("", "target", "measured", "reached"), rows)


def median(results: Sequence[Measured], *keys: str) -> float:
    """The median of a figure, or of a sum of figures."""
    return statistics.median(sum(result[key] for key in keys) for result in results)


def spread(results: Sequence[Measured], *keys: str) -> str:
    """The least and the most of the same."""
    sums = [sum(result[key] for key in keys) for result in results]
    return f"{min(sums):.2f}-{max(sums):.2f}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine() -> str:
    """What it ran on, and how busy that was."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("model name")[2].partition("\n")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    libraries = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers", "safetensors")
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{cpu.strip(' :' + chr(9)) or platform.machine()}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB, "
        f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}, {libraries}; "
        f"load average at the end {load}"
    )


def put_between_markers(file: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what stands between the two markers in a Markdown file."""
    before, after = split_at_markers(file, begin, end)
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def split_at_markers(file: Path, begin: str = BEGIN, end: str = END) -> tuple[str, str]:
    """What stands before and after the markers. Raises ValueError where the file lacks them."""
    before, first, rest = file.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"{file} lacks the lines {begin} and {end}")
    return before, after


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the program where it makes no sense."""
    parser = argparse.ArgumentParser(description="Measures loading and refusing transformers.")
    parser.add_argument("--size-gb", type=float, default=3.2, help="size of the file that is loaded (3.2)")
    parser.add_argument("--runs", type=int, default=5, help="fresh processes of each kind (5)")
    parser.add_argument("--dir", type=Path, help="where the temporary folder is made (the system's)")
    parser.add_argument("--markdown", type=Path, help=f"file to put the tables into, between {BEGIN} and {END}")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        parser.error("this benchmark needs Linux: it reads /proc")
    if arguments.size_gb <= 0 or arguments.runs < 1:
        parser.error("--size-gb and --runs must be above zero")
    if arguments.markdown:
        try:
            split_at_markers(arguments.markdown)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    return arguments


def end(*_: object) -> NoReturn:
    """End on SIGTERM as on Ctrl-C, so that the files are deleted."""
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report."""
    arguments = parse(argv)
    if arguments.measure:
        kind, which, paths = arguments.measure
        files = Files(**{name: Path(path) for name, path in json.loads(paths).items()})
        print(json.dumps({"load": measure_load, "refusal": measure_refusal}[kind](which, files)))
        return 0
    signal.signal(signal.SIGTERM, end)
    os.environ.update(QUIET)
    with tempfile.TemporaryDirectory(prefix="transplant-benchmark-", dir=arguments.dir) as folder:
        files = make_files(Path(folder), int(arguments.size_gb * 1e9))
        text = report(files, *measure_all(files, arguments.runs))
    print(text)
    if arguments.markdown:
        put_between_markers(arguments.markdown, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
