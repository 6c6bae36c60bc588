import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin


class AnimaLLMAdapter(ModelMixin, ConfigMixin):
    """The host's own class, in the names of the files."""

    @register_to_config
    def __init__(self, model_dim: int = 8):
        super().__init__()
        self.out_proj = torch.nn.Linear(model_dim, model_dim)
        self.norm = torch.nn.RMSNorm(model_dim)
