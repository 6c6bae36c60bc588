"""A base model: a diffusers pipeline folder, read without torch and without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transplant.errors import BaseModelError

INDEXES = ("model_index.json", "modular_model_index.json")
"""The index of a pipeline and that of a modular pipeline; the first that a folder has counts."""


@dataclass(frozen=True)
class Component:
    """One entry of a pipeline's index.

    Attributes:
        library: "diffusers", "transformers" or another.
        cls: class name.
    """

    library: str
    cls: str


@dataclass(frozen=True)
class BaseModel:
    """A diffusers pipeline folder.

    Attributes:
        path: the folder that holds the index.
        pipeline: class name of the pipeline.
        components: its components by name.
    """

    path: Path
    pipeline: str
    components: Mapping[str, Component]

    def component(self, name: str) -> Component:
        """The component called `name`. Raises BaseModelError where the pipeline has none."""
        found = self.components.get(name)
        if found is None:
            raise BaseModelError(f"{self.path.name}: a {self.pipeline} has no component {name!r}")
        return found

    def config(self, subfolder: str) -> dict[str, Any]:
        """The config.json of a component's folder, without how the weights beside it are quantized.

        Raises:
            BaseModelError: it cannot be read.
        """
        entries = read_json(self.path / subfolder / "config.json", self.path)
        return {key: value for key, value in entries.items() if key != "quantization_config"}


def read_base(path: Path | str) -> BaseModel:
    """Read a base model's index.

    Args:
        path: a diffusers pipeline folder, or the id of a hub repository in the local cache.

    Returns:
        Its pipeline class and components.

    Raises:
        BaseModelError: no such folder, no index, or one that is not a pipeline's.
    """
    file = _resolve(path)
    folder, index = file.parent, read_json(file)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise BaseModelError(f"{folder.name}: its {file.name} names no pipeline class")
    found = {name: _component(value) for name, value in index.items()}
    return BaseModel(folder, pipeline, {name: component for name, component in found.items() if component})


def _component(value: object) -> Component | None:
    """What an entry of an index says of a component; None where it is of something else, or of none.

    `[library, class]`; in a modular pipeline's index `[library, class, {...}]`. With two nulls the component was not
    loaded when the index was written: its class is the "type_hint" in the third, if that also says where it lies.
    """
    entry = cast("list[Any]", value) if isinstance(value, list) else []
    if len(entry) == 3 and isinstance(entry[2], dict):
        spec = cast("dict[str, Any]", entry[2])
        lies = spec.get("subfolder") or spec.get("pretrained_model_name_or_path")
        entry = entry[:2] if entry[0] else (spec.get("type_hint") if lies else None)
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return Component(*entry)
    return None


def read_json(path: Path, model: Path | None = None) -> dict[str, Any]:
    """Read a JSON object of a model, whose folder is the file's own by default. Raises BaseModelError naming both."""
    model = model or path.parent
    what = f"{model.name}: {path.relative_to(model).as_posix()}"
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaseModelError(f"{what} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BaseModelError(f"{what} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise BaseModelError(f"{what} is not a JSON object")
    return cast("dict[str, Any]", value)


def saved_quantization(folder: Path) -> str | None:
    """Whose quantization the config of a model's own folder tells; None where it tells none."""
    try:
        settings: Any = read_json(folder / "config.json").get("quantization_config")
    except BaseModelError:  # no folder, or none with a config
        return None
    return str(cast("dict[str, Any]", settings).get("quant_method")) if isinstance(settings, dict) else None


def _resolve(path: Path | str) -> Path:
    """The index of a base model."""
    folder = Path(path).expanduser()
    for name in INDEXES:
        if (folder / name).is_file():
            return folder / name
    if folder.is_dir():
        raise BaseModelError(f"{folder.name}: the folder holds no {INDEXES[0]}, it is not a diffusers pipeline")
    cached = _from_hub_cache(str(path))
    if cached is None:
        raise BaseModelError(
            f"{path}: no such folder, and no such repository in the local Hugging Face cache. "
            "Give a diffusers pipeline folder, or download the repository first"
        )
    return cached


def _from_hub_cache(repo_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(repo_id, name) for name in INDEXES]
    except HFValidationError:
        return None
    return next((Path(file) for file in found if isinstance(file, str)), None)
