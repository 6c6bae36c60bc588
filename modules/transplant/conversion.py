"""Write what a single file holds as a folder of diffusers', whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transplant.architectures.detect import identify, refuse_other_kinds
from transplant.base_model import BaseModel, Component, read_json
from transplant.build import Built, Progress, build
from transplant.checkpoint.header import read_header
from transplant.checkpoint.naming import normalise
from transplant.errors import BaseModelError, ConversionError, sample
from transplant.load_plan import LoadPlan
from transplant.plan import plan
from transplant.saved import CONFIG
from transplant.sdnq_bridge import Compute, QuantizeOnLoad
from transplant.storage import exchange

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 10_000_000_000
"""Size of a weights file from which on it is split, as diffusers does it."""

_WEIGHTS, _ENDINGS = "diffusion_pytorch_model", (".safetensors", ".safetensors.index.json")
"""How the names of what save_pretrained writes begin and end."""

_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Converted:
    """A folder that was written.

    Attributes:
        folder: the folder; models that the file brought along lie below it, each in a folder of its name.
        plan: how the file was loaded.
        nbytes: bytes of the weights.
        needs_transplant: why SDNQ and diffusers alone do not load it exactly; "" where they do.
    """

    folder: Path
    plan: LoadPlan
    nbytes: int
    needs_transplant: str


def convert(
    file: Path | str,
    out: Path | str,
    *,
    base: Path | str | None = None,
    component: str | None = None,
    dtype: torch.dtype | None = None,
    quantize: QuantizeOnLoad | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Converted:
    """Write the transformer that a file holds as a diffusers folder, its quantized layers with the file's codes.

    The folder is written beside `out` and renamed, so that `out` is never half of one, whatever ends the program.

    Args:
        file: a safetensors or GGUF file.
        out: the folder to write; it must not exist or be empty.
        base: the pipeline it is for; None for the published size of its architecture.
        component: the pipeline component it is; the architecture's own by default.
        dtype: dtype of what is not quantized; by default the file's own.
        quantize: quantize the Linears of a float file.
        force: replace a folder that holds a model and nothing else.
        shard_bytes: size from which on the weights are split.
        progress: called after every tensor.
        cancelled: asked before every tensor; True ends it.

    Raises:
        OverrideArchMismatch: the file cannot be loaded; the message says why.
        BaseModelError: the base model cannot be used.
        ConversionError: `out` holds something else or what is to be converted, or the disk is too small.
        LoadCancelled: `cancelled` said so.
        OSError: the disk failed; `out` is as it was.
    """
    out = Path(out).resolve()
    _check_free(out, force, [Path(file), *([] if base is None else [Path(base)])])
    planned = plan(
        file, _published_base(file) if base is None else base, component=component, dtype=dtype,
        compute=Compute(quantize=quantize),
    )  # fmt: skip
    _check_space(out, planned)
    built = build(planned, progress=progress, cancelled=cancelled)
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        _save(built, work, shard_bytes)
        os.chmod(work, 0o755)
        _put_in_place(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already where it was renamed
    nbytes = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    return Converted(out, planned, nbytes, needs_transplant(planned))


def needs_transplant(planned: LoadPlan) -> str:
    """Why what a plan makes, once saved, loads exactly with Transplant alone; "" where SDNQ's loading does it too."""
    import torch

    forms = {target.form for target in planned.targets if target.form is not None}
    if any(form.holder == "gguf" for form in forms):
        return "diffusers does not save or load GGUF layers"
    rounds = planned.dtype != torch.float32
    if rounds and any(form.fp32_rotation for form in forms):
        return "SDNQ rotates ConvRot weights in the compute dtype instead of fp32"
    if any(form.codebook and form.scale_dtype for form in forms):
        return "SDNQ does not load codebooks with a scale a row"
    if rounds and any(form.weights_dtype == "uint4" and form.holder == "sdnq" and not form.codebook for form in forms):
        return "SDNQ casts the zero points of AWQ layers"
    return ""


@dataclass(frozen=True)
class _PublishedBase(BaseModel):
    """A base model without a folder: classes with the config that they have by default."""

    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def config(self, subfolder: str) -> dict[str, Any]:
        """See BaseModel."""
        return dict(self.configs.get(subfolder, {}))


def _published_base(file: Path | str) -> BaseModel:
    """What a file's own names say of the pipeline it is for."""
    header = read_header(file)
    detection = identify(normalise(header.path, header.tensors))
    refuse_other_kinds(header.path, detection)
    names = [fit.spec.name for fit in detection.fits]
    spec = detection.spec
    if spec is None or len(names) != 1:
        found = f"it may be of {sample(names)}" if names else "its architecture is not known"
        raise BaseModelError(f"{header.path.name}: {found}: name its base model with --base")
    parts = {spec.component: Component("diffusers", spec.cls)}
    parts |= {sibling.component: Component("diffusers", sibling.cls) for sibling in spec.siblings}
    return _PublishedBase(Path(spec.name), f"{spec.model_types[0]}Pipeline", parts)


def _check_free(out: Path, force: bool, sources: Sequence[Path]) -> None:
    """Raises ConversionError where `out` holds what may not be replaced: anything that saving did not make."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if not out.exists():
        return
    if not force:
        raise ConversionError(f"{out} exists already: choose another name, or replace it with --force")
    if not (out.is_dir() and "_class_name" in _config(out)):
        raise ConversionError(f"{out} is not a model's folder, and is not replaced")
    if any(source.exists() and source.resolve().is_relative_to(out) for source in sources):
        raise ConversionError(f"{out} holds what is to be converted: choose another name")
    strange = [path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if not _is_saved(path)]
    if strange:
        raise ConversionError(
            f"{out} holds {sample(strange)} beside a model, and is not replaced: choose another name, or move it away"
        )


def _config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; empty where there is none that can be read."""
    try:
        return read_json(folder / CONFIG)
    except BaseModelError:
        return {}


def _is_saved(path: Path) -> bool:
    """Whether saving a model makes a path: its config, its weights in one file or in several, a sibling's folder."""
    if path.is_dir() and not path.is_symlink():
        return "_class_name" in _config(path)
    return path.name == CONFIG or (path.name.startswith(_WEIGHTS) and path.name.endswith(_ENDINGS))


def _check_space(out: Path, planned: LoadPlan) -> None:
    """Raises ConversionError where the disk cannot take the weights."""
    there = next(folder for folder in out.parents if folder.exists())
    free, needed = shutil.disk_usage(there).free, planned.resident_bytes + _SPARE_BYTES
    if free < needed:
        raise ConversionError(
            f"{there} has {free / 1e9:.1f} GB free, the folder needs {needed / 1e9:.1f} GB: "
            "free some space, or choose another disk"
        )


def _save(built: Built, folder: Path, shard_bytes: int) -> None:
    """Write the models and wait until the disk has them."""
    _ = built.transformer.save_pretrained(folder, max_shard_size=shard_bytes)
    for name, model in built.siblings.items():
        model.save_pretrained(folder / name, max_shard_size=shard_bytes)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with path.open("r+b") as written:
                os.fsync(written.fileno())


def _put_in_place(work: Path, out: Path) -> None:
    """Rename the finished folder; what was there goes after it, and only where nothing else works before it."""
    if not out.exists():
        os.replace(work, out)
        return
    if exchange(work, out):
        return  # what was there now has the name of the work, and goes as that does
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    os.replace(out, old / "folder")
    try:
        os.replace(work, out)
    except OSError:
        os.replace(old / "folder", out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
