import diffusers
import transformers

from pipelines import generic, native_transformer

SPEC = native_transformer.TransformerSpec(diffusers.Flux2Transformer2DModel)


def load(repo_id, load_config):
    transformer = generic.load_transformer(
        repo_id, cls_name=diffusers.Flux2Transformer2DModel, load_config=load_config, native_spec=SPEC
    )
    encoder = generic.load_text_encoder(repo_id, cls_name=transformers.Qwen3ForCausalLM, load_config=load_config)
    others = generic.parts(repo_id, "transformer", "text_encoder")
    return diffusers.Flux2KleinPipeline(transformer=transformer, text_encoder=encoder, **others)
