"""The networks of the built-in demo: real diffusers and transformers classes, small.

The latent space is not learned. A latent of 16 numbers stands for 8x8 pixels: 14 principal components of the drawn
pictures' patches, most of them scaled to the same spread, and two numbers that only say whether its column and its row
are even. These let a decoder that doubles pixels know which of the two it is at, see `exact_decoder.py`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

import exact_decoder
import make_demo
import shapes

SCALE, SHIFT = 0.3611, 0.1159
"""Of the VAE, as in Z-Image: latents are (encoded - SHIFT) * SCALE."""
TEXT_WIDTH = 128
PATCH = 8
LATENT_CHANNELS = 16
COMPONENTS = 14
"""Latent channels that hold principal components; the last two hold the parity of column and row, 1 where even."""
SPREAD = (1.0,) * 3 + (0.8,) * 6 + (0.6,) * 5
"""Standard deviation of each component; the first three are flat colors, the next an edge's two sides."""

TRANSFORMER: dict[str, Any] = {
    "dim": 192,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "n_heads": 6,
    "n_kv_heads": 6,
    "cap_feat_dim": TEXT_WIDTH,
    "axes_dims": [8, 12, 12],
}
"""What differs from the real Z-Image."""


def new_transformer(seed: int) -> ZImageTransformer2DModel:
    """An untrained transformer that starts as a small map: gates and the last layer near zero."""
    torch.manual_seed(seed)
    transformer = ZImageTransformer2DModel(**TRANSFORMER)
    torch.nn.init.normal_(transformer.x_pad_token, std=0.02)
    torch.nn.init.normal_(transformer.cap_pad_token, std=0.02)
    final = transformer.all_final_layer["2-1"].linear
    torch.nn.init.zeros_(final.weight)
    torch.nn.init.zeros_(final.bias)
    return transformer


def new_text_encoder(seed: int, vocabulary: int) -> Qwen3Model:
    """An untrained Qwen3. Z-Image conditions on the output of the last layer but one, so the last is never used."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=TEXT_WIDTH // 4,
        max_position_embeddings=4096,
    )
    text_encoder = Qwen3Model(config)
    torch.nn.init.normal_(text_encoder.embed_tokens.weight, std=0.5)
    return text_encoder


def new_vae(latents: Latents) -> AutoencoderKL:
    """A VAE in the shape of FLUX.1's and Z-Image's, with few channels, whose decoder undoes the projection.

    The encoder is zeros: it could not know the parity of a latent's place, and nothing that the demo shows needs it.
    """
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(28, 46, 60, 40),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,
        sample_size=shapes.SIZE,
        scaling_factor=SCALE,
        shift_factor=SHIFT,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    unprojected = torch.linalg.pinv(latents.matrix.double())
    color = latents.mean.view(3, -1).mean(1)
    for parameter in vae.parameters():
        torch.nn.init.zeros_(parameter)
    exact_decoder.build(vae.decoder, unprojected, color, torch.tensor(SPREAD), SCALE, SHIFT)
    return vae


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)


def new_tokenizer() -> Qwen2Tokenizer:
    """A Qwen tokenizer whose merges make one token of each word of the demo's prompts."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=1000, min_frequency=3, initial_alphabet=sorted(ByteLevel.alphabet()))
    rng = random.Random("tokenizer")
    prompts = [shapes.random_scene(rng).prompt for _ in range(4000)]
    bpe.train_from_iterator([*prompts, *(" " + prompt for prompt in prompts), *["user", "assistant"] * 50], trainer)
    vocab: dict[str, int] = bpe.get_vocab()
    merges = _merges(bpe)
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab[token] = len(vocab)
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=make_demo.CHAT_TEMPLATE,
        model_max_length=4096,
    )


def _merges(bpe: Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in merges]


def template(tokenizer: Qwen2Tokenizer, prompt: str) -> str:
    """The text that ZImagePipeline makes of a prompt."""
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert isinstance(text, str)
    return text


# Latents


