"""Which layers' dtype a network's own code reads, on classes where it is known."""

from __future__ import annotations

import pytest
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel, WanTransformer3DModel, ZImageTransformer2DModel

from transplant.dtype_readers import dtype_readers, is_under


@pytest.mark.parametrize(
    ("cls", "config", "read", "not_read"),
    [
        (ZImageTransformer2DModel, {"n_layers": 1}, "t_embedder.mlp.0", "t_embedder.mlp.2"),
        (WanTransformer3DModel, {"num_layers": 1}, "condition_embedder.time_embedder.linear_1", "blocks.0.ffn.net.2"),
        (
            FluxTransformer2DModel,
            {"num_layers": 1, "num_single_layers": 1},
            "",
            "time_text_embed.timestep_embedder.linear_1",
        ),
    ],
)
def test_known_classes(cls: type, config: dict, read: str, not_read: str) -> None:
    with init_empty_weights():
        readers = dtype_readers(cls(**config))
    assert not read or is_under(read, readers)
    assert not is_under(not_read, readers)
