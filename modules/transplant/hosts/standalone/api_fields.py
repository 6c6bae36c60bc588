"""The fields of a txt2img request: what SD.Next and A1111 have beside ours, and what is said of those that nobody has.

Their clients send many fields that have no effect here. They are taken, and the answer's `info` lists them as
`ignored`. A field that neither program has is a mistake of the caller's, and is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from transplant.errors import OptionError, nearest

NAMES = {"guidance": "cfg_scale", "pictures": "n_iter", "sampler": "sampler_name"}
"""What the fields of a request to draw are called over HTTP, where they are called otherwise."""

FAMILIES = (
    "detailer_", "freeu_", "grading_", "hdr_", "hr_", "hypertile_", "inpaint_", "inpainting_", "ip_adapter",
    "lora_", "refiner_", "resize_", "save_images", "scale_by", "schedulers_", "seed_resize_", "selected_scale_tab",
    "subseed", "teacache_",
)  # fmt: skip
"""How the names of some begin."""

_SINGLE = """
alwayson_scripts cfg_adaptive cfg_end cfg_image cfg_rescale cfg_true clip_skip color_correction_method comments
control_units denoising_strength diffusers_generator_device diffusers_zeros_prompt_pad disable_extra_networks
do_not_reload_embeddings do_not_save_grid do_not_save_samples enable_batch_seeds enable_hr enhance_prompt eta
eta_noise_seed_delta extra extra_networks_default_multiplier face firstpass_image firstphase_height firstphase_width
force_task_id grid_format grid_save guidance_name guidance_rescale guidance_scale guidance_start guidance_stop
height_after height_before height_mask hidiffusion image_metadata img2img_background_color img2img_color_correction
img2img_fix_steps include_mask infotext init_control init_images initial_noise_multiplier jpeg_quality
keep_incomplete latent_mask mask mask_apply_overlay mask_blur mask_for_overlay nan_skip network_data outpath_grids
outpath_samples overlay_images override_settings_restore_afterwards paste_to prompt_attention prompt_mean_norm
restore_faces return_grid s_churn s_min_uncond s_noise s_tmax s_tmin sampler_index samples_format samples_save
scheduler scheduler_eta script_args script_name sd_model sd_model_checkpoint sequential_seed skip_processing styles
te_complex_human_instruction te_pooled_embeds te_use_mask tiling todo_ratio token_merging_method tome_ratio
uni_pc_variant use_deprecated_controlnet vae_tile_frames vae_type video_engine video_interpolate
video_interpolate_scale video_model width_after width_before width_mask xyz
"""
SINGLE = frozenset(_SINGLE.split())
"""The others."""


def ignored(extra: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """The fields of a request that have no effect here.

    Args:
        extra: the fields that were sent and are none of ours.
        known: ours.

    Raises:
        OptionError: neither SD.Next nor A1111 has such a field either.
    """
    for name in extra:
        if name not in SINGLE and not name.startswith(FAMILIES):
            near = nearest(name, list(known))
            meant = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise OptionError(name, None, f"there is no such field; {meant}")
    return list(extra)


def renamed(error: OptionError) -> OptionError:
    """A refusal that names its field as the caller did."""
    return OptionError(NAMES.get(error.key, error.key), error.value, error.reason)


def no_bool(value: object) -> object:
    """A number as SD.Next takes it: also as text; but true and false are none. Raises PydanticCustomError."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "must be a number")
    return value
