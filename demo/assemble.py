"""Puts what was trained together: a diffusers pipeline from `demo/.training`.

python demo/assemble.py MODELS_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, ZImagePipeline

import make_demo
import network
import tasks


def trained_vae() -> AutoencoderKL:
    vae = network.new_vae(tasks.SEED)
    for part in ("decoder", "encoder"):
        if (tasks.FOLDER / f"{part}.pt").exists():
            tasks.load({part: getattr(vae, part)}, part)
    return vae


def trained_pipeline(transformer: str = "base", dtype: torch.dtype = torch.bfloat16) -> ZImagePipeline:
    """The pipeline with the transformer of a task, as far as it is trained."""
    modules = tasks.base_modules()
    tasks.load({"transformer": modules["transformer"]}, transformer)
    parts = [modules["transformer"], modules["text_encoder"], trained_vae()]
    made = network.pipeline(*(part.to(dtype).eval() for part in parts), network.new_tokenizer())  # pyright: ignore
    return made


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python demo/assemble.py MODELS_FOLDER", file=sys.stderr)
        return 1
    trained_pipeline().save_pretrained(Path(arguments[0]) / make_demo.BASE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
