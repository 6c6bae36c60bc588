"""Puts what was trained together: the base model, and the fine-tunes as files of every kind.

    python demo/assemble.py demo/trained

What is not trained yet is left out; the base model needs `text` and `base`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import ZImagePipeline

import make_demo
import network
import published
import tasks

FILES = (
    ("outlines", "bf16"),
    ("outlines", "nvfp4"),
    ("pastel", "int8-convrot"),
    ("pastel", "gguf-q8_0"),
    ("pencil", "fp8-bundle"),
)
"""Fine-tune and kind of each file."""


def is_trained(task: str) -> bool:
    return (tasks.FOLDER / f"{task}.pt").exists()


def trained_pipeline(transformer: str = "base", dtype: torch.dtype = torch.bfloat16) -> ZImagePipeline:
    """The pipeline with the transformer of a task."""
    modules = tasks.base_modules()
    tasks.load({"transformer": modules["transformer"]}, transformer)
    modules["vae"] = network.new_vae(tasks.get_latents())
    for module in modules.values():
        module.to(dtype).eval()
    return network.pipeline(**modules, tokenizer=network.new_tokenizer())  # pyright: ignore[reportArgumentType]


def companions(pipeline: ZImagePipeline) -> published.Tensors:
    """VAE and text encoder as a bundle holds them."""
    return {
        **make_demo.with_prefix(make_demo.vae_to_ldm(pipeline.vae.state_dict()), "vae."),
        **make_demo.with_prefix(pipeline.text_encoder.state_dict(), "text_encoders.qwen3_4b.transformer.model."),
    }


def assemble(out: Path) -> list[Path]:
    """Write the base model and the files into a models folder; returns what was written."""
    trained_pipeline().save_pretrained(out / make_demo.BASE)
    written = [out / make_demo.BASE, make_demo.save(out / make_demo.FLUX, make_demo.flux_bfl())]
    for style, kind in FILES:
        if is_trained(style):
            pipeline = trained_pipeline(style)
            tensors = make_demo.to_comfyui(pipeline.transformer.state_dict())
            path = out / "UNET" / f"demo-{style}-{kind}"
            written.append(published.WRITERS[kind](path, tensors, companions(pipeline)))
    return written


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python demo/assemble.py MODELS_FOLDER", file=sys.stderr)
        return 1
    for path in assemble(Path(arguments[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
