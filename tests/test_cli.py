"""The command line as a user calls it: output, exit status, and where each goes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from test_plan import base_folder
from tiny_models import make_demo, write_from_manifest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_demo.make_demo(folder)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "extension.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_inspect_without_a_base(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file is, from its header, in a fraction of a second because no torch is imported."""
    file = models / make_demo.BUNDLE
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    done = run("inspect", file)
    monkeypatch.delenv("PYTHONPROFILEIMPORTTIME")
    assert done.returncode == 0
    assert re.search(r"\| +transplant\.checkpoint\.header$", done.stderr, re.MULTILINE)
    assert not re.search(r"\| +(torch|diffusers|gradio)$", done.stderr, re.MULTILINE)
    assert "Z-Image" in done.stdout
    told = json.loads(run("inspect", file, "--json").stdout)
    assert told["kind"] == "all-in-one bundle"
    assert told["prefix"] == "model.diffusion_model."
    assert set(told["companions"]) == {"text encoder", "VAE"}


def test_inspect_over_a_base(models: Path) -> None:
    """Status 0 and the plan where it fits, 2 and the reason where it does not; JSON in both cases."""
    base = models / make_demo.BASE
    fits = run("inspect", models / make_demo.COMFYUI, "--base", base, "--json")
    assert fits.returncode == 0
    told = json.loads(fits.stdout)
    assert told["verdict"] == "can be loaded"
    assert told["resident_bytes"] > 0
    refused = run("inspect", models / make_demo.FLUX, "--base", base, "--json")
    assert refused.returncode == 2
    told = json.loads(refused.stdout)
    assert (told["verdict"], told["reason"]) == ("refused", "WrongArchitecture")
    assert told["kind"]
    plain = run("inspect", models / make_demo.FLUX, "--base", base)
    assert plain.returncode == 2
    assert "refused: demo-flux.safetensors" in plain.stderr
    assert "Traceback" not in plain.stderr


