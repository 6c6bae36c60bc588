"""Configs that make each diffusers class small enough for a test while its names and structure stay whole."""

from typing import Any

UNET_SD1: dict[str, Any] = {
    "block_out_channels": [32, 64, 64, 64], "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8,
    "layers_per_block": 2, "sample_size": 8,
}  # fmt: skip
UNET_SDXL: dict[str, Any] = {
    "block_out_channels": [32, 64, 64], "cross_attention_dim": 32, "attention_head_dim": [2, 4, 4],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 3], "use_linear_projection": True, "norm_num_groups": 8,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
    "layers_per_block": 2, "sample_size": 8,
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "AuraFlowTransformer2DModel": {
        "num_mmdit_layers": 1, "num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 12, "caption_projection_dim": 16, "pos_embed_max_size": 16, "sample_size": 8,
    },
    "ChromaTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
        "joint_attention_dim": 12, "axes_dims_rope": [2, 2, 4], "approximator_num_channels": 8,
        "approximator_hidden_dim": 16, "approximator_layers": 2,
    },
    "CosmosTransformer3DModel": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "text_embed_dim": 16, "adaln_lora_dim": 4,
        "max_size": [4, 16, 16], "extra_pos_embed_type": None, "in_channels": 4, "out_channels": 4,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 48, "in_channels": 8,
        "out_channels": 8, "text_in_dim": 12, "rope_axes_dim": [4, 6, 6],
    },
    "Flux2Transformer2DModel": {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
        "joint_attention_dim": 12, "timestep_guidance_channels": 8, "axes_dims_rope": [2, 2, 2, 2],
    },
    "Flux3Transformer2DModel": {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
        "cond_in_channels": 4, "joint_attention_dim": 12, "timestep_channels": 8, "axes_dims_rope": [2, 2, 2, 2],
    },
    "FluxTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
        "joint_attention_dim": 12, "pooled_projection_dim": 8, "axes_dims_rope": [2, 2, 4], "guidance_embeds": True,
    },
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8,
        "num_attention_heads": 2, "caption_channels": [12, 16], "text_emb_dim": 8, "axes_dims_rope": [4, 4],
        "llama_layers": [0, 1], "max_resolution": [16, 16],
    },
    "HunyuanVideoTransformer3DModel": {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4,
        "out_channels": 4, "num_refiner_layers": 2, "text_embed_dim": 12, "pooled_projection_dim": 8,
        "rope_axes_dim": [2, 2, 4],
    },
    "Ideogram4Transformer2DModel": {
        "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "intermediate_size": 24,
        "adaln_dim": 8, "llm_features_dim": 12, "mrope_section": [2, 1, 1],
    },
    "Krea2Transformer2DModel": {
        "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "timestep_embed_dim": 8, "text_hidden_dim": 16, "num_text_layers": 2,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 24,
        "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": [2, 2, 4],
    },
    "LTX2VideoTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
        "cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8, "num_layers": 2, "caption_channels": 12,
    },
    "LTXVideoTransformer3DModel": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
        "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 12,
    },
    "Lumina2Transformer2DModel": {
        "hidden_size": 48, "num_layers": 1, "num_refiner_layers": 2, "num_attention_heads": 6, "num_kv_heads": 2,
        "multiple_of": 8, "axes_dim_rope": [2, 2, 4], "axes_lens": [16, 8, 8], "cap_feat_dim": 12, "in_channels": 4,
        "sample_size": 8,
    },
    "MochiTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "pooled_projection_dim": 8, "in_channels": 4,
        "text_embed_dim": 12, "time_embed_dim": 8, "num_layers": 48,
    },
    "QwenImage21Transformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "context_in_dim": 12, "axes_dims_rope": [2, 2, 4],
    },
    "QwenImageTransformer2DModel": {
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 12, "axes_dims_rope": [2, 2, 4],
    },
    "SD3Transformer2DModel": {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 3, "attention_head_dim": 8,
        "num_attention_heads": 3, "joint_attention_dim": 12, "caption_projection_dim": 24, "pooled_projection_dim": 8,
        "pos_embed_max_size": 8, "dual_attention_layers": [0, 1], "qk_norm": "rms_norm",
    },
    "SanaTransformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": 12, "sample_size": 4,
    },
    "WanAnimate2Transformer3DModel": {
        "in_dim": 4, "dim": 16, "ffn_dim": 24, "freq_dim": 8, "text_dim": 12, "out_dim": 4, "num_heads": 2,
        "num_layers": 2,
    },
    "WanAnimateTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 12, "latent_channels": 4, "out_channels": 4,
        "text_dim": 12, "freq_dim": 8, "ffn_dim": 24, "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": 24,
        "rope_max_seq_len": 32, "motion_encoder_channel_sizes": {str(2**i): 8 for i in range(2, 10)},
        "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
    },
    "WanTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12,
        "freq_dim": 8, "ffn_dim": 24, "num_layers": 2, "rope_max_seq_len": 32,
    },
    "WanVACETransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 12,
        "freq_dim": 8, "ffn_dim": 24, "num_layers": 3, "rope_max_seq_len": 32, "vace_layers": [0, 2],
        "vace_in_channels": 8,
    },
    "ZImageTransformer2DModel": {
        "dim": 48, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 12,
        "in_channels": 4, "axes_dims": [8, 8, 8], "axes_lens": [16, 8, 8],
    },
}  # fmt: skip
