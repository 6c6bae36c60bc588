"""A base model: a diffusers pipeline folder, read without torch and without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transplant.errors import BaseModelError


@dataclass(frozen=True)
class Component:
    """One entry of a pipeline's model_index.json.

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
        path: the folder that holds model_index.json.
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
        """The config.json of a component's folder. Raises BaseModelError where it cannot be read."""
        return read_json(self.path / subfolder / "config.json")


def read_base(path: Path | str) -> BaseModel:
    """Read a base model's index.

    Args:
        path: a diffusers pipeline folder, or the id of a hub repository in the local cache.

    Returns:
        Its pipeline class and components.

    Raises:
        BaseModelError: no such folder, no model_index.json, or one that is not a pipeline's.
    """
    folder = _resolve(path)
    index = read_json(folder / "model_index.json")
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise BaseModelError(f"{folder.name}: its model_index.json names no pipeline class")
    components: dict[str, Component] = {}
    for name, value in index.items():
        pair = cast("list[object]", value) if isinstance(value, list) else []
        if len(pair) == 2 and all(isinstance(part, str) for part in pair):
            components[name] = Component(str(pair[0]), str(pair[1]))
    return BaseModel(folder, pipeline, components)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises BaseModelError naming the file."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaseModelError(f"{path.parent.name}: {path.name} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BaseModelError(f"{path.parent.name}: {path.name} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise BaseModelError(f"{path.parent.name}: {path.name} is not a JSON object")
    return cast("dict[str, Any]", value)


def _resolve(path: Path | str) -> Path:
    folder = Path(path).expanduser()
    if (folder / "model_index.json").is_file():
        return folder
    if folder.is_dir():
        raise BaseModelError(f"{folder.name}: the folder holds no model_index.json, it is not a diffusers pipeline")
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
        found = try_to_load_from_cache(repo_id, "model_index.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
