"""Files written as folders: exact again, whole or not at all, nothing overwritten by accident."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, ZImageTransformer2DModel

import transplant
from test_plan import base_folder
from test_quantized_files import ALL_WRITERS, quantize, run
from test_saved import assert_same
from tiny_models import (
    make_demo,
    random_z_image,
    save,
    tiny_flux_bfl,
    tiny_z_image_config,
    to_comfyui,
    write_from_manifest,
)
from transplant import conversion, errors
from transplant.build import build
from transplant.conversion import convert
from transplant.hosts.base import PlainHost, default_settings
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.saved import load_folder
from transplant.sdnq_bridge import QuantizeOnLoad
from transplant.slots import Override
from transplant.storage import exchange

ROOT = Path(__file__).parent.parent
CONFIG = tiny_z_image_config(dim=192, n_layers=1)
WIDTH = CONFIG["cap_feat_dim"]


@pytest.fixture(scope="module")
def network() -> ZImageTransformer2DModel:
    return random_z_image(CONFIG, seed=3, dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def nvfp4(network: ZImageTransformer2DModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stored, _ = quantize(network.state_dict(), ALL_WRITERS["nvfp4"])
    return save(tmp_path_factory.mktemp("files") / "nvfp4.safetensors", stored)


@pytest.fixture(scope="module")
def plain(network: ZImageTransformer2DModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {name: tensor.bfloat16() for name, tensor in to_comfyui(network.state_dict()).items()}
    return save(tmp_path_factory.mktemp("files") / "plain.safetensors", state)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_quantized_file(nvfp4: Path, base: Path, tmp_path: Path) -> None:
    """In shards too; ours and the folder's models are the same, byte for byte."""
    made = convert(nvfp4, tmp_path / "deep" / "out", base=base, dtype=torch.bfloat16, shard_bytes=300_000)
    assert made.needs_transplant == ""
    assert made.folder == tmp_path / "deep" / "out"
    assert len(list(made.folder.glob("*.safetensors"))) > 1
    assert (made.folder / "diffusion_pytorch_model.safetensors.index.json").is_file()
    expected = build(plan(nvfp4, base, dtype=torch.bfloat16, use_mmap=False)).transformer
    assert_same(load_folder(made.folder, use_mmap=False), expected)
    assert not leftovers(tmp_path / "deep")
    assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o644}
    assert made.folder.stat().st_mode & 0o777 == 0o755


def test_a_float_file_is_a_plain_folder(plain: Path, base: Path, tmp_path: Path) -> None:
    """diffusers alone loads it, in the file's own dtype."""
    out = convert(plain, tmp_path / "out", base=base).folder
    theirs = ZImageTransformer2DModel.from_pretrained(out, dtype=torch.bfloat16)
    ours = transplant.load_transformer(out, base=base, use_mmap=False)
    assert ours.dtype == torch.bfloat16
    assert not getattr(ours, "is_quantized", False)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_quantized_on_the_way(plain: Path, base: Path, tmp_path: Path) -> None:
    """--weights: SDNQ's codes, as a load with the same wish has them."""
    out = convert(plain, tmp_path / "out", base=base, quantize=QuantizeOnLoad("uint4")).folder
    expected = transplant.load_transformer(plain, base=base, quantize=QuantizeOnLoad("uint4"), use_mmap=False)
    assert_same(load_folder(out, use_mmap=False), expected)
    assert sum(file.stat().st_size for file in out.iterdir()) < 0.6 * plain.stat().st_size


def test_quantizing_a_quantized_file_changes_nothing_and_says_so(nvfp4: Path, base: Path, tmp_path: Path) -> None:
    made = convert(nvfp4, tmp_path / "out", base=base, quantize=QuantizeOnLoad("uint4"))
    assert any("changes nothing" in warning for warning in made.plan.warnings)
    assert load_folder(made.folder).layers[0].feed_forward.w1.sdnq_dequantizer.weights_dtype == "float4_e2m1fn"


def test_without_a_base_the_published_size_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned at full size from the header alone; the disk is found too small before anything is read."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage(0, 0, 5_000_000_000))
    for name in ("z_image_turbo_comfy_int8_convrot", "flux1_dev_fp8_scaled", "qwen_image_fp8mixed"):
        file = write_from_manifest(tmp_path / "x.safetensors", name)
        with pytest.raises(errors.ConversionError, match=r"has 5\.0 GB free, the folder needs \d+\.\d GB"):
            convert(file, tmp_path / "out")
        file.unlink()
    assert not (tmp_path / "out").exists()
    assert not leftovers(tmp_path)


