"""Makes a tiny Z-Image base model of random numbers and override files for it, in seconds: for tests and benchmarks.

The networks are real diffusers classes at a small width, and the layouts are the real ones. The pictures are abstract;
every override has numbers of its own, so every override draws another picture. What the WebUI comes with is trained,
see assemble.py; it takes the layouts from here.

    python demo/make_demo.py OUT_DIR
"""

import json
import math
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model
from transformers.utils import logging as transformers_logging

Tensors = dict[str, torch.Tensor]

VERSION = 1
"""Goes up with every change of what is written, so that a demo made by an older version is made anew."""

BASE = "Diffusers/transplant-demo-z-image"
COMFYUI = "UNET/demo-comfyui-bf16.safetensors"
BUNDLE = "UNET/demo-bundle-fp16.safetensors"
DIFFUSERS = "UNET/variants/demo-diffusers-fp32.safetensors"
FLUX = "UNET/not-for-this-base/demo-flux.safetensors"
RECORD = "transplant-demo.json"
"""In the base model's folder: every file of the demo with its size."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


# Numbers


def random_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Random float32 numbers, decided by seed, name and shape alone, at a scale that keeps signals near 1.

    None is 0 or 1, not even after rounding to bf16 or fp16: what a loader forgets to fill always shows.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    numbers = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        is_norm = name.endswith((".weight", ".scale"))
        return 0.6 + 0.3 * torch.sigmoid(numbers) if is_norm else 0.1 * numbers
    if name.endswith("embed_tokens.weight"):
        return 0.3 * numbers
    if len(shape) == 4 and shape[-1] == 3:  # blur each convolution: pictures of clouds, not of static
        numbers = numbers.mean(dim=(2, 3), keepdim=True) * 3 + 0.15 * numbers
    return numbers / math.sqrt(math.prod(shape[1:]))


def fill(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Replace every parameter of the model by `random_tensor` numbers, rounded to the dtype; buffers stay."""
    for name, parameter in model.named_parameters():
        parameter.data = random_tensor(name, parameter.shape, seed).to(dtype)


# The base model


def transformer_config(dim: int = 48, **overrides: Any) -> dict[str, Any]:
    """The arguments of a small ZImageTransformer2DModel; what is not named here is as in the real Z-Image.

    Args:
        dim: Width, a multiple of 24; the feed-forward layers are 8/3 as wide, each head has 24.
        overrides: Anything else that the class takes.
    """
    config = {
        "dim": dim,
        "n_layers": 4,
        "n_refiner_layers": 1,
        "n_heads": dim // 24,
        "n_kv_heads": dim // 24,
        "cap_feat_dim": 128,
        "axes_dims": [8, 8, 8],
    }
    return config | overrides


def random_transformer(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> ZImageTransformer2DModel:
    """A transformer whose every parameter, norms included, holds numbers that tell a wrong one from the right one."""
    transformer = ZImageTransformer2DModel(**config)
    fill(transformer, seed, dtype)
    return transformer.eval()


def random_vae(seed: int, dtype: torch.dtype) -> AutoencoderKL:
    """The VAE of FLUX.1 and Z-Image (16 latent channels, factor 8, no quant convolutions) with few channels."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=64,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    fill(vae, seed, dtype)
    return vae.eval()


def make_tokenizer() -> Qwen2Tokenizer:
    """A Qwen tokenizer with one token per byte and no merges."""
    vocab = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocab |= {token: len(vocab) + number for number, token in enumerate(specials)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def random_text_encoder(hidden_size: int, vocab_size: int, seed: int, dtype: torch.dtype) -> Qwen3Model:
    """A two-layer Qwen3; Z-Image conditions on the output of the last layer but one."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=4096,
    )
    text_encoder = Qwen3Model(config)
    fill(text_encoder, seed, dtype)
    return text_encoder.eval()


