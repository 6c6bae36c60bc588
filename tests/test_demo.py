"""The built-in demo: it draws, its files have the layouts of real ones, and it is written whole or not at all."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_vae_checkpoint,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

import tiny_models
from tiny_models import make_demo

PREFIX = "model.diffusion_model."


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    make_demo.make_demo(out)
    return out


@pytest.fixture(scope="module")
def pipeline(demo: Path) -> ZImagePipeline:
    pipeline = DiffusionPipeline.from_pretrained(demo / make_demo.BASE, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: ZImagePipeline, prompt: str, transformer: ZImageTransformer2DModel | None = None) -> torch.Tensor:
    """One 64x64 picture in 2 steps, values 0 to 1, shape [3, 64, 64]."""
    own = pipeline.transformer
    pipeline.transformer = transformer or own
    try:
        generator = torch.Generator().manual_seed(0)
        size = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 1.0}
        return pipeline(prompt, generator=generator, output_type="pt", **size).images[0].float()
    finally:
        pipeline.transformer = own


def override(path: Path) -> ZImageTransformer2DModel:
    """The file's transformer, read with safetensors and diffusers' own converter alone."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}
    if "x_embedder.weight" in tensors:
        tensors = convert_z_image_transformer_checkpoint_to_diffusers(tensors)
    transformer = ZImageTransformer2DModel(**make_demo.transformer_config())
    needed = transformer.state_dict()
    transformer.load_state_dict({name: tensors[name] for name in needed})
    return transformer.eval()


def pattern(names: Iterable[str]) -> set[str]:
    """Key names with block numbers left out."""
    return {re.sub(r"(layers|refiner|blocks)\.\d+\.", r"\1.N.", name) for name in names}


def test_it_draws(pipeline: ZImagePipeline) -> None:
    assert isinstance(pipeline, ZImagePipeline)
    picture = draw(pipeline, "a red fox")
    assert picture.shape == (3, 64, 64)
    assert picture.isfinite().all()
    assert picture.std() > 0.1
    assert torch.equal(picture, draw(pipeline, "a red fox"))


def test_it_draws_the_same_in_bf16(demo: Path, pipeline: ZImagePipeline) -> None:
    in_bf16 = DiffusionPipeline.from_pretrained(demo / make_demo.BASE, dtype=torch.bfloat16)
    in_bf16.set_progress_bar_config(disable=True)
    picture = draw(in_bf16, "a red fox")
    assert picture.isfinite().all()
    assert (picture - draw(pipeline, "a red fox")).abs().mean() < 0.02


def test_another_prompt_gives_another_picture(pipeline: ZImagePipeline) -> None:
    assert (draw(pipeline, "a red fox") - draw(pipeline, "a blue house by the sea")).abs().mean() > 0.02


def test_every_override_gives_another_picture(demo: Path, pipeline: ZImagePipeline) -> None:
    files = (make_demo.COMFYUI, make_demo.BUNDLE, make_demo.DIFFUSERS)
    pictures = [draw(pipeline, "a red fox")]
    pictures += [draw(pipeline, "a red fox", override(demo / file)) for file in files]
    for i, picture in enumerate(pictures):
        assert picture.isfinite().all()
        assert all((picture - other).abs().mean() > 0.1 for other in pictures[:i])


def test_the_tokenizer_reloads(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo / make_demo.BASE / "tokenizer")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Zürich 🦊"}], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert text == "<|im_start|>user\nZürich 🦊<|im_end|>\n<|im_start|>assistant\n"
    numbers = tokenizer(text).input_ids
    assert tokenizer.decode(numbers) == text
    assert len(numbers) == len(text.encode()) - len("<|im_start|>" * 2 + "<|im_end|>") + 3
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == numbers[0]


def test_comfyui_layout_is_what_diffusers_converts_back() -> None:
    original = make_demo.random_transformer(make_demo.transformer_config(n_layers=2)).state_dict()
    restored = convert_z_image_transformer_checkpoint_to_diffusers(make_demo.to_comfyui(original))
    assert restored.keys() == original.keys()
    assert all(torch.equal(restored[name], original[name]) for name in original)


def test_vae_layout_is_what_diffusers_converts_back() -> None:
    vae = make_demo.random_vae(0, torch.float32)
    original = vae.state_dict()
    restored = convert_ldm_vae_checkpoint(make_demo.vae_to_ldm(original), vae.config)
    assert restored.keys() == original.keys()
    assert all(torch.equal(restored[name], original[name]) for name in original)


def test_the_flux_file_is_a_narrow_flux(demo: Path) -> None:
    widths = {3072 * n: 48 * n for n in (1, 2, 3, 4, 5, 6, 7)} | {128: 24, 4096: 64, 768: 32, 256: 256, 64: 64}
    first_blocks = {
        name: tuple(widths[size] for size in shape)
        for name, (_, shape) in tiny_models.manifest("flux1_dev_bfl_bf16").tensors.items()
        if not re.search(r"blocks\.[1-9]", name)
    }
    assert {name: tuple(tensor.shape) for name, tensor in load_file(demo / make_demo.FLUX).items()} == first_blocks


