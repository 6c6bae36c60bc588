"""A whole diffusers pipeline of random numbers for each architecture, small enough to draw with in a test.

The networks are diffusers' and transformers' own classes. All text is read by one tokenizer, of one token per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers import transformer_wan_animate_2
from diffusers.pipelines.cosmos import pipeline_cosmos2_text2image
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from PIL import Image
from torch.nn.attention.flex_attention import create_block_mask

from tiny_configs import TINY, UNET_SD1, UNET_SDXL
from tiny_models import make_demo

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{{ message.content if message.content is string else message.content[0].text }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
VOCAB = 259
"""256 bytes and three special tokens."""


@dataclass(frozen=True)
class TinyPipeline:
    """How to make a pipeline and draw with it.

    Attributes:
        architecture: name of its transformers' spec.
        make: makes it with numbers of its own in every component.
        call: arguments of a call that takes a moment.
        prefix: what the names in its files begin with.
        slots: the components that a file may replace.
        attributes: what its calls read off the pipeline and no config sets.
        output: what a modular pipeline is asked for.
        left_out: the blocks of a modular pipeline that do not run.
    """

    architecture: str
    make: Callable[..., Any]
    call: Mapping[str, Any]
    prefix: str = ""
    slots: tuple[str, ...] = ("transformer",)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    output: str = "latents"
    left_out: tuple[str, ...] = ()


# Parts


def filled(model: torch.nn.Module, seed: int = 0) -> Any:
    """The model with random numbers in every parameter, norms and biases included."""
    make_demo.fill(model, seed, torch.float32)
    return model.eval()


def network(cls: str, seed: int = 0, **changes: Any) -> Any:
    """A diffusers model at its small config."""
    return filled(getattr(diffusers, cls)(**{**TINY.get(cls, {}), **changes}), seed)


def network_of(cls: Any, **config: Any) -> Any:
    """A model whose class diffusers does not name at its top."""
    return filled(cls(**config))


def tokenizer(length: int = 4096) -> Any:
    made = make_demo.make_tokenizer()
    made.model_max_length = made.init_kwargs["model_max_length"] = length
    made.chat_template = CHAT_TEMPLATE
    return made


class TextReader:
    """In place of the processor of Qwen3-VL, whose picture part needs torchvision: what it does with text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: Any, tokenize: bool, **more: Any) -> Any:
        text = self.tokenizer.apply_chat_template(messages, tokenize=tokenize, **more)
        return [text] if tokenize else text

    def __call__(self, **more: Any) -> Any:
        return self.tokenizer(**more)


def clip(width: int, projection: int = 0) -> Any:
    """A CLIP text encoder, with a projection where its width is given."""
    config = transformers.CLIPTextConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=projection or width, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return filled(cls(config))


def t5(width: int, cls: str = "T5EncoderModel") -> Any:
    config = getattr(transformers, cls).config_class(
        vocab_size=VOCAB, d_model=width, d_kv=6, d_ff=16, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    return filled(getattr(transformers, cls)(config))


def decoder(cls: str, width: int, layers: int = 2, **changes: Any) -> Any:
    """A text encoder that is a language model: Qwen3, Gemma 2, Llama."""
    return filled(getattr(transformers, cls)(getattr(transformers, cls).config_class(**text(width, layers), **changes)))


def text(width: int, layers: int = 2) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def qwen_vl(cls: str, width: int, layers: int = 2) -> Any:
    """A text encoder that could also look at pictures."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": width}
    more = {"fullatt_block_indexes": [0]} if "Qwen2" in cls else {"deepstack_visual_indexes": [0]}
    config = getattr(transformers, cls).config_class(
        text_config={**text(width, layers), "rope_parameters": rope, "rope_scaling": rope},
        vision_config={**vision, **more},
    )  # fmt: skip
    return filled(getattr(transformers, cls)(config))


def vae(latent_channels: int, **changes: Any) -> AutoencoderKL:
    """Half the width and height."""
    return network(
        "AutoencoderKL", latent_channels=latent_channels, norm_num_groups=4, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
        **changes,
    )  # fmt: skip


def vae_flux2(latent_channels: int) -> Any:
    return network(
        "AutoencoderKLFlux2", latent_channels=latent_channels, norm_num_groups=4, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1,
        sample_size=16,
    )  # fmt: skip


def vae_qwen(channels: int) -> Any:
    return network(
        "AutoencoderKLQwenImage", base_dim=4, z_dim=channels, dim_mult=[1, 1], num_res_blocks=1,
        temperal_downsample=[False], latents_mean=[0.1] * channels, latents_std=[1.5] * channels,
    )  # fmt: skip


def vae_wan(channels: int) -> Any:
    return network(
        "AutoencoderKLWan", base_dim=4, z_dim=channels, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.1] * channels, latents_std=[1.5] * channels,
    )  # fmt: skip


def flow(**changes: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**changes)


# Pipelines


def wan() -> Any:
    return diffusers.WanPipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae_wan(4), scheduler=flow(shift=3.0),
        transformer=network("WanTransformer3DModel", seed=1), transformer_2=network("WanTransformer3DModel", seed=2),
        boundary_ratio=0.7,
    )  # fmt: skip


def wan_single() -> Any:
    return diffusers.WanPipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae_wan(4), scheduler=flow(shift=3.0),
        transformer=network("WanTransformer3DModel", seed=1),
    )  # fmt: skip


def ideogram() -> Any:
    features = {"llm_features_dim": 8 * 13}
    return diffusers.Ideogram4Pipeline(
        scheduler=flow(), vae=vae_flux2(1), text_encoder=qwen_vl("Qwen3VLModel", 8, layers=36), tokenizer=tokenizer(),
        transformer=network("Ideogram4Transformer2DModel", seed=1, **features),
        unconditional_transformer=network("Ideogram4Transformer2DModel", seed=2, **features),
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxPipeline(
        scheduler=flow(), vae=vae(1, shift_factor=0.1), text_encoder=clip(8), tokenizer=tokenizer(77),
        text_encoder_2=t5(12), tokenizer_2=tokenizer(), transformer=network("FluxTransformer2DModel"),
    )  # fmt: skip


def flux2_klein() -> Any:
    return diffusers.Flux2KleinPipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=vae_flux2(1), text_encoder=decoder("Qwen3ForCausalLM", 8, 3),
        tokenizer=tokenizer(), transformer=network("Flux2Transformer2DModel", joint_attention_dim=24),
    )  # fmt: skip


def qwen_image() -> Any:
    return diffusers.QwenImagePipeline(
        scheduler=flow(), vae=vae_qwen(4), text_encoder=qwen_vl("Qwen2_5_VLForConditionalGeneration", 16),
        tokenizer=tokenizer(), transformer=network("QwenImageTransformer2DModel", joint_attention_dim=16),
    )  # fmt: skip


def krea2() -> Any:
    return diffusers.Krea2Pipeline(
        scheduler=flow(), vae=vae_qwen(1), text_encoder=qwen_vl("Qwen3VLModel", 16), tokenizer=tokenizer(),
        transformer=network("Krea2Transformer2DModel"), text_encoder_select_layers=(1, 2),
    )  # fmt: skip


def stable_diffusion_3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=network("SD3Transformer2DModel"), scheduler=flow(shift=3.0), vae=vae(4, shift_factor=0.1),
        text_encoder=clip(6, 4), tokenizer=tokenizer(77), text_encoder_2=clip(6, 4), tokenizer_2=tokenizer(77),
        text_encoder_3=t5(12), tokenizer_3=tokenizer(),
    )  # fmt: skip


def lumina2() -> Any:
    return diffusers.Lumina2Pipeline(
        transformer=network("Lumina2Transformer2DModel", axes_lens=[64, 16, 16]), scheduler=flow(),
        vae=vae(4, shift_factor=0.1), text_encoder=decoder("Gemma2Model", 12), tokenizer=tokenizer(),
    )  # fmt: skip


def chroma() -> Any:
    return diffusers.ChromaPipeline(
        scheduler=flow(), vae=vae(1, shift_factor=0.1), text_encoder=t5(12), tokenizer=tokenizer(),
        transformer=network("ChromaTransformer2DModel"),
    )  # fmt: skip


def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(4), text_encoder=clip(16), tokenizer=tokenizer(77), text_encoder_2=clip(16, 16),
        tokenizer_2=tokenizer(77), unet=network("UNet2DConditionModel", **UNET_SDXL),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )  # fmt: skip


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae(4), text_encoder=clip(32), tokenizer=tokenizer(77), unet=network("UNet2DConditionModel", **UNET_SD1),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def hidream() -> Any:
    return diffusers.HiDreamImagePipeline(
        scheduler=flow(), vae=vae(4, shift_factor=0.1), text_encoder=clip(8, 4), tokenizer=tokenizer(77),
        text_encoder_2=clip(8, 4), tokenizer_2=tokenizer(77), text_encoder_3=t5(12), tokenizer_3=tokenizer(),
        text_encoder_4=decoder("LlamaForCausalLM", 16), tokenizer_4=tokenizer(),
        transformer=network("HiDreamImageTransformer2DModel", axes_dims_rope=[4, 2, 2]),
    )  # fmt: skip


def sana() -> Any:
    autoencoder = network(
        "AutoencoderDC", latent_channels=4, attention_head_dim=2, encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_block_types=["ResBlock", "EfficientViTBlock"], decoder_block_types=["ResBlock", "EfficientViTBlock"],
        downsample_block_type="Conv", upsample_block_type="interpolate", scaling_factor=0.4,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        tokenizer=tokenizer(), text_encoder=decoder("Gemma2Model", 12), vae=autoencoder,
        transformer=network("SanaTransformer2DModel"), scheduler=flow(),
    )  # fmt: skip


def auraflow() -> Any:
    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae(4),
        transformer=network("AuraFlowTransformer2DModel"), scheduler=flow(),
    )  # fmt: skip


def z_image() -> Any:
    return make_demo.make_pipeline(0, torch.float32, n_layers=2)


def wan_vace() -> Any:
    return diffusers.WanVACEPipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae_wan(4), scheduler=flow(shift=3.0),
        transformer=network("WanVACETransformer3DModel", vace_in_channels=2 * 4 + 64),
    )  # fmt: skip


def ltx() -> Any:
    autoencoder = network(
        "AutoencoderKLLTXVideo", latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2, layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False), patch_size=1,
        decoder_inject_noise=(False,) * 3, downsample_type=("conv",) * 2, upsample_residual=(False,) * 2,
        upsample_factor=(1, 1),
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=autoencoder, text_encoder=t5(12), tokenizer=tokenizer(),
        transformer=network("LTXVideoTransformer3DModel"),
    )  # fmt: skip


def ltx2() -> Any:
    """Pictures and sound from the hidden states of three layers."""
    video = network(
        "AutoencoderKLLTX2Video", latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2, layers_per_block=(1,) * 3, decoder_layers_per_block=(1,) * 3,
        spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False), patch_size=1,
        decoder_inject_noise=(False,) * 3, downsample_type=("spatiotemporal",) * 2, upsample_residual=(False,) * 2,
        upsample_type=("spatiotemporal",) * 2, upsample_factor=(1, 1),
    )  # fmt: skip
    audio = network("AutoencoderKLLTX2Audio", base_channels=16, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=1)
    connectors = network_of(
        LTX2TextConnectors, caption_channels=12, text_proj_in_factor=3, rope_double_precision=False,
        video_connector_num_attention_heads=2, video_connector_attention_head_dim=6, video_connector_num_layers=1,
        audio_connector_num_attention_heads=2, audio_connector_attention_head_dim=6, audio_connector_num_layers=1,
        video_connector_num_learnable_registers=8, audio_connector_num_learnable_registers=8,
    )  # fmt: skip
    vocoder = network_of(
        LTX2Vocoder, in_channels=128, hidden_channels=8, upsample_kernel_sizes=[4], upsample_factors=[2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1]],
    )  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text(12), "num_hidden_layers": 2, "sliding_window": 8},
        vision_config={**vision, "image_size": 8, "patch_size": 4}, mm_tokens_per_image=4,
    )  # fmt: skip
    return diffusers.LTX2Pipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=video, audio_vae=audio, tokenizer=tokenizer(),
        text_encoder=filled(transformers.Gemma3ForConditionalGeneration(config)), connectors=connectors,
        transformer=network("LTX2VideoTransformer3DModel", audio_in_channels=16, audio_out_channels=16),
        vocoder=vocoder,
    )  # fmt: skip


def wan_animate() -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return diffusers.WanAnimatePipeline(
        tokenizer=tokenizer(), text_encoder=t5(12, "UMT5EncoderModel"), vae=vae_wan(4), scheduler=flow(shift=3.0),
        image_processor=transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=8),
        image_encoder=filled(transformers.CLIPVisionModel(config)),
        transformer=network("WanAnimateTransformer3DModel"),
    )  # fmt: skip


def mochi() -> Any:
    autoencoder = network(
        "AutoencoderKLMochi", encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
    )  # fmt: skip
    return diffusers.MochiPipeline(
        scheduler=flow(), vae=autoencoder, text_encoder=t5(16), tokenizer=tokenizer(),
        transformer=network("MochiTransformer3DModel", text_embed_dim=16, in_channels=12),
    )  # fmt: skip


def hunyuan_video() -> Any:
    autoencoder = network(
        "AutoencoderKLHunyuanVideo", latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1,
        norm_num_groups=4,
    )  # fmt: skip
    return diffusers.HunyuanVideoPipeline(
        text_encoder=decoder("LlamaModel", 12, 3), tokenizer=tokenizer(), vae=autoencoder, scheduler=flow(shift=7.0),
        transformer=network("HunyuanVideoTransformer3DModel"), text_encoder_2=clip(8), tokenizer_2=tokenizer(77),
    )  # fmt: skip


def anima(**config: Any) -> Any:
    pipe = diffusers.AnimaAutoBlocks().init_pipeline()
    conditioner = network(
        "AnimaTextConditioner", source_dim=16, target_dim=16, model_dim=16, num_layers=2, num_attention_heads=2,
        target_vocab_size=VOCAB, min_sequence_length=32,
    )  # fmt: skip
    transformer = network("CosmosTransformer3DModel", concat_padding_mask=False, **config)
    pipe.update_components(
        text_encoder=decoder("Qwen3Model", 16), tokenizer=tokenizer(), t5_tokenizer=tokenizer(), vae=vae_qwen(4),
        text_conditioner=conditioner, transformer=transformer,
        scheduler=flow(shift=3.0),
    )  # fmt: skip
    return pipe


def flux3() -> Any:
    pipe = diffusers.Flux3AutoBlocks().init_pipeline()
    pipe.update_components(
        text_encoder=qwen_vl("Qwen3VLForConditionalGeneration", 6), tokenizer=tokenizer(), vae=vae_flux2(1),
        transformer=network("Flux3Transformer2DModel"), scheduler=flow(),
    )  # fmt: skip
    return pipe


def qwen_image_21() -> Any:
    channels = 4
    autoencoder = network(
        "AutoencoderKLQwenImage21", base_dim=4, decoder_base_dim=4, z_dim=channels, dim_mult=[1, 1], num_res_blocks=1,
        temperal_downsample=[False], latents_mean=[0.1] * channels, latents_std=[1.5] * channels,
    )  # fmt: skip
    pipe = diffusers.QwenImage21AutoBlocks().init_pipeline()
    pipe.update_components(
        text_encoder=qwen_vl("Qwen3VLForConditionalGeneration", 12), processor=tokenizer(), vae=autoencoder,
        transformer=network("QwenImage21Transformer2DModel"), scheduler=flow(use_dynamic_shifting=True),
    )  # fmt: skip
    return pipe


def wan_animate_2() -> Any:
    """With a mask that is made without compiling."""
    transformer_wan_animate_2.create_block_mask = uncompiled_block_mask
    config = transformers.CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=224,
        patch_size=112,
    )
    pipe = diffusers.WanAnimate2Blocks().init_pipeline()
    pipe.update_components(
        text_encoder=t5(12, "UMT5EncoderModel"), tokenizer=tokenizer(), vae=vae_wan(4), scheduler=flow(shift=3.0),
        image_encoder=filled(transformers.CLIPVisionModel(config)),
        transformer=network("WanAnimate2Transformer3DModel", in_dim=12),
    )  # fmt: skip
    return pipe


def ernie_image() -> Any:
    vision = {
        "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 4, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Mistral3Config(text_config={**text(12), "model_type": "mistral"}, vision_config=vision)
    return diffusers.ErnieImagePipeline(
        transformer=network("ErnieImageTransformer2DModel"), vae=vae_flux2(2), tokenizer=tokenizer(), scheduler=flow(),
        text_encoder=filled(transformers.Mistral3Model(config)),
    )  # fmt: skip


def uncompiled_block_mask(*args: Any, **more: Any) -> Any:
    """The same mask without a C++ compiler, and without the minute that compiling takes."""
    return create_block_mask(*args, **{**more, "_compile": False})


class Unchecked(torch.nn.Module):
    """In place of NVIDIA's guardrail, a package with models of several GB: lets every text through."""

    device, dtype = torch.device("cpu"), torch.float32

    def check_text_safety(self, prompt: str) -> bool:
        return True


def cosmos_predict_2() -> Any:
    """Without the mask of padding, which diffusers resizes with torchvision."""
    pipeline_cosmos2_text2image.CosmosSafetyChecker = Unchecked
    return diffusers.Cosmos2TextToImagePipeline(
        text_encoder=t5(16), tokenizer=tokenizer(), vae=vae_wan(4), scheduler=flow(use_karras_sigmas=True),
        transformer=network("CosmosTransformer3DModel", concat_padding_mask=False),
    )  # fmt: skip


_PICTURE = {"prompt": "a red circle", "num_inference_steps": 1, "height": 16, "width": 16}
_LARGER = {"height": 32, "width": 32}
_SHORT = {**_PICTURE, "max_sequence_length": 24}
_VIDEO = {**_SHORT, **_LARGER, "num_frames": 5, "guidance_scale": 3.0}
_EMBEDS = {"prompt_embeds": make_demo.random_tensor("prompt", (1, 24, 12), 0)}
"""In place of prompts that go through ftfy, which need not be installed."""
_WAN_VACE = {
    **{key: value for key, value in _VIDEO.items() if key != "prompt"}, "guidance_scale": 1.0, **_EMBEDS,
}  # fmt: skip
_PHOTO = Image.linear_gradient("L").resize((32, 32)).convert("RGB")
_WAN_ANIMATE = {
    **_EMBEDS, **_LARGER, "image": _PHOTO, "pose_video": [_PHOTO] * 5, "face_video": [_PHOTO] * 5,
    "segment_frame_length": 5, "num_inference_steps": 1,
}  # fmt: skip
_WAN_ANIMATE_2 = {
    **_SHORT, **_LARGER, "image": _PHOTO, "driving_video": [_PHOTO] * 5, "segment_frame_length": 5,
    "output_type": "pt",
}  # fmt: skip

PIPELINES: dict[str, TinyPipeline] = {
    "Wan 2.2": TinyPipeline("Wan", wan, {**_VIDEO, "num_inference_steps": 3}, slots=("transformer", "transformer_2")),
    "Wan 2.1": TinyPipeline("Wan", wan_single, _VIDEO),
    "Ideogram 4": TinyPipeline(
        "Ideogram 4", ideogram,
        {**_SHORT, "max_sequence_length": 64, "guidance_scale": 3.0, "guidance_schedule": None},
        slots=("transformer", "unconditional_transformer"),
    ),
    "FLUX.1": TinyPipeline("FLUX.1", flux, _SHORT),
    "FLUX.2 Klein": TinyPipeline("FLUX.2", flux2_klein, {**_SHORT, "text_encoder_out_layers": (1, 2, 3)}),
    "FLUX.3": TinyPipeline(
        "FLUX.3", flux3, {**_PICTURE, **_LARGER, "text_encoder_out_layers": (1, 2)},
        attributes={"tokenizer": TextReader(tokenizer())}, left_out=("prompt_upsampler",),
    ),
    "Qwen-Image 2.1": TinyPipeline(
        "Qwen-Image 2.1", qwen_image_21, {**_PICTURE, **_LARGER}, attributes={"processor": TextReader(tokenizer())}
    ),
    "Qwen-Image": TinyPipeline(
        "Qwen-Image", qwen_image, {**_SHORT, "negative_prompt": "blue"}, "model.diffusion_model."
    ),
    "Krea 2": TinyPipeline("Krea 2", krea2, _SHORT),
    "Stable Diffusion 3": TinyPipeline("Stable Diffusion 3", stable_diffusion_3, _SHORT),
    "Lumina 2": TinyPipeline("Lumina 2", lumina2, {**_SHORT, "height": 64, "width": 64}),
    "Chroma": TinyPipeline("Chroma", chroma, _SHORT),
    "SDXL": TinyPipeline("SDXL", sdxl, _PICTURE, slots=("unet",)),
    "Stable Diffusion 1.5": TinyPipeline(
        "Stable Diffusion", stable_diffusion, _PICTURE, "model.diffusion_model.", slots=("unet",)
    ),
    "HiDream": TinyPipeline("HiDream", hidream, _SHORT, attributes={"default_sample_size": 8}),
    "Sana": TinyPipeline(
        "Sana", sana,
        {**_SHORT, **_LARGER, "use_resolution_binning": False, "complex_human_instruction": None},
    ),
    "AuraFlow": TinyPipeline("AuraFlow", auraflow, _SHORT),
    "Z-Image": TinyPipeline("Z-Image", z_image, {**_SHORT, "height": 64, "width": 64, "max_sequence_length": 64}),
    "Wan VACE": TinyPipeline("Wan VACE", wan_vace, _WAN_VACE),
    "Wan Animate": TinyPipeline("Wan Animate", wan_animate, _WAN_ANIMATE),
    "Wan Animate 2": TinyPipeline("Wan Animate 2", wan_animate_2, _WAN_ANIMATE_2, output="videos"),
    "LTX-Video": TinyPipeline("LTX-Video", ltx, _VIDEO),
    "LTX-2": TinyPipeline("LTX-2", ltx2, {**_VIDEO, "spatio_temporal_guidance_blocks": [1]}),
    "Anima": TinyPipeline("Anima", anima, _SHORT, "net."),
    "ERNIE-Image": TinyPipeline("ERNIE-Image", ernie_image, {**_PICTURE, "use_pe": False}),
    "Cosmos Predict 2": TinyPipeline(
        "Cosmos Predict 2", cosmos_predict_2,
        {**_SHORT, **_LARGER, "num_inference_steps": 2, "negative_prompt": "blue"},
    ),
    "Mochi": TinyPipeline("Mochi", mochi, {**_VIDEO, "num_frames": 7, "num_inference_steps": 2}),
    "HunyuanVideo": TinyPipeline("HunyuanVideo", hunyuan_video, _VIDEO),
}  # fmt: skip