def test_without_a_base_what_is_not_known_needs_one(tmp_path: Path) -> None:
    for file, said in (
        (write_from_manifest(tmp_path / "a.safetensors", "cosmos_predict2_2b_t2i_bf16"), "Cosmos Predict 2, Anima"),
        (save(tmp_path / "b.safetensors", {"x": torch.zeros(2)}), "not known"),
    ):
        with pytest.raises(errors.BaseModelError, match=f"{said}.*--base"):
            convert(file, tmp_path / "out")
    with pytest.raises(errors.NotATransformer):
        convert(save(tmp_path / "lora.safetensors", {"x.lora_A.weight": torch.zeros(2, 2)}), tmp_path / "out")
    with pytest.raises(errors.OverrideArchMismatch):
        convert(save(tmp_path / "flux.safetensors", tiny_flux_bfl(1, torch.bfloat16)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_by_accident(plain: Path, base: Path, tmp_path: Path) -> None:
    """An empty folder is filled; a model's is replaced when that is said; anything else never."""
    out = tmp_path / "out"
    out.mkdir()
    convert(plain, out, base=base)
    with pytest.raises(errors.ConversionError, match=r"exists already.*--force"):
        convert(plain, out, base=base)
    for kept in ("thesis.txt", "sub/keep.txt", "other.safetensors", "model.safetensors.index.json"):
        (out / kept).parent.mkdir(exist_ok=True)
        (out / kept).write_text("x")
        with pytest.raises(errors.ConversionError, match=f"holds .*{kept} beside a model, and is not replaced"):
            convert(plain, out, base=base, force=True)
        assert (out / kept).read_text() == "x"
        (out / kept).unlink()
        if (out / kept).parent != out:
            (out / kept).parent.rmdir()
    (out / "diffusion_pytorch_model-00001-of-00002.safetensors").write_text("x")
    convert(plain, out, base=base, force=True)
    assert {path.name for path in out.iterdir()} == {"config.json", "diffusion_pytorch_model.safetensors"}
    before = (out / "diffusion_pytorch_model.safetensors").read_bytes()
    for source in (out, out / "diffusion_pytorch_model.safetensors"):
        with pytest.raises(errors.ConversionError, match="holds what is to be converted"):
            convert(source, out, base=base, force=True)
    assert (out / "diffusion_pytorch_model.safetensors").read_bytes() == before
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.json").write_text('{"a": 1}')
    with pytest.raises(errors.ConversionError, match=r"not a model.s folder"):
        convert(plain, tmp_path / "settings", base=base, force=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("x")
    with pytest.raises(errors.ConversionError, match=r"not a model.s folder"):
        convert(plain, home, base=base, force=True)
    assert (home / "letter").read_text() == "x"
    with pytest.raises(errors.ConversionError):
        convert(plain, home / "letter", base=base, force=True)
    assert not leftovers(tmp_path)


def test_a_failure_or_a_cancel_leaves_what_was_there(
    plain: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert(plain, tmp_path / "out", base=base).folder
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(errors.LoadCancelled):
        convert(plain, out, base=base, force=True, cancelled=lambda: True)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        convert(plain, out, base=base, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not leftovers(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_killed_midway(plain: Path, base: Path, tmp_path: Path) -> None:
    """SIGKILL while the weights are being written: nothing under the folder's name, and the next run works."""
    script = f"""
import os, time, safetensors.torch as s
real = s.save_file
def slow(tensors, path, **kwargs):
    real(tensors, path, **kwargs)
    open({str(tmp_path / "writing")!r}, "w").close()
    time.sleep(600)
s.save_file = slow
import transplant
transplant.convert({str(plain)!r}, {str(tmp_path / "out")!r}, base={str(base)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT / "modules")})
    try:
        while not (tmp_path / "writing").exists() and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    assert len(leftovers(tmp_path)) == 1  # nobody could tidy up after a kill; its name says what it is
    assert leftovers(tmp_path)[0].endswith(".partial")
    assert convert(plain, tmp_path / "out", base=base).nbytes > 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere two renames are needed where a folder is replaced")
@pytest.mark.parametrize("step", range(3))
def test_killed_at_any_step_of_replacing(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL before and after the two models change places: under the folder's name is a whole one, old or new."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "weights"):
            (tmp_path / name / file).write_text(name)
    done = iter(range(9))

    def killing(one: Path, other: Path) -> bool:
        if next(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        result = exchange(one, other)
        if next(done) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(conversion, "exchange", killing)
    child = os.fork()
    if child == 0:
        conversion._put_in_place(tmp_path / "new", tmp_path / "old")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if step < 2 else 0)
    assert {file.read_text() for file in (tmp_path / "old").iterdir()} == ({"old"} if step == 0 else {"new"})
    assert len(list((tmp_path / "old").iterdir())) == 2


def test_folders_change_names_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "letter").write_text(name)
    if exchange(tmp_path / "a", tmp_path / "b"):
        assert [(tmp_path / name / "letter").read_text() for name in "ab"] == ["b", "a"]
    else:
        assert sys.platform != "linux"
    assert not exchange(tmp_path / "a", tmp_path / "nothing")


def test_command_line(nvfp4: Path, base: Path, tmp_path: Path) -> None:
    """Status 0 and what it made; 2 for a refused file; 1 for a folder that is in use."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "extension.py"), "convert", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    out = tmp_path / "there" / ".." / "out"  # told as it is, without the detour
    done = call(nvfp4, out, "--base", base, "--dtype", "bf16", "--weights", "int8", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["folder"], told["needs_transplant"]) == (str(tmp_path / "out"), None)
    assert "changes nothing" in told["warnings"][0]
    assert load_folder(tmp_path / "out").dtype == torch.bfloat16
    again = call(nvfp4, tmp_path / "out", "--base", base)
    assert again.returncode == 1
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr
    assert call(tmp_path / "out" / "config.json", tmp_path / "no", "--base", base).returncode == 2
    assert not (tmp_path / "no").exists()


# The folder as part of a pipeline


def test_a_base_model_with_a_converted_transformer(tmp_path: Path) -> None:
    """C21: it comes back exactly; and its quantization does not leak into a plain file put over it, or back."""
    base = make_demo.save_base(tmp_path / "base", 5, torch.float32, dim=192, n_layers=1)
    state = random_z_image(CONFIG, seed=9, dtype=torch.float32).state_dict()
    stored, _ = quantize(state, ALL_WRITERS["int8 convrot"])
    file = save(tmp_path / "x.safetensors", stored)
    float_file = save(tmp_path / "plain.safetensors", to_comfyui(state))
    expected = build(plan(file, base, dtype=torch.float32, use_mmap=False)).transformer
    convert(file, base / "transformer", base=base, force=True)
    session = Session(PlainHost(default_settings("cpu", "fp32", False)))
    session.load_base(base)
    assert_same(session.transformer, expected)  # type: ignore[arg-type]
    assert session.choose(Override("plain", float_file)).changed
    override = session.transformer
    assert override is not None
    assert not getattr(override, "is_quantized", False)
    assert "quantization_config" not in override.config
    by_hand = random_z_image(CONFIG, seed=9, dtype=torch.float32).eval()
    assert torch.equal(run(override, WIDTH), run(by_hand, WIDTH))
    assert session.choose(Override("quantized", file)).changed
    assert_same(session.transformer, expected)  # type: ignore[arg-type]
    session.choose(None)
    assert_same(session.transformer, expected)  # type: ignore[arg-type]
    assert isinstance(session.pipeline, DiffusionPipeline)


def test_a_folder_of_another_class(plain: Path, base: Path, tmp_path: Path) -> None:
    out = convert(plain, tmp_path / "out", base=base).folder
    other = base_folder(tmp_path / "other", {}, "FluxTransformer2DModel", "FluxPipeline")
    with pytest.raises(errors.WrongArchitecture):
        transplant.load_transformer(out, base=other)
    out = convert(plain, tmp_path / "int8", base=base, quantize=QuantizeOnLoad("int8")).folder
    with pytest.raises(errors.WrongArchitecture, match="ZImageTransformer2DModel"):
        transplant.load_transformer(out, base=other)
    with pytest.raises(errors.OverrideArchMismatch):  # a plan knows no layers of SDNQ's own
        plan(out, base)