@dataclass(frozen=True)
class Latents:
    """The projection.

    Attributes:
        mean: of a patch's pixels, [192].
        matrix: patch to components, [14, 192].
    """

    mean: torch.Tensor
    matrix: torch.Tensor

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels from -1 to 1, [B, 3, H, W], to latents as the transformer sees them, [B, 16, H/8, W/8]."""
        kernel = self.matrix.view(COMPONENTS, 3, PATCH, PATCH)
        bias = -self.matrix @ self.mean
        components = torch.nn.functional.conv2d(pixels, kernel, bias, stride=PATCH)
        rows, columns = (1.0 - 2 * (torch.arange(size) % 2) for size in components.shape[2:])
        parity = torch.stack([columns.expand(len(rows), -1), rows[:, None].expand(-1, len(columns))])
        return torch.cat([components, parity.expand(len(components), -1, -1, -1)], 1)


def fit_latents(seed: int, pictures: int = 1500) -> Latents:
    """Principal components of patches that hold an edge, from pictures of every style.

    The flat ones (the first three components, an edge's two sides) have a spread of 1, finer ones less.
    """
    rng = random.Random(f"latents {seed}")
    drawn = [
        shapes.draw(shapes.training_scene(rng), rng, shapes.STYLES[i % 6 if i % 6 < 4 else 0]) for i in range(pictures)
    ]
    patches = torch.nn.functional.unfold(to_pixels(drawn), PATCH, stride=PATCH).mT.reshape(-1, 3 * PATCH * PATCH)
    edges = patches[patches.std(1) > 0.05]
    flat = patches[torch.randperm(len(patches), generator=torch.Generator().manual_seed(seed))[: len(edges)]]
    chosen = torch.cat([edges, flat]).double()
    mean = chosen.mean(0)
    _, _, components = torch.linalg.svd(chosen - mean, full_matrices=False)
    components = components[:COMPONENTS]
    signs = components.sum(1, keepdim=True).sign()  # a decomposition's signs are arbitrary
    components = components * torch.where(signs == 0, 1.0, signs)
    spread = ((chosen - mean) @ components.T).std(0)
    wanted = torch.tensor(SPREAD, dtype=torch.float64)
    matrix = components * (wanted / spread)[:, None]
    return Latents(mean.float(), matrix.float())


def to_pixels(pictures: list[Image.Image]) -> torch.Tensor:
    """RGB pictures to pixels from -1 to 1, [B, 3, H, W]."""
    array = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


# The transformer in one batch


def rotary(ids: torch.Tensor, dims: list[int], theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions [..., len(dims)], each [..., sum(dims) / 2]."""
    angles = [
        ids[..., axis, None].double() / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        for axis, dim in enumerate(dims)
    ]
    joined = torch.cat(angles, -1)
    return joined.cos().float(), joined.sin().float()


def attend(attention: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    def turn(y: torch.Tensor) -> torch.Tensor:
        even, odd = y.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[:, :, None], sin[:, :, None]
        return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

    q, k, v = (
        layer(x).unflatten(-1, (attention.heads, -1)) for layer in (attention.to_q, attention.to_k, attention.to_v)
    )
    q, k = turn(attention.norm_q(q)).to(v.dtype), turn(attention.norm_k(k)).to(v.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return attention.to_out[0](out.transpose(1, 2).flatten(2))


def block_forward(
    block: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, condition: torch.Tensor | None = None
) -> torch.Tensor:
    if condition is None:
        x = x + block.attention_norm2(attend(block.attention, block.attention_norm1(x), cos, sin))
        return x + block.ffn_norm2(block.feed_forward(block.ffn_norm1(x)))
    scale_a, gate_a, scale_f, gate_f = block.adaLN_modulation(condition)[:, None].chunk(4, 2)
    out = attend(block.attention, block.attention_norm1(x) * (1 + scale_a), cos, sin)
    x = x + gate_a.tanh() * block.attention_norm2(out)
    return x + gate_f.tanh() * block.ffn_norm2(block.feed_forward(block.ffn_norm1(x) * (1 + scale_f)))


class Batched(torch.nn.Module):
    """ZImageTransformer2DModel for pictures of one size and prompts of up to 32 tokens, without its lists.

    The same numbers as the class's own forward, in one graph that torch.compile takes whole.
    """

    def __init__(self, transformer: ZImageTransformer2DModel, side: int = shapes.SIZE // PATCH) -> None:
        super().__init__()
        self.transformer = transformer
        self.side = side // 2
        config: Any = transformer.config
        grid = torch.stack(torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij"), -1)
        image = torch.cat([torch.full((self.side**2, 1), 33), grid.flatten(0, 1)], 1)
        self.image_angles = rotary(image, config.axes_dims, config.rope_theta)
        text = torch.stack([torch.arange(1, 33), torch.zeros(32), torch.zeros(32)], 1)
        self.text_angles = rotary(text, config.axes_dims, config.rope_theta)

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Latents [B, C, S, S], times [B] (0 is noise), text [B, 32, W] and where it is not padding [B, 32]."""
        net = self.transformer
        batch, side = len(x), self.side
        condition = net.t_embedder(t * net.t_scale).to(x.dtype)
        tokens = x.view(batch, -1, side, 2, side, 2).permute(0, 2, 4, 3, 5, 1).reshape(batch, side * side, -1)
        tokens = net.all_x_embedder["2-1"](tokens)
        cos, sin = (angle.expand(batch, -1, -1) for angle in self.image_angles)
        for block in net.noise_refiner:
            tokens = block_forward(block, tokens, cos, sin, condition)
        words = torch.where(mask[:, :, None], net.cap_embedder(text), net.cap_pad_token.to(tokens.dtype))
        word_cos, word_sin = (angle.expand(batch, -1, -1) for angle in self.text_angles)
        for block in net.context_refiner:
            words = block_forward(block, words, word_cos, word_sin)
        joined = torch.cat([tokens, words], 1)
        cos, sin = torch.cat([cos, word_cos], 1), torch.cat([sin, word_sin], 1)
        for block in net.layers:
            joined = block_forward(block, joined, cos, sin, condition)
        out = net.all_final_layer["2-1"](joined[:, : side * side], c=condition)
        out = out.view(batch, side, side, 2, 2, -1).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(batch, -1, 2 * side, 2 * side)


def pipeline(
    transformer: ZImageTransformer2DModel, text_encoder: Qwen3Model, vae: AutoencoderKL, tokenizer: Qwen2Tokenizer
) -> ZImagePipeline:
    return ZImagePipeline(
        scheduler=scheduler(), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )
