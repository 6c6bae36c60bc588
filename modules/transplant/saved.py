"""Folders of one model, as diffusers saves them: read back as they are, quantized layers and all.

diffusers and SDNQ load such folders too, but not all of them exactly: see docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from transplant.base_model import read_base, read_json
from transplant.build import set_tensor, settle
from transplant.checkpoint.header import Header, read_header
from transplant.checkpoint.reader import TORCH_DTYPES, TensorReader, mmap_by_default, open_reader
from transplant.checkpoint.shards import model_in
from transplant.compute_dtype import record_compute_dtype
from transplant.errors import (
    BaseModelError,
    MissingTensors,
    ShapeMismatch,
    UnexpectedTensors,
    UnknownDtype,
    UnsupportedQuantization,
    WrongArchitecture,
)
from transplant.formats.base import FormatError
from transplant.plan import spec_for
from transplant.sdnq_bridge import SECTION, Compute, SavedLayers
from transplant.skeleton import empty_network, fp32_modules, resolve_class

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

CONFIG, QUANTIZATION = "config.json", "quantization_config"

_REMEDY = "Convert or download the folder again"


def is_saved_quantized(folder: Path) -> bool:
    """Whether a folder holds one quantized model that `load_folder` reads: SDNQ's, or GGUF blocks of ours."""
    if not (folder / CONFIG).is_file() or model_in(folder) is None:
        return False
    settings = read_json(folder / CONFIG).get(QUANTIZATION)
    return isinstance(settings, dict) and _method(cast("dict[str, Any]", settings)) is not None


def load_folder(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    use_mmap: bool | None = None,
    compute: Compute | None = None,
) -> ModelMixin:
    """Load a model's own folder: one that `convert` or `save_pretrained` wrote.

    Args:
        folder: it holds config.json and the weights as safetensors, in one file or in shards with an index.
        dtype: compute dtype; by default the one it was saved with.
        device: where the weights go.
        use_mmap: keep the weights as views of the files where that is possible; default everywhere but on Windows.
        compute: how quantized layers compute; by default they are dequantized.

    Returns:
        The model in eval mode; quantized layers hold the very tensors of the files.

    Raises:
        OverrideArchMismatch: the folder is incomplete or damaged, or what it holds is not what its config says.
        BaseModelError: its config cannot be used.
    """
    folder, device = Path(folder), torch.device(device)
    config = read_json(folder / CONFIG)
    settings: dict[str, Any] = config.pop(QUANTIZATION, None) or {}
    if not isinstance(config.get("_class_name"), str):
        raise BaseModelError(f"{folder.name}: its {CONFIG} names no model class")
    network = empty_network(resolve_class(config["_class_name"]), config)
    header = read_header(folder)
    with open_reader(header, mmap_by_default() if use_mmap is None else use_mmap) as reader:
        files = _Files(folder, header, reader, device)
        _fill(network, files, settings, dtype or _saved_dtype(settings, header), compute or Compute())
    network.register_to_config(_name_or_path=str(folder))
    return network.eval()


def load_folder_over(
    folder: Path,
    base: Path | str,
    component: str | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    use_mmap: bool | None,
) -> dict[str, ModelMixin]:
    """Load a model's own folder for a pipeline, by the component that it is.

    Raises:
        WrongArchitecture: it is of another class than the base model's component.
        OverrideArchMismatch, BaseModelError: see `load_folder`.
    """
    pipeline = read_base(base)
    name = component or spec_for(pipeline, None).component
    expected, found = pipeline.component(name).cls, str(read_json(folder / CONFIG).get("_class_name"))
    if found != expected:
        raise WrongArchitecture(folder, expected, found, f"its {CONFIG} says so")
    return {name: load_folder(folder, dtype=dtype, device=device, use_mmap=use_mmap)}


