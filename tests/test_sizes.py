"""Files of another size than the base model: the config follows, or both widths are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test_architectures import BY_NAME, base_folder, config_changes, shapes_of, sparse, tiny_config
from tiny_models import write_from_manifest
from transplant import errors
from transplant.architectures import SPECS
from transplant.architectures.spec import InputSpec, TransformerSpec
from transplant.plan import plan

WAN_14B: dict[str, Any] = {}
WAN_1_3B = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
WAN_5B = {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
KLEIN_4B = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
KLEIN_9B = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
FLUX2_DEV: dict[str, Any] = {}
INPUTS = [(spec, taken) for spec in SPECS for taken in spec.inputs]


@pytest.mark.parametrize(("architecture", "base", "file"), [
    ("Cosmos Predict 2", {"num_layers": 28, "num_attention_heads": 16}, {"num_layers": 36, "num_attention_heads": 40}),
    ("LTX-Video", {}, {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}),
    ("Sana", {}, {"num_layers": 60}),
    ("Wan", WAN_14B, WAN_1_3B),
])  # fmt: skip
def test_config_follows_the_file(architecture: str, base: dict[str, Any], file: dict[str, Any], tmp_path: Path) -> None:
    spec = BY_NAME[architecture]
    assert config_changes(tmp_path, spec, base, shapes_of(spec.cls, {**base, **file})) == file


@pytest.mark.parametrize(("spec", "taken"), INPUTS, ids=lambda item: getattr(item, "name", None) or item.what)
def test_what_other_components_give_is_named_with_both_widths(
    spec: TransformerSpec, taken: InputSpec, tmp_path: Path
) -> None:
    """Every architecture says where text and latents go in; a file that takes another width there is refused."""
    shapes = shapes_of(spec.cls, tiny_config(spec))
    rows, width, *rest = shapes[taken.weight]
    file = sparse(tmp_path / "x.safetensors", {**shapes, taken.weight: (rows, width + 16, *rest)})
    base = base_folder(tmp_path / "base", spec, tiny_config(spec))
    said = rf"takes {taken.what} {width + 16} wide, the base model's {taken.giver} gives {width}\b"
    with pytest.raises(errors.InputMismatch, match=said) as refusal:
        plan(file, base)
    assert refusal.value.tensor == taken.weight
    assert str(refusal.value) == f"x.safetensors: {refusal.value.problem}. {refusal.value.remedy}"


@pytest.mark.parametrize(("architecture", "base", "file", "said"), [
    ("FLUX.2", KLEIN_9B, KLEIN_4B, "takes text 7680 wide, the base model's text encoder gives 12288"),
    ("FLUX.2", KLEIN_4B, KLEIN_9B, "takes text 12288 wide, the base model's text encoder gives 7680"),
    ("FLUX.2", FLUX2_DEV, KLEIN_9B, "takes text 12288 wide, the base model's text encoder gives 15360"),
    ("Wan", WAN_14B, WAN_5B, "takes latents 48 wide, the base model's pipeline gives 16"),
    ("Wan", WAN_1_3B, WAN_5B, "takes latents 48 wide, the base model's pipeline gives 16"),
    ("Wan", WAN_14B, {"in_channels": 36}, "takes latents 36 wide, the base model's pipeline gives 16"),
    ("FLUX.1", {}, {"in_channels": 384, "out_channels": 64}, "takes latents 384 wide, the base model's pipeline gives"),
])  # fmt: skip
def test_a12_c19_real_sizes_that_do_not_go_together(
    architecture: str, base: dict[str, Any], file: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Klein 4B, 9B and dev; Wan 1.3B, 5B, 14B and image to video; FLUX.1 dev and Fill."""
    spec = BY_NAME[architecture]
    with pytest.raises(errors.InputMismatch, match=said):
        config_changes(tmp_path, spec, base, shapes_of(spec.cls, {**base, **file}))


def test_a12_the_error_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    """A real Klein 4B file in its original layout, over a Klein 9B: the stored name, both shapes, both widths."""
    spec = BY_NAME["FLUX.2"]
    base = base_folder(tmp_path / "base", spec, {**KLEIN_9B, "guidance_embeds": False})
    with pytest.raises(errors.InputMismatch) as refusal:
        plan(write_from_manifest(tmp_path / "x.safetensors", "flux2_klein_4b_bf16"), base)
    for part in ("txt_in.weight", "[3072, 7680]", "[3072, 12288]", "7680 wide", "gives 12288"):
        assert part in str(refusal.value)
    assert (refusal.value.count, refusal.value.what) == (1, "text")


@pytest.mark.parametrize("quantized", ["flux2_klein_4b_fp8", "flux2_klein_4b_nvfp4"])
def test_quantized_files_are_sized_by_their_values(quantized: str, tmp_path: Path) -> None:
    """A packed weight has half the columns that it stands for; heads are counted by rows, and text is not misread."""
    spec = BY_NAME["FLUX.2"]
    folder = base_folder(tmp_path / "dev", spec, {"joint_attention_dim": 7680})
    planned = plan(write_from_manifest(tmp_path / "x.safetensors", quantized), folder)
    assert planned.config_changes == {
        "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "guidance_embeds": False,
    }  # fmt: skip
    with pytest.raises(errors.InputMismatch, match=r"takes text 7680 wide.*gives 15360"):
        plan(tmp_path / "x.safetensors", base_folder(tmp_path / "other", spec, FLUX2_DEV))
