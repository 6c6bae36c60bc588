"""The parts of a base model that stay: text encoders, VAE, scheduler, and its own transformer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from transplant.base_model import BaseModel
from transplant.errors import BaseModelError, LoadCancelled, OverrideArchMismatch
from transplant.hosts.base import LoadSettings
from transplant.saved import is_saved_quantized, load_folder
from transplant.skeleton import OWN_MODULES

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

_LIBRARY_ERRORS = (
    SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError,
)  # fmt: skip
"""What diffusers and transformers raise on a folder that is incomplete, damaged or too new for them."""


def weight_bytes(folder: Path) -> int:
    """Bytes of all safetensors files in a folder and below it."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def load_pipeline(
    base: BaseModel,
    settings: LoadSettings,
    given: Mapping[str, Any],
    report: Callable[[str, float | None], None],
    cancelled: Callable[[], bool],
) -> DiffusionPipeline:
    """Load a base model around components that are there already.

    Args:
        base: the base model.
        settings: device and compute dtype.
        given: components by name; their weights are not read.
        report: told which component is being loaded, and the part of their bytes that is done.
        cancelled: asked before every component.

    Raises:
        BaseModelError: a component cannot be loaded.
        LoadCancelled: `cancelled` said so.
    """
    _refuse_gaps(base, given)
    names = [name for name in base.components if name not in given and _class_of(base, name) is not None]
    sizes = {name: weight_bytes(base.path / name) for name in names}
    models, done = dict(given), 0
    for name in names:
        if cancelled():
            raise LoadCancelled(f"{base.path.name}: the load was cancelled")
        report(f"Loading {name} of {base.path.name}", done / max(sum(sizes.values()), 1))
        models[name] = load_component(base, name, settings)
        done += sizes[name]
    try:
        pipeline = _assembled(base, models)
    except _LIBRARY_ERRORS as error:
        raise BaseModelError(f"{base.path.name}: the pipeline cannot be loaded ({error})") from error
    lost = [name for name in base.components if not _is_in_place(pipeline, name, models)]
    if lost:
        raise BaseModelError(f"{base.path.name}: its {base.pipeline} came without {', '.join(lost)}")
    return pipeline.to(settings.rests_on)


def _refuse_gaps(base: BaseModel, given: Mapping[str, Any]) -> None:
    """Raises BaseModelError where the index names what has no folder: transformers makes an empty tokenizer of that."""
    if not (base.path / "model_index.json").is_file():
        return  # a modular pipeline's index says for each component where it lies
    gaps = [name for name in base.components if name not in given and not (base.path / name).exists()]
    if gaps:
        raise BaseModelError(
            f"{base.path.name}: has no folder {' and no folder '.join(gaps)}, which its model_index.json names: "
            "download the base model again"
        )


def _assembled(base: BaseModel, models: Mapping[str, Any]) -> Any:
    """The pipeline around its models; tokenizers, schedulers and the like are read from the folder.

    By the pipeline's own class: DiffusionPipeline.from_pretrained does not take what is given for a component that
    is optional, such as both transformers of Wan, and reads it from the folder (diffusers 0.42).
    """
    import diffusers
    from diffusers.modular_pipelines.modular_pipeline import ModularPipeline
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    cls: Any = getattr(diffusers, base.pipeline, None)
    if inspect.isclass(cls) and issubclass(cls, ModularPipeline):
        pipeline = cls.from_pretrained(str(base.path), local_files_only=True)
        others = [name for name in base.components if name not in models]
        pipeline.load_components(others, pretrained_model_name_or_path=str(base.path), local_files_only=True)
        pipeline.update_components(**models)
        return pipeline
    if inspect.isclass(cls) and issubclass(cls, DiffusionPipeline):
        return cls.from_pretrained(str(base.path), local_files_only=True, use_safetensors=True, **models)
    raise ValueError(f"diffusers {diffusers.__version__} has no {base.pipeline}: a newer diffusers may")


def _is_in_place(pipeline: Any, name: str, models: Mapping[str, Any]) -> bool:
    """Whether a component is there, and the one that was given where one was."""
    component = getattr(pipeline, name, None)
    return component is not None and component is models.get(name, component)


def load_component(base: BaseModel, name: str, settings: LoadSettings) -> Any:
    """Load one model of a base model from its folder; never a pickle.

    Raises:
        BaseModelError: it cannot be loaded.
    """
    cls = _class_of(base, name)
    if cls is None:
        raise BaseModelError(f"{base.path.name}: {name} is of a class that is not installed here")
    if base.components[name].library in ("diffusers", *OWN_MODULES) and is_saved_quantized(base.path / name):
        try:
            return load_folder(
                base.path / name, dtype=settings.dtype, device=settings.rests_on, use_mmap=settings.use_mmap,
                compute=settings.compute,
            )  # fmt: skip
        except OverrideArchMismatch as error:
            raise BaseModelError(f"{base.path.name}: its {name} cannot be loaded ({error})") from error
    try:
        model = cls.from_pretrained(
            str(base.path), subfolder=name, use_safetensors=True, local_files_only=True,
            **{_dtype_keyword(): settings.dtype},
        )  # fmt: skip
    except _LIBRARY_ERRORS as error:
        raise BaseModelError(f"{base.path.name}: its {name} cannot be loaded ({error})") from error
    return model.to(settings.rests_on).eval()


def _class_of(base: BaseModel, name: str) -> Any:
    """The model class of a component; None for tokenizers, schedulers and what the pipeline loads itself."""
    import torch

    component = base.components[name]
    if component.library not in ("diffusers", "transformers", *OWN_MODULES):
        return None
    cls = getattr(importlib.import_module(component.library), component.cls, None)
    return cls if inspect.isclass(cls) and issubclass(cls, torch.nn.Module) else None


def _dtype_keyword() -> str:
    """`from_pretrained`'s word for the dtype: diffusers 0.42 deprecates the older one."""
    import diffusers

    major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (0, 42) else "torch_dtype"
