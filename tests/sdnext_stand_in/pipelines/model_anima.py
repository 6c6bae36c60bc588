import diffusers
from modules.logger import log

from pipelines import generic, native_transformer
from pipelines.anima import ANIMA_SPEC
from pipelines.anima.modeling_llm_adapter import AnimaLLMAdapter
from pipelines.anima.pipeline import AnimaTextToImagePipeline
from pipelines.generic_util import folder


def transformer_and_adapter(repo_id, load_config):
    file = native_transformer.resolve_path()
    if file is None:
        cls = diffusers.CosmosTransformer3DModel
        return generic.load_transformer(repo_id, cls_name=cls, load_config=load_config, subfolder="transformer"), None
    try:
        transformer, siblings = native_transformer.load(
            file, repo_id, ANIMA_SPEC, load_config, sibling_classes={"llm_adapter": AnimaLLMAdapter}
        )
        return transformer, siblings.get("llm_adapter")
    except Exception as error:
        log.error(f"Load model: type=Anima {error}")
        return None, None


def load(repo_id, load_config):
    transformer, adapter = transformer_and_adapter(repo_id, load_config)
    if transformer is None:
        return None
    adapter = adapter or AnimaLLMAdapter.from_pretrained(folder(repo_id) / "llm_adapter")
    return AnimaTextToImagePipeline(transformer=transformer, llm_adapter=adapter)
