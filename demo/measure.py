"""Measures how well a demo base model draws what its prompts say, in every format that people publish.

    python demo/measure.py MODELS_FOLDER [--out docs] [--seeds 1]

The 64 prompts were held out of the training. A picture is right where all that its prompt names is right, see
`inspector.py`. PSNR and SSIM are against the picture of the plain bf16 file, same prompt and seed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, ZImagePipeline
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "modules"))

import assemble
import inspector
import make_demo
import published
import shapes

STEPS, GUIDANCE = 8, 1.0
BATCH = 16


@dataclass(frozen=True)
class Drawn:
    """The pictures of one transformer, seed by seed for each scene, and the seconds of one picture."""

    pictures: list[Image.Image]
    seconds: float


def draw(pipeline: ZImagePipeline, scenes: list[shapes.Scene], seeds: int, guidance: float = GUIDANCE) -> Drawn:
    """Pictures of scenes through the pipeline itself, at the standalone's settings."""
    pairs = [(scene.prompt, seed) for scene in scenes for seed in range(seeds)]
    pictures: list[Image.Image] = []
    began = time.monotonic()
    for start in range(0, len(pairs), BATCH):
        prompts, numbers = zip(*pairs[start : start + BATCH], strict=True)
        result = pipeline(
            list(prompts),
            negative_prompt=[""] * len(prompts),
            generator=[torch.Generator().manual_seed(number) for number in numbers],
            width=shapes.SIZE,
            height=shapes.SIZE,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
        )
        pictures += result.images
    return Drawn(pictures, (time.monotonic() - began) / len(pairs))


def psnr(picture: Image.Image, other: Image.Image) -> float:
    """Peak signal to noise ratio of two pictures in dB; 99 where they are the same."""
    error = np.square(inspector.pixels_of(picture) - inspector.pixels_of(other)).mean()
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


def ssim(picture: Image.Image, other: Image.Image) -> float:
    """Structural similarity of two pictures' luma, with the Gaussian window of Wang et al. 2004 (11 x 11, 1.5)."""
    x, y = (torch.from_numpy(np.asarray(one.convert("L"), dtype=np.float64))[None, None] for one in (picture, other))
    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2

    def local(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(values, window)

    mean_x, mean_y = local(x), local(y)
    spread_x, spread_y = local(x * x) - mean_x**2, local(y * y) - mean_y**2
    together = local(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    ratio = (2 * mean_x * mean_y + c1) * (2 * together + c2)
    return float((ratio / ((mean_x**2 + mean_y**2 + c1) * (spread_x + spread_y + c2))).mean())


# The transformers


def transformers(base: Path) -> Iterator[tuple[str, Any]]:
    """The base model's transformer as every kind of file, and in FP8 storage; each loaded by Transplant, bf16."""
    import transplant

    own = DiffusionPipeline.from_pretrained(base, dtype=torch.bfloat16)
    tensors = make_demo.to_comfyui(own.transformer.state_dict())
    parts = assemble.companions(own)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: write(Path(folder) / name, tensors, parts) for name, write in published.WRITERS.items()}
        for name, file in files.items():
            yield name, transplant.load_transformer(file, base=base, dtype=torch.bfloat16)
        with fp8_on_cpu():
            stored = transplant.load_transformer(files["bf16"], base=base, dtype=torch.bfloat16, fp8_storage=True)
            yield "FP8 storage", stored
            yield "FP8 storage, time embedder too", with_rounded_time_embedder(stored)


def with_rounded_time_embedder(transformer: Any) -> Any:
    """The time embedder's weights as float8 would hold them.

    In bf16, because the class gives its time embedder inputs in the dtype of its weights, and cannot run in float8.
    """
    for name, parameter in transformer.t_embedder.named_parameters():
        if name.endswith("weight"):
            parameter.data = parameter.data.to(torch.float8_e4m3fn).to(parameter.dtype)
    return transformer


@contextmanager
def fp8_on_cpu() -> Iterator[None]:
    """Let FP8 storage run on the CPU."""
    before = os.environ.get("TRANSPLANT_FP8_ON_CPU")
    os.environ["TRANSPLANT_FP8_ON_CPU"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRANSPLANT_FP8_ON_CPU"]
        else:
            os.environ["TRANSPLANT_FP8_ON_CPU"] = before


# The report


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    right: int
    of: int
    psnr: float
    ssim: float
    seconds: float

    def __str__(self) -> str:
        share = f"{100 * self.right / self.of:.1f} %"
        return f"| {self.name} | {share} | {self.psnr:.1f} | {self.ssim:.3f} | {self.seconds:.2f} |"


def judge(name: str, drawn: Drawn, reference: Drawn, scenes: list[shapes.Scene], seeds: int) -> Row:
    wanted = [scene for scene in scenes for _ in range(seeds)]
    right = sum(not inspector.faults(scene, picture) for scene, picture in zip(wanted, drawn.pictures, strict=True))
    pairs = list(zip(drawn.pictures, reference.pictures, strict=True))
    quality = (float(np.mean([measure(*pair) for pair in pairs])) for measure in (psnr, ssim))
    return Row(name, right, len(wanted), *quality, drawn.seconds)


def grid(rows: list[list[Image.Image]], gap: int = 4) -> Image.Image:
    """Pictures in rows on gray."""
    cell = shapes.SIZE + gap
    result = Image.new("RGB", (cell * max(map(len, rows)) + gap, cell * len(rows) + gap), (96, 96, 96))
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            result.paste(picture, (gap + x * cell, gap + y * cell))
    return result


def measure(models: Path, seeds: int, count: int) -> tuple[list[Row], Image.Image]:
    """The table's rows, and a grid with a row for each transformer and a column for each of some prompts."""
    base = models / make_demo.BASE
    pipeline = DiffusionPipeline.from_pretrained(base, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    scenes = shapes.held_out()[:count]
    rows: list[Row] = []
    pictures: list[list[Image.Image]] = []
    reference: Drawn | None = None
    for name, transformer in transformers(base):
        pipeline.transformer = transformer
        drawn = draw(pipeline, scenes, seeds)
        reference = reference or drawn
        rows.append(judge(name, drawn, reference, scenes, seeds))
        print(rows[-1], flush=True)
        pictures.append(drawn.pictures[::seeds][:8])
    return rows, grid(pictures)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder that make_demo.py filled")
    parser.add_argument("--out", type=Path, help="folder for demo.md and demo.png")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64, help="fewer, for a quick look")
    parsed = parser.parse_args(arguments)
    rows, picture = measure(parsed.models, parsed.seeds, parsed.prompts)
    if parsed.out:
        write(parsed.out, rows, picture)
    return 0


def write(out: Path, rows: list[Row], picture: Image.Image) -> None:
    """The table and the grid, as pages of the documentation."""
    lines = ["| transformer | right | PSNR, dB | SSIM | s a picture |", "|---|---|---|---|---|", *map(str, rows)]
    prompts = "\n".join(f"{i}. {scene.prompt}" for i, scene in enumerate(shapes.held_out()[:8], 1))
    names = ", ".join(row.name for row in rows)
    text = f"""# How well the built-in model draws

Made by `python demo/measure.py`: {rows[0].of} pictures a row, of prompts that were held out of the training, {STEPS} \
steps, guidance {GUIDANCE:g}. A picture is right where the number, colors, shapes, sizes and places of all things and \
the background are those of its prompt. PSNR and SSIM are against the pictures of the first row.

{chr(10).join(lines)}

![Pictures in every format](demo.png)

Rows: {names}. Columns:

{prompts}
"""
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.md").write_text(text, encoding="utf-8")
    picture.save(out / "demo.png", optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
