"""The host's base model as the core wants it: its classes and configs, from a folder, a hub cache or a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transplant.base_model import BaseModel, Component
from transplant.errors import BaseModelError
from transplant.hosts.sdnext import app

_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
"""What diffusers and the hub's library raise where a config cannot be had."""


@dataclass(frozen=True)
class HostBase(BaseModel):
    """A base model whose configs are at hand.

    Attributes:
        configs: config entries by component.
    """

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, subfolder: str) -> dict[str, Any]:
        """See BaseModel."""
        if subfolder not in self.configs:
            raise BaseModelError(f"{self.path.name}: the config of its {subfolder} is not known")
        return {key: value for key, value in self.configs[subfolder].items() if key != "quantization_config"}


def of_repository(repo_id: str, classes: Mapping[str, type]) -> HostBase:
    """A base model that the host is about to load.

    Args:
        repo_id: a folder, or the id of a hub repository.
        classes: by component, the classes that the host wants; their configs are read.

    Raises:
        BaseModelError: its index or a config cannot be read.
    """
    import diffusers

    index = _load(repo_id, diffusers.DiffusionPipeline)
    components = {name: Component(*entry[:2]) for name, entry in index.items() if _is_component(entry)}
    components |= {name: Component(cls.__module__, cls.__name__) for name, cls in classes.items()}
    configs = {name: _load(repo_id, cls, name) for name, cls in classes.items()}
    return HostBase(Path(repo_id), str(index.get("_class_name", "")), components, configs)


def of_pipeline(pipeline: Any, name: str) -> HostBase:
    """A base model that is loaded.

    Args:
        pipeline: its pipeline.
        name: what it is called.
    """
    models: dict[str, Any] = {
        key: model for key, model in pipeline.components.items() if hasattr(model, "config") and hasattr(model, "to")
    }
    components = {key: Component(type(model).__module__, type(model).__name__) for key, model in models.items()}
    configs = {key: dict(model.config) for key, model in models.items() if isinstance(model.config, Mapping)}
    return HostBase(Path(name), type(pipeline).__name__, components, configs)


def _is_component(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and all(isinstance(part, str) for part in entry[:2]) and len(entry) >= 2


def _load(repo_id: str, cls: Any, subfolder: str | None = None) -> dict[str, Any]:
    """A config.json, or a pipeline's index: from the folder or the host's caches; last from the hub, unless offline."""
    caches = [app.option("hfcache_dir"), app.option("diffusers_dir")]
    attempts: list[dict[str, Any]] = [{"cache_dir": cache, "local_files_only": True} for cache in caches if cache]
    if not os.path.isdir(repo_id) and not app.option("offline_mode", False):
        attempts.append({"cache_dir": caches[0]})
    failed: Exception | None = None
    for arguments in attempts or [{}]:
        try:
            found: Any = cls.load_config(repo_id, **({"subfolder": subfolder} if subfolder else {}), **arguments)
            return dict(found)
        except _ERRORS as error:
            failed = failed or error
    what = f"the config of its {subfolder}" if subfolder else "its index"
    raise BaseModelError(f"{Path(repo_id).name}: {what} cannot be read ({failed})") from failed
