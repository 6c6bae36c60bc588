import json
from pathlib import Path

import diffusers
import huggingface_hub
import transformers

loaded = []
"""Every text encoder and VAE that was loaded, in order."""


def folder(repo_id):
    """A folder, or a hub id in the host's cache, offline."""
    if Path(repo_id).is_dir():
        return Path(repo_id)
    index = huggingface_hub.try_to_load_from_cache(repo_id, "model_index.json", cache_dir="models/huggingface")
    return Path(index).parent


def pipeline_class(repo_id):
    return json.loads((folder(repo_id) / "model_index.json").read_text())["_class_name"]


def load_text_encoder(repo_id, cls_name, load_config=None, subfolder="text_encoder", **kwargs):
    loaded.append(subfolder)
    return cls_name.from_pretrained(folder(repo_id) / subfolder)


def parts(repo_id, *without):
    """The other components of a pipeline."""
    loaded.append("vae")
    index = json.loads((folder(repo_id) / "model_index.json").read_text())
    found = {}
    for name, entry in index.items():
        if isinstance(entry, list) and name not in without and entry[0] in ("diffusers", "transformers"):
            library = diffusers if entry[0] == "diffusers" else transformers
            found[name] = getattr(library, entry[1]).from_pretrained(folder(repo_id) / name)
    return found
