"""Krea 2 with the residual branch that some files have in their last layer and diffusers' class has not."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from diffusers import Krea2Transformer2DModel, ModelMixin
from diffusers.models.transformers.transformer_krea2 import Krea2FinalLayer

__all__ = ["Krea2ResidualFinalLayer", "Krea2ResidualTransformer2DModel", "ModelMixin"]
# A saved pipeline's index names this module, and diffusers then looks for ModelMixin in it to tell a model by.


class Krea2ResidualFinalLayer(Krea2FinalLayer):
    """The last layer with two more Linears of the network's width, without biases, beside its modulated norm."""

    def __init__(self, hidden_size: int, out_channels: int, eps: float) -> None:
        super().__init__(hidden_size, out_channels, eps)
        self.down = torch.nn.Linear(hidden_size, hidden_size, bias=False)
        self.up = torch.nn.Linear(hidden_size, hidden_size, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """`linear(norm(x) * (1 + scale) + shift + up(down(x)))`.

        Args:
            hidden_states: x, (batch, tokens, width).
            temb: (batch, 2 or 1, width), which the table of scale and shift is added to.
        """
        scale, shift = (temb + self.scale_shift_table).chunk(2, dim=1)
        modulated = (1.0 + scale) * self.norm(hidden_states) + shift
        return self.linear(modulated + self.up(self.down(hidden_states)))


class Krea2ResidualTransformer2DModel(Krea2Transformer2DModel):
    """diffusers' Krea 2 with a Krea2ResidualFinalLayer: same config, same call, two weights more."""

    _no_split_modules = [  # noqa: RUF012  # diffusers' own form
        *Krea2Transformer2DModel._no_split_modules, "Krea2ResidualFinalLayer",
    ]  # fmt: skip
    _skip_layerwise_casting_patterns = [  # noqa: RUF012
        *Krea2Transformer2DModel._skip_layerwise_casting_patterns, r"final_layer\.up", r"final_layer\.down",
    ]  # fmt: skip

    @wraps(Krea2Transformer2DModel.__init__)  # from_config reads the signature
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        of = self.config
        width = of["num_attention_heads"] * of["attention_head_dim"]
        self.final_layer = Krea2ResidualFinalLayer(width, out_channels=of["in_channels"], eps=of["norm_eps"])