def make_pipeline(seed: int, dtype: torch.dtype, **config: Any) -> ZImagePipeline:
    """A complete pipeline of random numbers; `config` goes to `transformer_config`."""
    tokenizer = make_tokenizer()
    full_config = transformer_config(**config)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        vae=random_vae(seed, dtype),
        text_encoder=random_text_encoder(full_config["cap_feat_dim"], len(tokenizer), seed, dtype),
        tokenizer=tokenizer,
        transformer=random_transformer(full_config, seed, dtype),
    )


def save_base(folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """Write a complete diffusers folder of random numbers and return it; `config` goes to `transformer_config`."""
    with_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        make_pipeline(seed, dtype, **config).save_pretrained(folder)
    finally:
        if with_bars:
            transformers_logging.enable_progress_bar()
    return folder


# The layouts of single files

COMFYUI_NAMES = {
    "all_x_embedder.2-1.": "x_embedder.",
    "all_final_layer.2-1.": "final_layer.",
    ".attention.norm_q.": ".attention.q_norm.",
    ".attention.norm_k.": ".attention.k_norm.",
    ".attention.to_out.0.": ".attention.out.",
}

LDM_VAE_NAMES = {
    r"\.down_blocks\.(\d)\.resnets\.": r".down.\1.block.",
    r"\.down_blocks\.(\d)\.downsamplers\.0\.": r".down.\1.downsample.",
    r"\.mid_block\.resnets\.0\.": ".mid.block_1.",
    r"\.mid_block\.resnets\.1\.": ".mid.block_2.",
    r"\.mid_block\.attentions\.0\.to_out\.0\.": ".mid.attn_1.proj_out.",
    r"\.mid_block\.attentions\.0\.group_norm\.": ".mid.attn_1.norm.",
    r"\.mid_block\.attentions\.0\.to_([qkv])\.": r".mid.attn_1.\1.",
    r"\.conv_shortcut\.": ".nin_shortcut.",
    r"\.conv_norm_out\.": ".norm_out.",
}


def to_comfyui(state_dict: Tensors) -> Tensors:
    """Z-Image in ComfyUI's layout: q, k and v joined by rows, other names; undoes diffusers' own converter."""
    result: Tensors = {}
    for name, tensor in state_dict.items():
        stem, part = name.rpartition(".attention.to_")[::2]
        if stem and part == "q.weight":
            qkv = [state_dict[f"{stem}.attention.to_{letter}.weight"] for letter in "qkv"]
            result[f"{stem}.attention.qkv.weight"] = torch.cat(qkv)
        elif not stem or part not in ("k.weight", "v.weight"):
            for ours, theirs in COMFYUI_NAMES.items():
                name = name.replace(ours, theirs)
            result[name] = tensor
    return result


def vae_to_ldm(state_dict: Tensors, levels: int = 4) -> Tensors:
    """An AutoencoderKL in the layout of the original latent diffusion code, which ComfyUI's bundles use."""

    def up_block(match: re.Match[str]) -> str:
        part = {"resnets": "block", "upsamplers.0": "upsample"}[match[2]]
        return f".up.{levels - 1 - int(match[1])}.{part}."

    result: Tensors = {}
    for name, tensor in state_dict.items():
        is_matrix = tensor.ndim == 2  # only the attention has them, stored as 1x1 convolutions
        for pattern, replacement in LDM_VAE_NAMES.items():
            name = re.sub(pattern, replacement, name)
        name = re.sub(r"\.up_blocks\.(\d)\.(resnets|upsamplers\.0)\.", up_block, name)
        result[name] = tensor[:, :, None, None] if is_matrix else tensor
    return result


def with_prefix(state_dict: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in state_dict.items()}


def make_bundle(pipeline: ZImagePipeline) -> Tensors:
    """All of a pipeline in one file, as ComfyUI saves it, with the stray NaN tensor of many Z-Image finetunes."""
    transformer = to_comfyui(pipeline.transformer.state_dict())
    transformer["norm_final.weight"] = torch.full_like(transformer["layers.0.attention_norm1.weight"], math.nan)
    text_encoder = pipeline.text_encoder.state_dict()
    return {
        **with_prefix(transformer, "model.diffusion_model."),
        **with_prefix(vae_to_ldm(pipeline.vae.state_dict()), "vae."),
        **with_prefix(text_encoder, "text_encoders.qwen3_4b.transformer.model."),
    }


def flux_bfl(
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, blocks: int = 1, hidden: int = 48, heads: int = 2
) -> Tensors:
    """A small FLUX.1-dev in the layout of its makers: `blocks` double and as many single blocks."""
    linears = {"img_in": (hidden, 64), "txt_in": (hidden, 64), "final_layer.linear": (64, hidden)}
    linears["final_layer.adaLN_modulation.1"] = (2 * hidden, hidden)
    for name, width in {"time_in": 256, "guidance_in": 256, "vector_in": 32}.items():
        linears |= {f"{name}.in_layer": (hidden, width), f"{name}.out_layer": (hidden, hidden)}
    norms: list[str] = []
    for i in range(blocks):
        for stream in (f"double_blocks.{i}.img", f"double_blocks.{i}.txt"):
            linears |= {f"{stream}_attn.qkv": (3 * hidden, hidden), f"{stream}_attn.proj": (hidden, hidden)}
            linears |= {f"{stream}_mlp.0": (4 * hidden, hidden), f"{stream}_mlp.2": (hidden, 4 * hidden)}
            linears[f"{stream}_mod.lin"] = (6 * hidden, hidden)
            norms += [f"{stream}_attn.norm.{kind}_norm.scale" for kind in ("query", "key")]
        single = f"single_blocks.{i}"
        linears |= {f"{single}.linear1": (7 * hidden, hidden), f"{single}.linear2": (hidden, 5 * hidden)}
        linears[f"{single}.modulation.lin"] = (3 * hidden, hidden)
        norms += [f"{single}.norm.{kind}_norm.scale" for kind in ("query", "key")]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= dict.fromkeys(norms, (hidden // heads,))
    return {name: random_tensor(name, shape, seed).to(dtype) for name, shape in shapes.items()}


# The demo


def save(path: Path, state_dict: Tensors, metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file, folders included, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_dict, path, metadata)
    return path


def is_complete(out: Path) -> bool:
    """Whether every file of this version's demo is there at its full size."""
    try:
        record = json.loads((out / BASE / RECORD).read_text(encoding="utf-8"))
        return record["version"] == VERSION and all(
            (out / name).stat().st_size == size for name, size in record["files"].items()
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def make_demo(out: Path) -> None:
    """Write the demo into a models folder, whole or not at all; other files there stay as they are.

    A complete demo is left alone; a half or an older one is replaced.

    Args:
        out: Folder that has, or gets, `Diffusers` and `UNET`.
    """
    if is_complete(out):
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".transplant-demo-", dir=out) as work:
        new = Path(work) / "new"
        _write(new)
        for name in (COMFYUI, BUNDLE, DIFFUSERS, FLUX):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, out / name)
        (out / BASE).parent.mkdir(parents=True, exist_ok=True)
        if (out / BASE).exists():
            os.replace(out / BASE, Path(work) / "replaced")
        os.replace(new / BASE, out / BASE)  # last: it brings the record that says the demo is complete


def _write(out: Path) -> None:
    save_base(out / BASE)
    config = transformer_config()
    save(out / COMFYUI, to_comfyui(random_transformer(config, 1, torch.bfloat16).state_dict()))
    save(out / BUNDLE, make_bundle(make_pipeline(2, torch.float16)))
    save(out / DIFFUSERS, dict(random_transformer(config, 3, torch.float32).state_dict()), {"format": "pt"})
    save(out / FLUX, flux_bfl(4, torch.bfloat16))
    for path in out.rglob("*.safetensors"):  # written for their owner alone
        shutil.copymode(out / BASE / "model_index.json", path)
    files = {path.relative_to(out).as_posix(): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    record = json.dumps({"version": VERSION, "files": dict(sorted(files.items()))}, indent=1)
    (out / BASE / RECORD).write_text(record + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python demo/make_demo.py OUT_DIR", file=sys.stderr)
        return 1
    out = Path(arguments[0])
    make_demo(out)
    print(f"The demo is in {out}: base model {BASE}, overrides in UNET.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
