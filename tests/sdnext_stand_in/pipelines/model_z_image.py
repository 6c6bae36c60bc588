import diffusers
import transformers

from pipelines import generic


def load(repo_id, load_config):
    transformer = generic.load_transformer(
        repo_id, cls_name=diffusers.ZImageTransformer2DModel, load_config=load_config
    )
    if not isinstance(transformer, diffusers.ModelMixin):
        raise ValueError("from_pretrained takes diffusers models only")
    encoder = generic.load_text_encoder(repo_id, cls_name=transformers.Qwen3Model, load_config=load_config)
    others = generic.parts(repo_id, "transformer", "text_encoder")
    return diffusers.ZImagePipeline(transformer=transformer, text_encoder=encoder, **others)
