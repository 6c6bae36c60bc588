"""What of the demo is trained, on what, and with which loss; `train.py` has the loop."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import network
import shapes

FOLDER = Path(os.environ.get("TRANSPLANT_DEMO_TRAINING") or Path(__file__).resolve().parent / ".training")
"""Where what is trained rests between runs."""
SEED = 7

Modules = dict[str, nn.Module]
Loss = Callable[[random.Random, torch.Generator], torch.Tensor]
"""From a worker's random numbers to the loss of one microbatch."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how fast.

    Attributes:
        modules: makes the modules, by name; what does not require a gradient rests.
        loss: makes the loss of these modules; done once in every worker.
        microbatches: gradients in a step.
        rates: learning rates of inner matrices (Muon) and of everything else (AdamW).
        decay: of the weights' running average, which is what counts in the end.
    """

    modules: Callable[[], Modules]
    loss: Callable[[Modules], Loss]
    microbatches: int
    rates: tuple[float, float]
    decay: float


# The text encoder: it learns to tell the scene from the prompt

SLOTS = 4
"""The last tokens of the chat template, from <|im_end|> on, each tell a part of the scene."""
ARRANGEMENTS = (*shapes.PLACES, "row", "side by side", "one above the other")


def group_classes(group: shapes.Group | None) -> list[int]:
    """Count, size, color and shape as numbers; all 0 where there is no group."""
    if group is None:
        return [0, 0, 0, 0]
    parts = (list(shapes.COUNTS), list(shapes.DIAMETERS), list(shapes.COLORS), list(shapes.SHAPES))
    values = (group.count, group.size, group.color, group.shape)
    return [1 + names.index(value) for names, value in zip(parts, values, strict=True)]  # pyright: ignore[reportArgumentType]


def scene_classes(scene: shapes.Scene) -> list[int]:
    """The scene as ten numbers: the left or upper group, the other one, arrangement, background."""
    groups: list[shapes.Group | None] = list(scene.groups)
    arrangement = scene.place
    if scene.relation:
        axis, order = shapes.RELATIONS[scene.relation]
        groups, arrangement = groups[::order], ARRANGEMENTS[-2 + axis]
    elif scene.groups[0].count > 1:
        arrangement = "row"
    second = groups[1] if len(groups) > 1 else None
    background = list(shapes.BACKGROUNDS).index(scene.background)
    return [*group_classes(groups[0]), *group_classes(second), ARRANGEMENTS.index(arrangement), background]


GROUP_SIZES = (4, 4, 7, 5)
CLASSES = (*((0, size) for size in GROUP_SIZES), *((1, size) for size in GROUP_SIZES), (2, len(ARRANGEMENTS)), (3, 4))
"""Slot and number of classes of each of `scene_classes`."""


def text_modules() -> Modules:
    text_encoder = network.new_text_encoder(SEED, len(network.new_tokenizer()))
    heads = nn.ModuleList(
        nn.Sequential(nn.RMSNorm(network.TEXT_WIDTH), nn.Linear(network.TEXT_WIDTH, size)) for _, size in CLASSES
    )
    return {"text_encoder": text_encoder, "heads": heads}


def text_loss(modules: Modules) -> Loss:
    tokenizer = network.new_tokenizer()
    text_encoder, heads = modules["text_encoder"], modules["heads"]
    assert isinstance(heads, nn.ModuleList)

    def loss(rng: random.Random, generator: torch.Generator) -> torch.Tensor:
        del generator
        scenes = [shapes.training_scene(rng) for _ in range(128)]
        ids, mask = tokenize(tokenizer, [scene.prompt for scene in scenes])
        with torch.autocast("cpu", torch.bfloat16):
            text = encode(text_encoder, ids).float()
        last = mask.sum(1)
        wanted = torch.tensor([scene_classes(scene) for scene in scenes])
        total = torch.zeros(())
        for number, ((slot, _), head) in enumerate(zip(CLASSES, heads, strict=True)):
            seen = text[torch.arange(len(scenes)), last - SLOTS + slot]
            total = total + nn.functional.cross_entropy(head(seen), wanted[:, number])
        return total / len(CLASSES)

    return loss


def tokenize(tokenizer: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and where they are not padding, both [B, 32]."""
    texts = [network.template(tokenizer, prompt) for prompt in prompts]
    tokens = tokenizer(texts, padding="max_length", max_length=32, truncation=True, return_tensors="pt")
    return tokens.input_ids, tokens.attention_mask.bool()


def encode(text_encoder: Any, ids: torch.Tensor) -> torch.Tensor:
    """What ZImagePipeline gives the transformer, [B, 32, W]; padding is at the end, where it changes nothing."""
    return text_encoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-2]


# The transformer


def base_modules() -> Modules:
    text_encoder = text_modules()["text_encoder"]
    load({"text_encoder": text_encoder}, "text")
    return {"transformer": network.new_transformer(SEED), "text_encoder": text_encoder.requires_grad_(False)}


def fine_tune_modules() -> Modules:
    modules = base_modules()
    load({"transformer": modules["transformer"]}, "base")
    return modules


def flow_loss(style: shapes.Style) -> Callable[[Modules], Loss]:
    """Flow matching with the signs and times of ZImagePipeline: the network gives picture minus noise."""
    size = 32

    def make(modules: Modules) -> Loss:
        tokenizer = network.new_tokenizer()
        latents = get_latents()
        transformer: Any = modules["transformer"]
        batched = torch.compile(network.Batched(transformer))

        def loss(rng: random.Random, generator: torch.Generator) -> torch.Tensor:
            scenes = [shapes.training_scene(rng) for _ in range(size)]
            clean = latents.encode(network.to_pixels([shapes.draw(scene, rng, style) for scene in scenes]))
            prompts = ["" if rng.random() < 0.1 else scene.prompt for scene in scenes]
            ids, mask = tokenize(tokenizer, prompts)
            sigma = torch.rand(size, generator=generator)
            sigma = 3 * sigma / (1 + 2 * sigma)
            noise = torch.randn(clean.shape, generator=generator)
            noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    text = encode(modules["text_encoder"], ids)
                out = batched(noisy, 1 - sigma, text, mask)
            return (out.float() - (clean - noise)).square().mean()

        return loss

    return make


def get_latents() -> network.Latents:
    """The projection, fitted once."""
    path = FOLDER / "latents.pt"
    if not path.exists():
        latents = network.fit_latents(SEED)
        save({"mean": latents.mean, "matrix": latents.matrix}, path)
    return network.Latents(**torch.load(path))


TASKS = {
    "text": Task(text_modules, text_loss, 1, (3e-3, 2e-3), 0.98),
    "base": Task(base_modules, flow_loss("plain"), 3, (3e-3, 1.5e-3), 0.998),
    **{style: Task(fine_tune_modules, flow_loss(style), 2, (1e-3, 5e-4), 0.99) for style in shapes.STYLES[1:]},
}


# Files


def save(value: Any, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(value, partial)
    partial.replace(path)


def load(modules: Modules, task: str) -> None:
    """Put the averaged weights of a task into modules."""
    average = torch.load(FOLDER / f"{task}.pt")["average"]
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            parameter.data.copy_(average[f"{name}.{key}"])