@pytest.mark.parametrize(
    ("file", "real"),
    [
        (make_demo.COMFYUI, "z_image_turbo_comfy_bf16"),
        (make_demo.BUNDLE, "z_image_turbo_comfy_bf16_prefixed"),
        (make_demo.DIFFUSERS, "z_image_diffusers_bf16"),
    ],
)
def test_overrides_have_the_keys_and_metadata_of_real_files(demo: Path, file: str, real: str) -> None:
    expected = tiny_models.manifest(real)
    with safe_open(demo / file, "pt") as opened:
        names, metadata = set(opened.keys()), opened.metadata()
    if file == make_demo.BUNDLE:
        names = {name for name in names if name.startswith(PREFIX)} - {f"{PREFIX}norm_final.weight"}
    assert pattern(names) == pattern(expected.tensors)
    assert metadata == expected.metadata


def test_the_bundle_has_companions_and_a_stray_tensor(demo: Path) -> None:
    tensors = load_file(demo / make_demo.BUNDLE)
    assert tensors[f"{PREFIX}norm_final.weight"].isnan().all()
    assert {name.partition(".")[0] for name in tensors} == {"model", "vae", "text_encoders"}
    assert all(tensor.dtype == torch.float16 for tensor in tensors.values())


def test_two_makes_give_the_same_bytes_and_few(demo: Path, tmp_path: Path) -> None:
    make_demo.make_demo(tmp_path)
    files = {path.relative_to(demo): path.read_bytes() for path in demo.rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(map(len, files.values())) < 10_000_000
    assert not any(str(demo).encode() in data for data in files.values())


def test_a_complete_demo_is_left_alone(demo: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo.rglob("*")}
    make_demo.make_demo(demo)
    assert {path: path.stat().st_mtime_ns for path in demo.rglob("*")} == before


@pytest.mark.parametrize("damage", ["missing", "shorter", "older", "no record"])
def test_a_half_demo_is_replaced_and_nothing_else(tmp_path: Path, damage: str) -> None:
    own = tmp_path / "UNET" / "mine.safetensors"
    tiny_models.write_sparse(own, {"weight": ("F32", (2,))})
    make_demo.make_demo(tmp_path)
    record = tmp_path / make_demo.BASE / make_demo.RECORD
    match damage:
        case "missing":
            (tmp_path / make_demo.FLUX).unlink()
        case "shorter":
            (tmp_path / make_demo.BASE / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"")
        case "older":
            record.write_text(json.dumps(json.loads(record.read_text()) | {"version": 0}))
        case _:
            record.unlink()
    assert not make_demo.is_complete(tmp_path)
    make_demo.make_demo(tmp_path)
    assert make_demo.is_complete(tmp_path)
    assert own.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Diffusers", "UNET"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(make_demo, "flux_bfl", full_disk)
    with pytest.raises(OSError, match="no space left"):
        make_demo.make_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_script_runs(tmp_path: Path) -> None:
    script = [sys.executable, make_demo.__file__]
    result = subprocess.run([*script, tmp_path], capture_output=True, text=True, check=True)
    assert str(tmp_path) in result.stdout
    assert make_demo.is_complete(tmp_path)


def test_a_call_without_a_folder_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_demo.main([]) == 1
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_networks_hold_no_untouched_number(dtype: torch.dtype) -> None:
    for name, parameter in tiny_models.random_z_image(tiny_models.tiny_z_image_config(), 0, dtype).named_parameters():
        assert parameter.dtype == dtype
        assert not ((parameter == 0) | (parameter == 1) | ~parameter.isfinite()).any(), name


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".json.gz") for path in tiny_models.MANIFESTS.iterdir()))
def test_files_of_manifests_have_the_published_size(tmp_path: Path, name: str) -> None:
    expected = tiny_models.manifest(name)
    path = tiny_models.write_from_manifest(tmp_path / "model.safetensors", name)
    assert expected.file_bytes in (None, path.stat().st_size)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header.pop("__metadata__", None) == expected.metadata
    assert list(header) == list(expected.tensors)
    if hasattr(path.stat(), "st_blocks"):
        assert path.stat().st_blocks * 512 < 4_000_000


def test_safetensors_reads_a_sparse_file_and_its_markers(tmp_path: Path) -> None:
    expected = tiny_models.manifest("z_image_turbo_comfy_int8_convrot")
    path = tiny_models.write_from_manifest(tmp_path / "model.safetensors", "z_image_turbo_comfy_int8_convrot")
    with safe_open(path, "pt") as file:
        assert file.metadata() == expected.metadata
        for name, (_, shape) in expected.tensors.items():
            assert tuple(file.get_slice(name).get_shape()) == shape
        for layer, text in expected.markers.items():
            assert bytes(file.get_tensor(f"{layer}.comfy_quant").tolist()).decode() == text


def test_wrong_contents_of_a_sparse_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight has 8 bytes, not 3"):
        tiny_models.write_sparse(tmp_path / "x.safetensors", {"weight": ("F32", (2,))}, contents={"weight": b"abc"})