def test_inspect_a_real_file(tmp_path: Path) -> None:
    """The full-size Z-Image file over the real config."""
    file = write_from_manifest(tmp_path / "z.safetensors", "z_image_turbo_comfy_bf16")
    done = run(
        "inspect", file, "--base", base_folder(tmp_path / "base", {}), "--dtype", "bf16", "--device", "cpu", "--json"
    )
    file.unlink()
    told = json.loads(done.stdout)
    assert told["resident_bytes"] == told["mapped_bytes"] == 12_309_817_472
    assert told["peak_bytes"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "x", "--no-such-option"],
        ["load", "x"],
        ["frobnicate"],
        ["generate", "--base", "x"],
        ["generate", "--base", "x", "--prompt", "p", "--steps", "0"],
        ["inspect", "extension.py", "--dtype", "fp7"],
        ["inspect", "no-such-file.safetensors"],
        ["generate", "--base", "x", "--prompt", "p", "--width", "10000000"],
        ["generate", "--base", "x", "--prompt", "p", "--seed", "99999999999999999999"],
        ["generate", "--base", "x", "--prompt", "p", "--guidance", "nan"],
        ["generate", "--base", "x", "--prompt", "p", "-o", "x.jpg"],
        ["generate", "--base", "x", "--prompt", "p", "--device", "nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_calls(arguments: list[str]) -> None:
    """Status 1 and one hint, never a traceback."""
    done = run(*arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr


@pytest.mark.parametrize("command", ["inspect", "load"])
def test_bad_files_and_bases(command: str, models: Path, tmp_path: Path) -> None:
    """A file that cannot be read is refused (2); a base that cannot be used is an error (1)."""
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(b"")
    done = run(command, empty, "--base", models / make_demo.BASE)
    assert done.returncode == 2
    assert "empty (0 bytes)" in done.stderr
    done = run(command, models / make_demo.COMFYUI, "--base", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no such folder" in done.stderr
    done = run(command, models / make_demo.COMFYUI, "--base", models / make_demo.BASE, "--device", "cuda:9")
    assert done.returncode == 1
    assert "cuda:9" in done.stderr


def test_load_reports_time_and_memory(models: Path) -> None:
    """Loads for real and tells what it took."""
    done = run("load", models / make_demo.COMFYUI, "--base", models / make_demo.BASE, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["build_seconds"] > 0
    assert told["memory_bytes"] <= told["peak_bytes"] + 20_000_000


def test_generate(models: Path, tmp_path: Path) -> None:
    """A picture whose metadata name base, file and short hash; another file draws another picture."""
    common = ["generate", "--base", models / make_demo.BASE, "--prompt", "a red circle", "--steps", 2]
    common += ["--width", 64, "--height", 64, "--seed", 5]
    done = run(*common, "-o", tmp_path / "base.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "base.png") and "seed 5" in done.stderr
    run(*common, "--unet", models / make_demo.COMFYUI, "-o", tmp_path / "file.png")
    base, file = Image.open(tmp_path / "base.png"), Image.open(tmp_path / "file.png")
    assert base.tobytes() != file.tobytes()
    assert "UNET" not in base.info["parameters"]
    assert "Model: transplant-demo-z-image, UNET: demo-comfyui-bf16, UNET hash: " in file.info["parameters"]
    refused = run(*common, "--unet", models / make_demo.FLUX, "-o", tmp_path / "no.png")
    assert refused.returncode == 2
    assert not (tmp_path / "no.png").exists()


def test_dtypes_that_sdnq_has_not_are_told_with_what_is_like_them(models: Path) -> None:
    done = run("load", models / make_demo.COMFYUI, "--base", models / make_demo.BASE, "--quantize", "int99")
    assert done.returncode == 1
    assert "SDNQ has no 'int99'; it has int" in done.stderr and "and others" in done.stderr
    assert "--quantize: " in done.stderr
    assert len(done.stderr) < 200 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--modules-dtype", '{"int99": ["a"]}', "--modules-dtype: SDNQ has no 'int99'; it has int"),
        ("--modules-dtype", '{"int8": ["(*"]}', "--modules-dtype: '(*' is no pattern that SDNQ can read"),
        ("--modules-to-not-convert", "a,(*", "--modules-to-not-convert: '(*' is no pattern that SDNQ can read"),
    ],
    ids=["dtype", "pattern in another dtype", "pattern to leave"],
)
def test_modules_that_sdnq_cannot_read_are_told_with_their_flag(flag: str, value: str, told: str, models: Path) -> None:
    call = ("load", models / make_demo.COMFYUI, "--base", models / make_demo.BASE, "--quantize", "int8")
    done = run(*call, flag, value)
    assert done.returncode == 1
    assert told in done.stderr and "Traceback" not in done.stderr


def test_generate_says_what_it_does_and_checks_its_target_first(models: Path, tmp_path: Path) -> None:
    """FP8 storage without a GPU is said to have no effect; a target that cannot be written costs no drawing."""
    base = models / make_demo.BASE
    call = ("generate", "--base", base, "--prompt", "x", "--steps", 1, "--width", 64, "--height", 64)
    told = run(*call, "--fp8-storage", "-o", tmp_path / "x.png").stderr
    assert "FP8 storage has no effect" in told and "OpenVINO" not in told
    (seed,) = re.findall(r"^seed (\d+)$", told, re.M)  # one that was drawn
    assert f"Seed: {seed}, " in Image.open(tmp_path / "x.png").info["parameters"]
    refused = run(*call, "-o", tmp_path / "nowhere" / "x.png")
    assert refused.returncode == 1
    assert "nothing can be written to" in refused.stderr and "Traceback" not in refused.stderr


def test_arguments_without_an_effect_are_refused(models: Path, tmp_path: Path) -> None:
    """A file for a second transformer that the base model has not, and bad JSON, also where nothing is quantized."""
    base, file = models / make_demo.BASE, models / make_demo.COMFYUI
    done = run("generate", "--base", base, "--unet-secondary", file, "--prompt", "x", "-o", tmp_path / "x.png")
    assert done.returncode == 1
    assert "has no second transformer" in done.stderr and not (tmp_path / "x.png").exists()
    done = run("load", file, "--base", base, "--modules-dtype", "{bad")
    assert done.returncode == 1
    assert "--modules-dtype" in done.stderr and "not valid JSON" in done.stderr and "Traceback" not in done.stderr


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / ("x" * 300 + ".safetensors"))
    assert done.returncode == 1
    assert "cannot be read (File name too long)" in done.stderr and "Traceback" not in done.stderr


def test_quantization_that_finds_no_layer_is_said(models: Path) -> None:
    """The demo's layers are smaller than what SDNQ quantizes."""
    done = run("inspect", models / make_demo.COMFYUI, "--base", models / make_demo.BASE, "--quantize", "int8")
    assert "quantization on load changes nothing: every layer is too small" in done.stdout
