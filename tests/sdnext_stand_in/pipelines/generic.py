from pipelines.generic_transformer import load_transformer
from pipelines.generic_util import load_text_encoder, parts

__all__ = ["load_text_encoder", "load_transformer", "parts"]
