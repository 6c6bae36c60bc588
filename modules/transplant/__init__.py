"""Transplant: put a single-file diffusion transformer into a diffusers pipeline, right or refused.

Nothing heavy is imported until it is used: reading a header needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transplant.errors import LoadCancelled, OverrideArchMismatch, TransplantError

if TYPE_CHECKING:
    import torch
    from diffusers.models.modeling_utils import ModelMixin

    from transplant.build import Progress
    from transplant.conversion import Converted
    from transplant.sdnq_bridge import Compute, QuantizeOnLoad

log = logging.getLogger("transplant")

__version__ = "0.1.0"
__all__ = [
    "LoadCancelled",
    "OverrideArchMismatch",
    "TransplantError",
    "__version__",
    "convert",
    "load_components",
    "load_folder",
    "load_transformer",
]


def load_folder(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    compute: Compute | None = None,
) -> ModelMixin:
    """Load a model's own folder, one that `convert` or `save_pretrained` wrote: see `saved.load_folder`."""
    from transplant.saved import load_folder as load

    return load(folder, dtype=dtype, device=device, use_mmap=use_mmap, compute=compute)


def convert(
    file: Path | str,
    out: Path | str,
    *,
    base: Path | str | None = None,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    quantize: QuantizeOnLoad | None = None,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Converted:
    """Write the transformer that a file holds as a diffusers folder, whole or not at all: see `conversion.convert`."""
    from transplant.conversion import convert as write

    return write(
        file, out, base=base, component=component, dtype=dtype, quantize=quantize, force=force, progress=progress,
        cancelled=cancelled,
    )  # fmt: skip


def load_transformer(
    file: Path | str,
    *,
    base: Path | str,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    fp8_storage: bool = False,
    quantize: QuantizeOnLoad | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> ModelMixin:
    """Load the transformer that a single file holds.

    Args:
        file: a safetensors file, in the ComfyUI, original or diffusers key layout; or a GGUF file; or a model's
            own folder, as `convert` writes it.
        base: the diffusers pipeline it is for: a folder, or the id of a repository in the local hub cache.
        component: the pipeline component it replaces; the architecture's own by default.
        dtype: compute dtype; by default the file's own.
        device: where the weights go.
        use_mmap: keep the weights as views of the file where that is possible; default everywhere but on Windows.
        fp8_storage: let weights rest in float8_e4m3fn; the layers compute in `dtype`. Needs CUDA or XPU.
        quantize: quantize the Linears of a float file while it loads; None to leave them.
        config_kwargs: entries that replace those of the base's config.
        progress: called after every tensor.
        cancelled: asked before every tensor; True ends the load.

    Returns:
        A diffusers model for `DiffusionPipeline.from_pretrained(base, transformer=...)`.

    Raises:
        OverrideArchMismatch: the file is not for this base, or damaged; the message says what to do.
        BaseModelError: the base model cannot be used.
        LoadCancelled: `cancelled` said so.
    """
    component_models = load_components(
        file, base=base, component=component, dtype=dtype, device=device, use_mmap=use_mmap,
        fp8_storage=fp8_storage, quantize=quantize, config_kwargs=config_kwargs, progress=progress, cancelled=cancelled,
    )  # fmt: skip
    transformer, *siblings = component_models
    if siblings:
        log.warning(
            "%s also brings %s, which load_transformer does not give: see load_components",
            Path(file).name, ", ".join(siblings),
        )  # fmt: skip
    return component_models[transformer]


def load_components(
    file: Path | str,
    *,
    base: Path | str,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    fp8_storage: bool = False,
    quantize: QuantizeOnLoad | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> dict[str, ModelMixin]:
    """Load the transformer that a single file holds, and the models that it brings along.

    Arguments and errors are those of `load_transformer`.

    Returns:
        The models by pipeline component, the transformer first: the arguments for
        `DiffusionPipeline.from_pretrained(base, **models)`. An Anima file brings its `text_conditioner`.
    """
    from transplant.build import build
    from transplant.plan import plan
    from transplant.saved import is_saved_quantized, load_folder_over
    from transplant.sdnq_bridge import Compute

    if is_saved_quantized(Path(file)):
        return load_folder_over(Path(file), base, component, dtype=dtype, device=device, use_mmap=use_mmap)
    planned = plan(
        file, base, component=component, dtype=dtype, device=device, use_mmap=use_mmap, config_kwargs=config_kwargs,
        compute=Compute(fp8_storage=fp8_storage, quantize=quantize),
    )  # fmt: skip
    built = build(planned, progress=progress, cancelled=cancelled)
    return {planned.transformer.component: built.transformer, **built.siblings}
