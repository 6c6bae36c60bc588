"""Loaded values against diffusers' own converter on the real tensors, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, SanaTransformer2DModel, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers

import transplant
from test_plan import base_folder
from tiny_models import make_demo, random_z_image, save, tiny_base, tiny_z_image_config, to_comfyui, with_prefix
from transplant.build import Progress, build
from transplant.errors import FileChanged, LoadCancelled
from transplant.plan import plan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def layouts(state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The three real Z-Image layouts."""
    comfyui = to_comfyui(state)
    return {"comfyui": comfyui, "prefixed": with_prefix(comfyui, "model.diffusion_model."), "diffusers": dict(state)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), tiny_z_image_config())


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("layout", ["comfyui", "prefixed", "diffusers"])
def test_equal_to_diffusers_converter(
    layout: str, stored: torch.dtype, compute: torch.dtype, use_mmap: bool, base: Path, tmp_path: Path
) -> None:
    """Every layout, stored dtype and compute dtype, mapped and read."""
    state = layouts(random_z_image(tiny_z_image_config(), 11, stored).state_dict())[layout]
    file = save(tmp_path / "x.safetensors", state)
    expected = (
        dict(state) if layout == "diffusers" else convert_z_image_transformer_checkpoint_to_diffusers(dict(state))
    )
    model = transplant.load_transformer(file, base=base, dtype=compute, use_mmap=use_mmap)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == compute
        assert torch.equal(loaded[name], tensor.to(compute)), name


def test_mixed_dtypes_in_one_file(base: Path, tmp_path: Path) -> None:
    """B28: fp32 norms and fp16 biases among bf16 weights all go to the compute dtype."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    state = {n: t.float() if "norm" in n else t.half() if n.endswith("bias") else t for n, t in state.items()}
    model = transplant.load_transformer(save(tmp_path / "x.safetensors", state), base=base, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(
        model.layers[0].attention_norm1.weight, state["layers.0.attention_norm1.weight"].to(torch.bfloat16)
    )


def test_default_dtype_is_the_files_own(base: Path, tmp_path: Path) -> None:
    """Without a dtype the file's own is kept, so that nothing is copied."""
    for dtype in DTYPES:
        state = to_comfyui(random_z_image(tiny_z_image_config(), 5, dtype).state_dict())
        model = transplant.load_transformer(save(tmp_path / f"{dtype}.safetensors", state), base=base)
        assert model.dtype == dtype


def test_keep_in_fp32_modules(tmp_path: Path) -> None:
    """What a class keeps in fp32 stays there, as from_pretrained does it; here scale_shift_table and the norms."""
    config = {
        "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8,
        "sample_size": 8,
    }  # fmt: skip
    network = SanaTransformer2DModel(**config)
    kept = set(SanaTransformer2DModel._keep_in_fp32_modules or [])
    folder = tmp_path / "base"
    base_folder(folder, config, "SanaTransformer2DModel", "SanaPipeline")
    state = {name: torch.randn_like(tensor).half() for name, tensor in network.state_dict().items()}
    model = transplant.load_transformer(save(tmp_path / "x.safetensors", state), base=folder, dtype=torch.bfloat16)
    network.save_pretrained(folder / "transformer")
    reference = SanaTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert kept == set() or torch.float32 in dtypes.values()


def test_no_tensor_on_meta_and_buffers_computed(base: Path, tmp_path: Path) -> None:
    """The model is whole: it runs, and gives what the same weights placed by hand give.

    Read, not mapped: MKL's sums depend on the alignment of their operands in the last bit.
    """
    network = random_z_image(tiny_z_image_config(), 9, torch.float32)
    file = save(tmp_path / "x.safetensors", to_comfyui(network.state_dict()))
    model = transplant.load_transformer(file, base=base, use_mmap=False)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not model.training
    inputs = ([torch.randn(16, 1, 8, 8)], torch.tensor([0.3]), [torch.randn(7, network.config.cap_feat_dim)])
    with torch.no_grad():
        assert torch.equal(model(*inputs).sample[0], network.eval()(*inputs).sample[0])


def test_config_kwargs_reach_the_class(base: Path, tmp_path: Path) -> None:
    """What a caller passes replaces the base's config."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    file = save(tmp_path / "x.safetensors", state)
    model = transplant.load_transformer(file, base=base, config_kwargs={"t_scale": 500.0})
    assert model.config.t_scale == 500.0


def test_progress_counts_up_to_the_end(base: Path, tmp_path: Path) -> None:
    """Every tensor is reported once, in bytes."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    planned = plan(save(tmp_path / "x.safetensors", state), base)
    seen: list[Progress] = []
    build(planned, progress=seen.append)
    assert len(seen) == len(planned.targets)
    assert seen[-1].done_bytes == seen[-1].total_bytes == planned.resident_bytes
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


def test_cancel(base: Path, tmp_path: Path) -> None:
    """A load ends at the tensor at which it is cancelled."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    seen: list[Progress] = []
    with pytest.raises(LoadCancelled):
        transplant.load_transformer(
            save(tmp_path / "x.safetensors", state), base=base, progress=seen.append, cancelled=lambda: len(seen) == 10
        )
    assert len(seen) == 10


def test_file_that_changes_between_plan_and_build(base: Path, tmp_path: Path) -> None:
    """A plan holds for the file that was planned and for no other."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    file = save(tmp_path / "x.safetensors", state)
    planned = plan(file, base)
    save(file, {**state, "x_pad_token": torch.zeros_like(state["x_pad_token"])})
    with pytest.raises(FileChanged):
        build(planned)


def test_mapped_weights_never_write_to_the_file(base: Path, tmp_path: Path) -> None:
    """An in-place change of a mapped weight (as fusing a LoRA does) changes the model only."""
    state = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.bfloat16).state_dict())
    file = save(tmp_path / "x.safetensors", state)
    before = file.read_bytes()
    model = transplant.load_transformer(file, base=base, use_mmap=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert file.read_bytes() == before


def test_library_use_as_documented(tmp_path: Path) -> None:
    """The README's three lines: the loaded model goes into from_pretrained and draws."""
    make_demo.make_demo(tmp_path)
    base, file = tmp_path / make_demo.BASE, tmp_path / make_demo.COMFYUI
    transformer = transplant.load_transformer(file, base=base, dtype=torch.float32)
    pipe = DiffusionPipeline.from_pretrained(base, transformer=transformer, dtype=torch.float32)
    image = pipe("a red circle", height=64, width=64, num_inference_steps=2, guidance_scale=1.0).images[0]
    assert image.size == (64, 64)
    assert pipe.transformer is transformer


def test_saved_again_by_diffusers(tmp_path: Path) -> None:
    """save_pretrained and from_pretrained give the same weights back."""
    base = tiny_base(tmp_path / "base")
    network = random_z_image(tiny_z_image_config(), 5, torch.bfloat16)
    file = save(tmp_path / "x.safetensors", to_comfyui(network.state_dict()))
    transplant.load_transformer(file, base=base).save_pretrained(tmp_path / "saved")
    again = ZImageTransformer2DModel.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in network.state_dict().items())
