"""Make pictures with a loaded pipeline, and say in their metadata what made them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from transplant.errors import LoadCancelled, TransplantError

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from PIL.Image import Image


class GenerationCancelled(LoadCancelled):
    """The user stopped a generation."""


class GenerationError(TransplantError):
    """The pipeline cannot make a picture with these parameters."""


@dataclass(frozen=True)
class Request:
    """What to draw.

    Attributes:
        prompt: what should be in the picture.
        negative_prompt: what should not; only used where guidance is on.
        steps: number of denoising steps, 1 or more.
        guidance: guidance scale; the pipeline's own scale of values.
        width: pixels.
        height: pixels.
        seed: of the first picture; the next ones count up. 0 to 2**63 - 1.
        batch: number of pictures.
    """

    prompt: str
    negative_prompt: str = ""
    steps: int = 8
    guidance: float = 1.0
    width: int = 256
    height: int = 256
    seed: int = 0
    batch: int = 1


@dataclass(frozen=True)
class Picture:
    """A finished picture.

    Attributes:
        image: the picture.
        seed: the seed that made it; alone, the same seed makes the same picture again.
    """

    image: Image
    seed: int


def generate(
    pipeline: DiffusionPipeline,
    request: Request,
    *,
    on_step: Callable[[int, int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Picture]:
    """Make pictures one by one.

    Args:
        pipeline: a loaded text-to-image pipeline.
        request: what to draw.
        on_step: called after every step with the picture's index, the steps done and the steps of one picture.
        cancelled: asked after every step; True ends the generation.

    Yields:
        Each picture as soon as it is finished.

    Raises:
        GenerationCancelled: `cancelled` said so; the pictures that were yielded before are complete.
        GenerationError: the pipeline refuses the parameters, for example a size that it cannot draw.
    """
    for index in range(request.batch):

        def after_step(_pipeline: Any, step: int, _timestep: Any, values: dict[str, Any], index: int = index) -> Any:
            if on_step is not None:
                on_step(index, step + 1, request.steps)
            if cancelled is not None and cancelled():
                raise GenerationCancelled("the generation was stopped")
            return values

        seed = request.seed + index
        try:
            result: Any = cast("Any", pipeline)(**_arguments(pipeline, request, seed), callback_on_step_end=after_step)
        except ValueError as error:
            raise GenerationError(f"{type(pipeline).__name__}: {error}") from error
        yield Picture(result.images[0], seed)


def infotext(request: Request, seed: int, names: Mapping[str, str]) -> str:
    """Parameters in the form that SD.Next and others write into a picture's metadata.

    Args:
        request: what was drawn.
        seed: the picture's own seed.
        names: further entries in order, for example `Model`, `UNET` and `UNET hash`.
    """
    entries = {
        "Steps": request.steps,
        "Size": f"{request.width}x{request.height}",
        "Seed": seed,
        "CFG scale": f"{request.guidance:g}",
        **{key: _quoted(value) for key, value in names.items()},
    }
    lines = [request.prompt]
    if request.negative_prompt:
        lines.append(f"Negative prompt: {request.negative_prompt}")
    return "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in entries.items())])


def _arguments(pipeline: DiffusionPipeline, request: Request, seed: int) -> dict[str, Any]:
    """What this pipeline's call takes of the request."""
    offered = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "width": request.width,
        "height": request.height,
    }
    accepted = inspect.signature(pipeline.__call__).parameters
    # On the CPU, so that a seed draws the same noise on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    return {"generator": generator, **{key: value for key, value in offered.items() if key in accepted}}


def _quoted(value: str) -> str:
    """Quoted where it would read as more than one entry."""
    return f'"{value}"' if any(mark in value for mark in ',:"\n') else value
