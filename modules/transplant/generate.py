"""Make pictures with a loaded pipeline."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from transplant import offload
from transplant.errors import LoadCancelled, TransplantError, counted, is_out_of_memory
from transplant.nonfinite import nonfinite_weights
from transplant.request import Request
from transplant.samplers import make_scheduler

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from PIL.Image import Image


class GenerationCancelled(LoadCancelled):
    """The user stopped a generation."""


class GenerationError(TransplantError):
    """The pipeline cannot make a picture with these parameters."""


@dataclass(frozen=True)
class Picture:
    """A finished picture, or a finished video.

    Attributes:
        image: the picture; the first frame of a video.
        seed: the seed that made it; alone, the same seed makes the same picture again.
        more_frames: what follows the first frame of a video.
    """

    image: Image
    seed: int
    more_frames: tuple[Image, ...] = ()


def generate(
    pipeline: DiffusionPipeline,
    request: Request,
    *,
    on_step: Callable[[int, int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Picture]:
    """Make pictures one by one.

    Args:
        pipeline: a loaded pipeline that draws from a prompt, modular or not.
        request: what to draw.
        on_step: called after every step with the picture's index, the steps done and the steps of one picture.
        cancelled: asked after every step; True ends the generation.

    Yields:
        Each picture as soon as it is finished.

    Raises:
        GenerationCancelled: `cancelled` said so; the pictures that were yielded before are complete.
        GenerationError: the pipeline refuses the parameters, or fails with them, for example a size that it cannot
            draw; or the transformer gave NaN or infinity, of which it would draw a black picture.
        RuntimeError: there was not enough memory.
    """
    loaded = cast("Any", pipeline)
    own, guider = loaded.scheduler, getattr(loaded, "guider", None)
    for index in range(request.batch):

        def after_step(step: int, output: object, index: int = index) -> None:
            if isinstance(output, torch.Tensor) and not bool(output.isfinite().all()):
                raise GenerationError(_no_numbers(loaded, step))
            if on_step is not None:
                on_step(index, min(step, request.steps), request.steps)
            if cancelled is not None and cancelled():
                raise GenerationCancelled("the generation was stopped")

        seed = request.seed + index
        try:
            loaded.scheduler = _watched(make_scheduler(request.sampler, own), after_step)
            if guider is not None:
                loaded.guider = guider.new(guidance_scale=request.guidance)
            frames = _frames(loaded(**_arguments(loaded, request, seed)))
        except (ValueError, TypeError) as error:
            raise GenerationError(f"{type(pipeline).__name__}: {error}") from error
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise GenerationError(_cannot_draw(loaded, request)) from error
        finally:
            offload.free(loaded)
            loaded.scheduler = own
            if guider is not None:
                loaded.guider = guider
        yield Picture(frames[0], seed, tuple(frames[1:]))


def makes_video(pipeline: Any) -> bool:
    """Whether a pipeline can make more than one frame."""
    return "num_frames" in _accepted(pipeline)


def _cannot_draw(pipeline: Any, request: Request) -> str:
    """What is said where torch itself failed within a pipeline."""
    what, less = f"{request.width}x{request.height}", "another size"
    if makes_video(pipeline):
        what, less = f"{counted(request.frames, 'frame')} of {what}", "fewer frames or another size"
    return f"{type(pipeline).__name__}: {what} cannot be drawn: try {less}, or another sampler"


def _no_numbers(pipeline: Any, step: int) -> str:
    """What to do where the transformer's output is NaN or infinity."""
    half, damaged = getattr(pipeline, "dtype", None) == torch.float16, nonfinite_weights(pipeline)
    if damaged is not None:
        why = f"{damaged}: fp16 cannot hold them, or the file is damaged: set the compute dtype to bf16 or fp32, else "
        why = f"{why if half else f'{damaged}: '}download it again, or choose another file"
    elif half:
        why = "fp16 cannot hold what this model computes: set the compute dtype to bf16 or fp32"
    else:
        why = "a file's weights are damaged, or not meant for this base model: choose another file"
    return f"{type(pipeline).__name__}: the transformer gave NaN or infinity in step {step}; {why}"


def _watched(scheduler: Any, after_step: Callable[[int, object], None]) -> Any:
    """A copy of a scheduler that tells of each of its steps, and what the transformer gave.

    Not every pipeline takes a callback, and none tells it the latter. The copy takes sigmas as a list too, as most
    pipelines give them; UniPC multiplies them as an array.
    """
    cls: Any = type(scheduler)
    count = itertools.count(1)

    @functools.wraps(cls.set_timesteps)
    def set_timesteps(self: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(named.get("sigmas"), list):
            named["sigmas"] = np.array(named["sigmas"])
        cls.set_timesteps(self, *arguments, **named)

    @functools.wraps(cls.step)
    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        result = cls.step(self, *arguments, **named)
        after_step(next(count), arguments[0] if arguments else named.get("model_output"))
        return result

    watched = copy.copy(scheduler)
    methods = {"set_timesteps": set_timesteps, "step": step}
    watched.__class__ = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
    return watched


def _frames(result: Any) -> list[Image]:
    """The pictures of a pipeline's output: one, or the frames of a video."""
    if isinstance(result, list):  # of a modular pipeline
        return cast("list[Image]", result)
    return list(result.frames[0]) if hasattr(result, "frames") else [result.images[0]]


def _arguments(pipeline: Any, request: Request, seed: int) -> dict[str, Any]:
    """What this pipeline's call takes of the request."""
    offered = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "guidance_schedule": None,  # Ideogram 4's own schedule would stand above the scale
        "width": request.width,
        "height": request.height,
        "num_frames": request.frames,
        "output_type": "pil",
    }
    accepted = _accepted(pipeline)
    if (accepted.get("true_cfg_scale") or 0) > 1:  # Qwen-Image: what its guidance_scale means is for distilled models
        offered["true_cfg_scale"] = offered.pop("guidance_scale")
    # On the CPU, so that a seed draws the same noise on every device.
    generator = torch.Generator("cpu").manual_seed(seed)
    call = {"generator": generator, **{key: value for key, value in offered.items() if key in accepted}}
    return {**call, "output": "images"} if hasattr(pipeline, "blocks") else call


def _accepted(pipeline: Any) -> dict[str, Any]:
    """The arguments of a pipeline's call with their defaults."""
    if hasattr(pipeline, "blocks"):  # a modular one
        return {entry.name: entry.default for entry in pipeline.blocks.inputs}
    parameters = inspect.signature(type(pipeline).__call__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}
