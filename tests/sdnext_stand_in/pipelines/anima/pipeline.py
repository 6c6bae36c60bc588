import diffusers


class AnimaTextToImagePipeline(diffusers.DiffusionPipeline):
    def __init__(self, transformer, llm_adapter):
        super().__init__()
        self.register_modules(transformer=transformer, llm_adapter=llm_adapter)
