import diffusers

from pipelines.native_transformer import SiblingSpec, TransformerSpec

ANIMA_SPEC = TransformerSpec(
    diffusers.CosmosTransformer3DModel, siblings={"llm_adapter": SiblingSpec("llm_adapter", "llm_adapter.")}
)
