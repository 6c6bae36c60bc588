from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modules import sd_unet, shared
from pipelines.generic_util import folder

calls = []


@dataclass(frozen=True)
class SiblingSpec:
    subfolder: str
    inline_prefix: str


@dataclass(frozen=True)
class TransformerSpec:
    cls: type
    converter: Any = None
    subfolder: str = "transformer"
    siblings: dict = field(default_factory=dict)
    zero_init_missing: tuple = ()


def resolve_path():
    name = shared.opts.sd_unet
    file = sd_unet.unet_dict.get(name, "")
    return str(Path(file).absolute()) if file.endswith(".safetensors") else None


def load(
    local_file, repo_id, spec, load_config=None, allow_quant=True, dtype=None, modules_to_not_convert=None,
    modules_dtype_dict=None, quant_args=None, quant_type=None, sibling_classes=None, **kwargs,
):  # fmt: skip
    """A file in the model's own names loads; whatever else raises."""
    from safetensors.torch import load_file

    calls.append(Path(local_file).name)
    model = spec.cls.from_config(spec.cls.load_config(folder(repo_id) / spec.subfolder))
    model.load_state_dict(load_file(local_file))
    return model, {}
