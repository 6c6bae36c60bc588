"""Layers whose stored dtype a network's own code reads, for example to cast their input to it.

Z-Image's timestep embedder casts its input to `self.mlp[0].weight.dtype`, Wan casts the timestep to the
dtype of `self.time_embedder`. Such a layer must hold weights in the compute dtype, whatever its file does.
"""

from __future__ import annotations

import functools
import inspect
import re
import types

import torch

_READS = (
    re.compile(r"self\.([\w.]+(?:\[\d+\])?(?:\.\w+)*)\.weight\.dtype"),
    re.compile(r"self\.([\w.]+)\.parameters\(\)\)*\.dtype"),
    re.compile(r"get_parameter_dtype\(self\.([\w.]+)\)"),
)


def dtype_readers(network: torch.nn.Module) -> tuple[str, ...]:
    """Names of modules whose parameters' dtype the network's code reads.

    Args:
        network: any network; its weights may be on meta.

    Returns:
        Module names; everything under one of them is meant.
    """
    return tuple(
        f"{name}.{path}" if name else path
        for name, module in network.named_modules()
        for path in _paths_read(type(module))
    )


def is_under(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter or module called `name` is one of `modules` or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@functools.cache
def _paths_read(cls: type) -> tuple[str, ...]:
    """Paths of submodules whose dtype the methods of a class read; those of torch itself read none."""
    if cls.__module__.startswith("torch."):
        return ()
    source = "".join(_source(method) for method in vars(cls).values() if inspect.isfunction(method))
    found = {match for pattern in _READS for match in pattern.findall(source)}
    return tuple(sorted(re.sub(r"\[(\d+)\]", r".\1", path) for path in found))


def _source(method: types.FunctionType) -> str:
    """The source of a method whose names say that it may read a dtype, "" for all others and where it is not known."""
    names = set(method.__code__.co_names)
    if "get_parameter_dtype" not in names and not ("dtype" in names and names & {"weight", "parameters"}):
        return ""
    try:
        return inspect.getsource(method)
    except (OSError, TypeError):
        return ""
