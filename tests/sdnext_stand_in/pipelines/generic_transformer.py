"""The host's own loader, with what goes wrong there."""

from modules import sd_unet, shared
from pipelines import native_transformer
from pipelines.generic_util import folder

calls = []


def load_transformer(
    repo_id, cls_name, load_config=None, native_spec=None, subfolder="transformer", override_slot="primary",
    allow_quant=True, variant=None, dtype=None, modules_to_not_convert=None, modules_dtype_dict=None, **kwargs,
):  # fmt: skip
    option = "sd_unet" if override_slot == "primary" else "sd_unet_secondary"
    name = getattr(shared.opts, option)
    calls.append((subfolder, name))
    file = sd_unet.unet_dict.get(name)
    if file is not None and not file.endswith(".gguf"):  # the result for a GGUF is thrown away
        if native_spec is None:
            raise RuntimeError("Cannot copy out of meta tensor")
        model, _ = native_transformer.load(file, repo_id, native_spec, load_config)
        setattr(sd_unet, f"loaded_{'unet' if override_slot == 'primary' else 'unet_secondary'}", name)
        return model
    return cls_name.from_pretrained(folder(repo_id) / subfolder)