class _SavedLayers(Protocol):
    """Makes the quantized layers of one library from what was saved."""

    def is_held(self, name: str, tensors: Mapping[str, Any]) -> bool:
        """Whether a module is quantized, given what the folder holds for it by attribute."""
        ...

    def layer(self, name: str, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """The layer in the place of a Linear."""
        ...

    def finish(self, model: ModelMixin) -> None:
        """Make diffusers treat the model as quantized."""
        ...


@dataclass(frozen=True)
class _Files:
    """A folder that is being read.

    Attributes:
        folder: the folder.
        header: what its weights files hold.
        reader: reads them.
        device: where the tensors go.
    """

    folder: Path
    header: Header
    reader: TensorReader
    device: torch.device

    def read(self, name: str) -> torch.Tensor:
        """One tensor as stored, on the device."""
        info = self.header.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise UnknownDtype(self.folder, name, info.dtype)
        return self.reader.read(info).to(self.device)


def _fill(
    network: ModelMixin, files: _Files, settings: Mapping[str, Any], dtype: torch.dtype, compute: Compute
) -> None:
    left = set(files.header.tensors)
    saved = _saved_layers(files, settings, dtype, compute)
    by_module: dict[str, dict[str, str]] = {}
    for name in left:
        module, _, attribute = name.rpartition(".")
        by_module.setdefault(module, {})[attribute] = name
    for path, module in list(network.named_modules()):
        stored = by_module.get(path, {})
        if saved is None or type(module) is not torch.nn.Linear or not saved.is_held(path, stored):
            continue
        try:
            tensors = {attribute: files.read(name) for attribute, name in stored.items() if attribute != "bias"}
            layer = saved.layer(path, module, tensors)
        except (FormatError, KeyError) as error:
            raise UnsupportedQuantization(files.folder, [path], str(error), _REMEDY) from error
        network.set_submodule(path, layer)
        left -= {stored[attribute] for attribute in tensors}
    _fill_plain(network, files, left, dtype)
    if saved is not None:
        saved.finish(network)
        record_compute_dtype(network, dtype)


def _method(settings: Mapping[str, Any]) -> str | None:
    """Whose layers a quantization_config describes: "sdnq" or "gguf"; None where they are not read here."""
    method = settings.get("quant_method")
    return method if method == "sdnq" or (method == "gguf" and SECTION in settings) else None


def _saved_layers(
    files: _Files, settings: Mapping[str, Any], dtype: torch.dtype, compute: Compute
) -> _SavedLayers | None:
    """Whoever makes the quantized layers; None where there are none."""
    if not settings:
        return None
    method = _method(settings)
    if method is None:
        raise UnsupportedQuantization(
            files.folder, [str(settings.get("quant_method"))], "its quantization is neither SDNQ's nor Transplant's",
            "Load it with diffusers",
        )  # fmt: skip
    try:
        if method == "gguf":
            from transplant.gguf_bridge import SavedLayers as OfGguf

            return OfGguf(settings, dtype, compute, files.device)
        return SavedLayers(settings, dtype, compute, files.device)
    except FormatError as error:
        raise UnsupportedQuantization(files.folder, [method], str(error), _REMEDY) from error


def _saved_dtype(settings: Mapping[str, Any], header: Header) -> torch.dtype:
    """The compute dtype a folder was saved with; else the one that most of its values have."""
    told = (settings.get(SECTION) or {}).get("dtype")
    named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if told in named:
        return named[told]
    sizes: dict[str, int] = {}
    for name, info in header.tensors.items():
        if info.dtype in ("BF16", "F16", "F32") and not name.endswith((".scale", ".scale_2", ".zero_point")):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return TORCH_DTYPES[max(sizes, key=lambda kind: sizes[kind])] if sizes else torch.bfloat16


def _fill_plain(network: ModelMixin, files: _Files, stored: set[str], dtype: torch.dtype) -> None:
    """Everything that is not quantized: floating-point values in the compute dtype, or fp32 where the class says so."""
    needed: dict[str, torch.Tensor] = network.state_dict()
    empty = {name for name, tensor in needed.items() if tensor.is_meta}
    cls = type(network).__name__
    if missing := sorted(empty - stored):
        raise MissingTensors(files.folder, missing, cls, sorted(stored))
    if unexpected := sorted(stored - needed.keys()):
        raise UnexpectedTensors(files.folder, unexpected, cls)
    keep, modules = fp32_modules(network), dict(network.named_modules())
    for name in sorted(stored):
        tensor, wanted = files.read(name), needed[name]
        if tensor.shape != wanted.shape:
            raise ShapeMismatch(files.folder, name, name, tuple(wanted.shape), tuple(tensor.shape), 1)
        if wanted.dtype.is_floating_point:
            tensor = tensor.to(dtype if keep.isdisjoint(name.split(".")) else torch.float32)
        set_tensor(modules, name, tensor)
    settle(network, files.device, files.folder.name)
