import diffusers
import transformers

from pipelines import generic


def load(repo_id, load_config):
    cls = diffusers.WanTransformer3DModel
    transformer = generic.load_transformer(repo_id, cls_name=cls, load_config=load_config, subfolder="transformer")
    transformer_2 = generic.load_transformer(
        repo_id, cls_name=cls, load_config=load_config, subfolder="transformer_2", override_slot="secondary"
    )
    encoder = generic.load_text_encoder(repo_id, cls_name=transformers.UMT5EncoderModel, load_config=load_config)
    others = generic.parts(repo_id, "transformer", "transformer_2", "text_encoder")
    return diffusers.WanPipeline(
        transformer=transformer, transformer_2=transformer_2, text_encoder=encoder, boundary_ratio=0.7, **others
    )
