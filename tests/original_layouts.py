"""Tensors of a diffusers network in the layout that its authors or ComfyUI publish: the converters, backwards.

`from_recipes` turns the recipes of a real header around. `WRITTEN_OUT` holds what has no real header here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from transplant.recipe import Made, Rows, ranges_of

Tensors = dict[str, torch.Tensor]


def from_recipes(made: Mapping[str, Made], state: Mapping[str, torch.Tensor]) -> Tensors:
    """Give the sources of `made`, at the sizes that `state` implies.

    Args:
        made: what a converter makes of a real header, which may be wider and deeper than `state`.
        state: a network's tensors. Sources that feed a tensor that it lacks are left out.
    """
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    skipped = {part.source for name, item in made.items() if name not in state for part in ranges_of(item.recipe)}
    for name, item in made.items():
        if name not in state:
            continue
        parts, tensor = list(ranges_of(item.recipe)), state[name]
        if not isinstance(item.recipe, Rows):
            tensor = tensor.flatten()
        sizes = [part.stop - part.start for part in parts]
        rows = len(tensor) if tensor.ndim else 1
        ends = [0] + [sum(sizes[: index + 1]) * rows // sum(sizes) for index in range(len(sizes))]
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
            pieces.setdefault(part.source, {})[part.start] = tensor[start:stop] if len(parts) > 1 else tensor
    return {
        source: torch.cat([found[start] for start in sorted(found)]) if len(found) > 1 else next(iter(found.values()))
        for source, found in pieces.items()
        if source not in skipped
    }


def _renamed(state: Tensors, *pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> Tensors:
    """Replace regular expressions in every name, one after the other."""
    result: Tensors = {}
    for name, tensor in state.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        assert name not in result, name
        result[name] = tensor
    return result


def _fused(state: Tensors, parts: Sequence[str], whole: str) -> Tensors:
    """Join the tensors whose names differ only in `parts` into one called `whole`."""
    result: Tensors = {}
    for name, tensor in state.items():
        if parts[0] in name:
            result[name.replace(parts[0], whole)] = torch.cat([state[name.replace(parts[0], part)] for part in parts])
        elif not any(part in name for part in parts[1:]):
            result[name] = tensor
    return result


def _swapped(state: Tensors, *names: str) -> Tensors:
    """Exchange the halves of the tensors whose names hold one of `names`."""
    return {
        name: torch.cat(tensor.chunk(2)[::-1]) if any(part in name for part in names) else tensor
        for name, tensor in state.items()
    }


def _flux3(state: Tensors) -> Tensors:
    return _renamed(
        _swapped(state, "norm_out.linear"),
        (r"^x_embedders\.", "emb_in."),
        (r"^context_embedder\.", "txt_in."),
        (r"^mode_blocks\.", "content_mode_blocks."),
        (r"^single_transformer_blocks\.", "single_blocks."),
        (r"^timestep_embedder\.linear_1\.", "time_in.in_layer."),
        (r"^timestep_embedder\.linear_2\.", "time_in.out_layer."),
        (r"^norm_out\.linear\.", "final_layer.image.adaLN_modulation.1."),
        (r"^proj_out\.", "final_layer.image.linear."),
        (r"(modulations\.\w+)\.linear\.", r"\1.lin."),
        (r"attn\.to_([qkv])\.", r"\1_proj."),
        (r"attn\.to_out\.0\.", "attn_out."),
        (r"attn\.norm_q\.weight", "norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "norm.key_norm.scale"),
        (r"ff\.linear_in\.", "mlp_in."),
        (r"ff\.linear_out\.", "mlp_out."),
    )


def _ltx(state: Tensors) -> Tensors:
    return _renamed(
        state,
        (r"^proj_in\.", "patchify_proj."),
        (r"^time_embed\.", "adaln_single."),
        (r"norm_([qk])\.", r"\1_norm."),
    )


def _ltx2(state: Tensors) -> Tensors:
    return _renamed(
        state,
        (r"^(audio_)?proj_in\.", r"\1patchify_proj."),
        (r"^(audio_)?(prompt_adaln|time_embed)\.", lambda m: f"{m[1] or ''}{_ADALN[m[2]]}."),
        (r"^av_cross_attn_(video|audio)_scale_shift\.", r"av_ca_\1_scale_shift_adaln_single."),
        (r"^av_cross_attn_video_a2v_gate\.", "av_ca_a2v_gate_adaln_single."),
        (r"^av_cross_attn_audio_v2a_gate\.", "av_ca_v2a_gate_adaln_single."),
        (r"(video|audio)_a2v_cross_attn_scale_shift_table", r"scale_shift_table_a2v_ca_\1"),
        (r"norm_([qk])\.", r"\1_norm."),
    )


_ADALN = {"prompt_adaln": "prompt_adaln_single", "time_embed": "adaln_single"}


def _auraflow(state: Tensors) -> Tensors:
    return _renamed(
        _swapped(state, "norm_out.linear"),
        (r"^pos_embed\.pos_embed", "positional_encoding"),
        (r"^pos_embed\.proj\.", "init_x_linear."),
        (r"^context_embedder\.", "cond_seq_linear."),
        (r"^time_step_proj\.linear_1\.", "t_embedder.mlp.0."),
        (r"^time_step_proj\.linear_2\.", "t_embedder.mlp.2."),
        (r"^proj_out\.", "final_linear."),
        (r"^norm_out\.linear\.", "modF.1."),
        (r"^joint_transformer_blocks\.(\d+)\.attn\.to_(?!add)(\w)[\w.]*\.weight", r"double_layers.\1.attn.w2\2.weight"),
        (r"^joint_transformer_blocks\.(\d+)\.attn\.to_add_(o)ut\.", r"double_layers.\1.attn.w1\2."),
        (r"^joint_transformer_blocks\.(\d+)\.attn\.add_(\w)_proj\.", r"double_layers.\1.attn.w1\2."),
        (r"^single_transformer_blocks\.(\d+)\.attn\.to_(\w)[\w.]*\.weight", r"single_layers.\1.attn.w1\2.weight"),
        (r"^joint_transformer_blocks\.(\d+)\.", r"double_layers.\1."),
        (r"^single_transformer_blocks\.(\d+)\.", r"single_layers.\1."),
        (r"^(double_layers\.\d+)\.norm1\.linear\.", r"\1.modX.1."),
        (r"^(double_layers\.\d+)\.norm1_context\.linear\.", r"\1.modC.1."),
        (r"^(single_layers\.\d+)\.norm1\.linear\.", r"\1.modCX.1."),
        (r"^(double_layers\.\d+)\.ff\.", r"\1.mlpX."),
        (r"^(double_layers\.\d+)\.ff_context\.", r"\1.mlpC."),
        (r"^(single_layers\.\d+)\.ff\.", r"\1.mlp."),
        (r"linear_([12])\.", r"c_fc\1."),
        (r"out_projection\.", "c_proj."),
    )


def _sana(state: Tensors) -> Tensors:
    fused = _fused(state, (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), ".attn.qkv.")
    fused = _fused(fused, (".attn2.to_k.", ".attn2.to_v."), ".cross_attn.kv_linear.")
    return _renamed(
        fused,
        (r"^patch_embed\.", "x_embedder."),
        (r"^time_embed\.emb\.timestep_embedder\.linear_1\.", "t_embedder.mlp.0."),
        (r"^time_embed\.emb\.timestep_embedder\.linear_2\.", "t_embedder.mlp.2."),
        (r"^time_embed\.linear\.", "t_block.1."),
        (r"^caption_projection\.linear_([12])\.", r"y_embedder.y_proj.fc\1."),
        (r"^caption_norm\.", "attention_y_norm."),
        (r"^proj_out\.", "final_layer.linear."),
        (r"^scale_shift_table$", "final_layer.scale_shift_table"),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.attn1\.to_out\.0\.", ".attn.proj."),
        (r"\.attn2\.to_out\.0\.", ".cross_attn.proj."),
        (r"\.attn2\.to_q\.", ".cross_attn.q_linear."),
        (r"\.ff\.conv_(\w+)\.", r".mlp.\1_conv.conv."),
    )


def _mochi(state: Tensors) -> Tensors:
    fused = _fused(state, (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), ".attn.qkv_x.")
    fused = _fused(fused, (".attn1.add_q_proj.", ".attn1.add_k_proj.", ".attn1.add_v_proj."), ".attn.qkv_y.")
    return _renamed(
        _swapped(fused, "norm_out.linear", ".ff.net.0.", ".ff_context.net.0."),
        (r"^patch_embed\.", "x_embedder."),
        (r"^time_embed\.timestep_embedder\.linear_1\.", "t_embedder.mlp.0."),
        (r"^time_embed\.timestep_embedder\.linear_2\.", "t_embedder.mlp.2."),
        (r"^time_embed\.pooler\.", "t5_y_embedder."),
        (r"^time_embed\.caption_proj\.", "t5_yproj."),
        (r"^norm_out\.linear\.", "final_layer.mod."),
        (r"^proj_out\.", "final_layer.linear."),
        (r"^transformer_blocks\.", "blocks."),
        (r"\.norm1\.linear\.", ".mod_x."),
        (r"\.norm1_context\.linear(_1)?\.", ".mod_y."),
        (r"\.attn1\.norm_([qk])\.", r".attn.\1_norm_x."),
        (r"\.attn1\.norm_added_([qk])\.", r".attn.\1_norm_y."),
        (r"\.attn1\.to_out\.0\.", ".attn.proj_x."),
        (r"\.attn1\.to_add_out\.", ".attn.proj_y."),
        (r"\.ff\.net\.0\.proj\.", ".mlp_x.w1."),
        (r"\.ff\.net\.2\.", ".mlp_x.w2."),
        (r"\.ff_context\.net\.0\.proj\.", ".mlp_y.w1."),
        (r"\.ff_context\.net\.2\.", ".mlp_y.w2."),
    )


def _wan(state: Tensors) -> Tensors:
    return _renamed(
        state,
        (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
        (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
        (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
        (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
        (r"^condition_embedder\.time_proj\.", "time_projection.1."),
        (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
        (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
        (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^proj_out\.", "head.head."),
        (r"(blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
        (r"(blocks\.\d+)\.norm2\.", r"\1.norm3."),
        (r"(blocks\.\d+)\.proj_in\.", r"\1.before_proj."),
        (r"(blocks\.\d+)\.proj_out\.", r"\1.after_proj."),
        (r"(blocks\.\d+)\.ffn\.net\.0\.proj\.", r"\1.ffn.0."),
        (r"(blocks\.\d+)\.ffn\.net\.2\.", r"\1.ffn.2."),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        *_WAN_ATTENTION,
    )


_WAN_ATTENTION = (
    (r"_attn\.to_out\.0\.", "_attn.o."),
    (r"_attn\.to_([qkv])\.", r"_attn.\1."),
    (r"_attn\.add_([kv])_proj\.", r"_attn.\1_img."),
    (r"_attn\.norm_added_k\.", "_attn.norm_k_img."),
)


def _wan_animate(state: Tensors) -> Tensors:
    convs = "motion_encoder.enc.net_app.convs."
    renamed = _renamed(
        _wan(_with_fused_faces(state)),
        (r"^motion_encoder\.motion_synthesis_weight", "motion_encoder.dec.direction.weight"),
        (r"^motion_encoder\.conv_in\.weight", f"{convs}0.0.weight"),
        (r"^motion_encoder\.conv_in\.act_fn\.bias", f"{convs}0.1.bias"),
        (r"^motion_encoder\.conv_out\.", f"{convs}8."),
        (r"^motion_encoder\.motion_network\.", "motion_encoder.enc.fc."),
        (r"^motion_encoder\.res_blocks\.(\d)\.", lambda m: f"{convs}{int(m[1]) + 1}."),
        (r"conv1\.weight$", "conv1.0.weight"),
        (r"conv1\.act_fn\.bias", "conv1.1.bias"),
        (r"(convs.*)conv2\.weight$", r"\1conv2.1.weight"),
        (r"conv2\.act_fn\.bias", "conv2.2.bias"),
        (r"conv_skip\.", "skip.1."),
        (r"^face_encoder\.(conv\w+)\.", r"face_encoder.\1.conv."),
        (r"^face_adapter\.(\d+)\.to_q\.", r"face_adapter.fuser_blocks.\1.linear1_q."),
        (r"^face_adapter\.(\d+)\.to_out\.", r"face_adapter.fuser_blocks.\1.linear2."),
        (r"^face_adapter\.(\d+)\.norm_([qk])\.", r"face_adapter.fuser_blocks.\1.\2_norm."),
    )
    return {
        name: tensor[None, :, None, None] if name.startswith(convs) and name.endswith(".bias") else tensor
        for name, tensor in renamed.items()
    }


def _with_fused_faces(state: Tensors) -> Tensors:
    faces = {name: tensor for name, tensor in state.items() if name.startswith("face_adapter.")}
    fused = _fused(faces, (".to_k.", ".to_v."), ".linear1_kv.")
    kept = {name: tensor for name, tensor in state.items() if name not in faces}
    return kept | _renamed(fused, (r"r\.(\d+)\.linear1_kv\.", r"r.fuser_blocks.\1.linear1_kv."))


def _wan_animate_2(state: Tensors) -> Tensors:
    return _renamed(state, *_WAN_ATTENTION, (r"^(blocks\.\d+)\.", r"\1.block."))


def _ideogram4(state: Tensors) -> Tensors:
    fused = _fused(state, (".attention.to_q.", ".attention.to_k.", ".attention.to_v."), ".attention.qkv.")
    return _renamed(fused, (r"attention\.to_out\.0\.", "attention.o."))


WRITTEN_OUT: dict[str, Callable[[Tensors], Tensors]] = {
    "AuraFlow": _auraflow,
    "FLUX.3": _flux3,
    "Ideogram 4": _ideogram4,
    "LTX-2": _ltx2,
    "LTX-Video": _ltx,
    "Mochi": _mochi,
    "Sana": _sana,
    "Wan": _wan,
    "Wan Animate": _wan_animate,
    "Wan Animate 2": _wan_animate_2,
    "Wan VACE": _wan,
}
"""Architecture → a network's tensors in its original layout."""
