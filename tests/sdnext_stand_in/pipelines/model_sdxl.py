import diffusers

from pipelines.generic_util import folder


def load(repo_id, load_config):
    return diffusers.StableDiffusionXLPipeline.from_pretrained(folder(repo_id))
