"""Faults that users of such software have met, where they concern layouts and detection: one test a kind, or more.

Each fault is a whole kind; where the tests beside the code go through it already, they are named here.

    A02  names of other trainers            test_a02_*, test_plan.test_every_prefix
    A10  junk left over in merges           test_a10_*, test_architectures.test_junk_is_dropped_and_told
    A12  another size of a family           test_sizes.test_a12_*, test_sizes.test_config_follows_the_file
    A23  all-in-one bundles                 test_a23_*, test_plan.test_bundle_reads_only_the_transformer
    A24  two slots, files swapped           test_detect.test_a24_*, test_pipelines.test_slots_of_two_transformers
    B07  an unknown family                  test_b07_*
    B08  detection and loading disagree     test_detect.test_b08_*, test_b08_*
    B10  scales of other shapes             test_formats.test_other_scale_shapes_are_refused
    B11  fused qkv and its companions       test_b11_*, test_quantized_files.test_file_equals_dequantize_then_split
    B13  the order of a fused tensor        test_b13_*
    B14  scale of a layer kept precise      test_b14_*
    B16  no input_scale                     test_b16_*
    B17  an empty marker                    test_b17_*
    B19  declarations nested otherwise      test_quantized_files.test_headers_nested_otherwise
    B20  nvfp4 without a declaration        test_quantized_files.test_scales_without_a_declaration, test_b20_*
    C05  a GGUF with a made-up name         test_gguf.test_architecture_string_is_a_hint
    C15  e5m2 and e4m3                      test_c15_*
    C17  pruned structures                  test_c17_*
    C19  text of another width              test_sizes.test_a12_c19_*
    C21  packed folders                     test_c21_*
    C23  EMA copies                         test_c23_*
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kitchen import float8, int8
from original_layouts import from_recipes
from test_architectures import BY_NAME, FROM_MANIFEST, base_folder, full_config, made_of, random_state, shapes_of
from tiny_models import (
    make_demo,
    random_z_image,
    save,
    tiny_base,
    tiny_z_image_config,
    to_comfyui,
    with_prefix,
)
from transplant import errors
from transplant.architectures.detect import identify
from transplant.build import build
from transplant.checkpoint.header import read_header
from transplant.checkpoint.naming import PREFIXES, normalise
from transplant.plan import plan

TESTS = Path(__file__).parent
Tensors = dict[str, torch.Tensor]
QKV = "layers.0.attention.qkv"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"), 0, torch.float32)


@pytest.fixture(scope="module")
def state() -> Tensors:
    return random_z_image(tiny_z_image_config(), 3, torch.float32).state_dict()


def loaded(file: Path, base: Path) -> Tensors:
    return dict(build(plan(file, base, dtype=torch.float32)).transformer.state_dict())


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def worth(file: Path, base: Path, module: str) -> torch.Tensor:
    """What a Linear multiplies with, quantized or not."""
    layer: Any = build(plan(file, base, dtype=torch.float32)).transformer.get_submodule(module)
    return layer(torch.eye(layer.in_features)).T - (0 if layer.bias is None else layer.bias[:, None])


def test_the_table_above_names_tests_that_exist() -> None:
    for file, name in re.findall(r"(?:(test_\w+)\.)?(test_\w+\*?)", __doc__ or ""):
        text = (TESTS / f"{file or Path(__file__).stem}.py").read_text("utf-8")
        names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert any(found == name or (name[-1] == "*" and found.startswith(name[:-1])) for found in names), name


@pytest.mark.parametrize("layout", ["comfyui", "diffusers"])
@pytest.mark.parametrize("prefix", ["", *PREFIXES, "module.", "_orig_mod.transformer."])
def test_a02_every_prefix_gives_the_same_weights(
    prefix: str, layout: str, state: Tensors, base: Path, tmp_path: Path
) -> None:
    stored = to_comfyui(state) if layout == "comfyui" else state
    assert_same(loaded(save(tmp_path / "x.safetensors", with_prefix(stored, prefix)), base), state)


def test_a02_an_unknown_prefix_shows_what_was_found_and_what_is_expected(
    state: Tensors, base: Path, tmp_path: Path
) -> None:
    file = save(tmp_path / "x.safetensors", with_prefix(to_comfyui(state), "my_trainer."))
    with pytest.raises(errors.WrongArchitecture) as refusal:
        plan(file, base)
    found, expected = str(refusal.value).split("its keys are like ")[1].split(", expected are like ")
    assert found.count("my_trainer.") == 3
    assert all(name in expected for name in ("x_embedder.weight", QKV, "cap_embedder.1.weight"))
    assert "meta tensor" not in str(refusal.value)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a10_junk_of_merges_is_dropped_and_nothing_else(
    prefix: str, state: Tensors, base: Path, tmp_path: Path
) -> None:
    stored = {**to_comfyui(state), "norm_final.weight": torch.full((48,), torch.nan)}
    file = save(tmp_path / "x.safetensors", with_prefix(stored, prefix))
    assert plan(file, base).dropped == (f"{prefix}norm_final.weight",)
    assert_same(loaded(file, base), state)
    other = {**stored, "norm_finale.weight": torch.zeros(48)}
    with pytest.raises(errors.UnexpectedTensors, match=r"norm_finale\.weight"):
        plan(save(tmp_path / "y.safetensors", with_prefix(other, prefix)), base)


def test_a23_only_the_transformer_of_a_bundle_is_read(state: Tensors, base: Path, tmp_path: Path) -> None:
    """The rest may even be in a dtype that cannot be read: nobody looks at it."""
    bundle = with_prefix(to_comfyui(state), "model.diffusion_model.") | {
        "text_encoders.qwen3_4b.transformer.model.layers.0.mlp.down_proj.weight": torch.zeros(4, 4),
        "text_encoders.qwen3_4b.logit_scale": torch.zeros(()),
        "vae.decoder.conv_in.weight": torch.zeros(4, 4),
        "vae.decoder.conv_in.weight_scale": torch.zeros(()),
    }
    file = save(tmp_path / "x.safetensors", bundle)
    planned = plan(file, base)
    assert planned.companions == {"text encoder": 2, "VAE": 2}
    read = {name for target in planned.targets for name in _sources(target)}
    assert all(name.startswith("model.diffusion_model.") for name in read)
    assert_same(loaded(file, base), state)


def _sources(target: Any) -> set[str]:
    return {part.source for part in target.recipe.ranges} if hasattr(target.recipe, "ranges") else set()


def test_b07_unknown_names_ask_no_network(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    file = save(tmp_path / "x.safetensors", {f"thing.{index}.w": torch.zeros(2) for index in range(5)})
    with pytest.raises(errors.WrongArchitecture, match=r"of no architecture known here.*thing\.0\.w"):
        plan(file, base)
    assert identify(normalise(file, read_header(file).tensors)).kind == "unknown"


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("cap_embedder.1.weight", "lacks 1 tensor of Z-Image (cap_embedder.1.weight)"),
        ("x_embedder.weight", "lacks 1 tensor of Z-Image (all_x_embedder.2-1.weight)"),
        (f"{QKV}.weight", "lacks 3 tensors of Z-Image (layers.0.attention.to_q.weight, layers.0.attention.to_k.weight"),
    ],
)
def test_a_file_without_a_telling_key_is_told_what_it_lacks(
    lost: str, told: str, base: Path, state: Tensors, tmp_path: Path
) -> None:
    """Nearly all of a Z-Image is no unknown architecture."""
    stored = to_comfyui(state)
    del stored[lost]
    with pytest.raises(errors.MissingTensors) as refusal:
        plan(save(tmp_path / "x.safetensors", stored), base)
    assert told in str(refusal.value)


@pytest.mark.parametrize("architecture", sorted(FROM_MANIFEST))
def test_b08_what_is_detected_can_be_planned(architecture: str, tmp_path: Path) -> None:
    """Under every prefix the file that is named as an architecture is one that the architecture's base takes."""
    spec = BY_NAME[architecture]
    source = made_of(FROM_MANIFEST[architecture])
    small = random_state(shapes_of(spec.cls, _tiny(spec)))
    stored = from_recipes(source, small)
    folder = base_folder(tmp_path / "base", spec, _tiny(spec))
    for number, prefix in enumerate(("", *PREFIXES)):
        file = save(tmp_path / f"{number}.safetensors", with_prefix(stored, prefix))
        found = identify(normalise(file, read_header(file).tensors))
        assert architecture in [fit.spec.name for fit in found.fits]
        assert plan(file, folder).spec is spec


def _tiny(spec: Any) -> dict[str, Any]:
    from test_architectures import tiny_config

    return full_config(spec.cls, tiny_config(spec))


@pytest.mark.parametrize("shape", ["[]", "[1]", "[3N]", "[3N, 1]"])
@pytest.mark.parametrize("write", [int8, float8])
def test_b11_a_fused_layer_is_split_with_its_scale(
    shape: str, write: Any, state: Tensors, base: Path, tmp_path: Path
) -> None:
    """Scalars are shared by q, k and v, rows go with their rows; the marker is for all three."""
    stored = to_comfyui(state)
    weight = stored.pop(f"{QKV}.weight")
    codes = write(weight) if write is float8 else write(weight, per_row=shape.startswith("[3N"))
    written = codes.stored(QKV)
    scale = written[f"{QKV}.weight_scale"].flatten()
    scale = scale.expand(len(weight)) if shape.startswith("[3N") else scale[:1]
    written[f"{QKV}.weight_scale"] = scale.reshape({"[]": (), "[1]": (1,), "[3N]": (-1,), "[3N, 1]": (-1, 1)}[shape])
    written[f"{QKV}.weight_scale"] = written[f"{QKV}.weight_scale"].clone()
    file = save(tmp_path / "x.safetensors", stored | written)
    for part, rows in zip("qkv", codes.value(torch.float32).chunk(3), strict=True):
        assert torch.equal(worth(file, base, f"layers.0.attention.to_{part}"), rows), part


def test_b13_each_part_of_a_fused_tensor_is_its_own(state: Tensors, base: Path, tmp_path: Path) -> None:
    """Constant rows per part: 1 for q, 2 for k, 3 for v, wherever the file says that they are."""
    stored = to_comfyui(state)
    rows = len(stored[f"{QKV}.weight"]) // 3
    stored[f"{QKV}.weight"] = torch.arange(1.0, 4.0).repeat_interleave(rows)[:, None].expand(-1, 48).contiguous()
    found = loaded(save(tmp_path / "x.safetensors", stored), base)
    for part, value in (("q", 1), ("k", 2), ("v", 3)):
        assert (found[f"layers.0.attention.to_{part}.weight"] == value).all()
    stored[f"{QKV}.weight"] = stored[f"{QKV}.weight"][: 2 * rows + 1].clone()
    with pytest.raises(errors.OverrideArchMismatch, match="attention"):
        plan(save(tmp_path / "y.safetensors", stored), base)


@pytest.mark.parametrize("name", ["t_embedder.mlp.0", "cap_embedder.1", "layers.0.feed_forward.w1"])
def test_b14_scales_are_folded_in_whatever_list_a_layer_is_on(
    name: str, state: Tensors, base: Path, tmp_path: Path
) -> None:
    """t_embedder's dtype is read by the network's code: it is decoded, with its scale."""
    stored = to_comfyui(state)
    written = float8(stored.pop(f"{name}.weight"))
    file = save(tmp_path / "x.safetensors", stored | written.stored(name))
    assert torch.allclose(worth(file, base, name), written.value(torch.float32), rtol=1e-6, atol=1e-7)


def test_b16_input_scales_are_optional(state: Tensors, base: Path, tmp_path: Path) -> None:
    """With, without, and with it on half of the layers: the weights are the same."""
    names = ["layers.0.feed_forward.w1", "layers.0.feed_forward.w3"]
    plain = to_comfyui(state)
    written = {name: float8(plain.pop(f"{name}.weight")) for name in names}
    found: list[torch.Tensor] = []
    for number, having in enumerate(([], names[:1], names)):
        stored = dict(plain)
        for name in names:
            stored |= written[name].stored(name)
            if name in having:
                stored[f"{name}.input_scale"] = torch.tensor(0.5)
        file = save(tmp_path / f"{number}.safetensors", stored)
        found.append(torch.cat([worth(file, base, name) for name in names]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    assert torch.equal(found[0], torch.cat([written[name].value(torch.float32) for name in names]))


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_b17_the_legacy_marker_is_a_flag(
    prefix: str, dtype: torch.dtype, count: int, state: Tensors, base: Path, tmp_path: Path
) -> None:
    """Of any size, and its dtype says nothing of the weights'."""
    name = "layers.0.feed_forward.w1"
    stored = to_comfyui(state)
    written = float8(stored.pop(f"{name}.weight"))
    stored |= {f"{name}.weight": written.tensors["weight"], f"{name}.scale_weight": written.tensors["weight_scale"]}
    stored["scaled_fp8"] = torch.zeros(count, dtype=dtype)
    file = save(tmp_path / "x.safetensors", with_prefix(stored, prefix))
    assert plan(file, base).quantization == "legacy"
    assert torch.equal(worth(file, base, name), written.value(torch.float32))


def test_b20_half_a_declaration_is_refused(state: Tensors, base: Path, tmp_path: Path) -> None:
    """Packed bytes without their scales never become weights."""
    name = "layers.0.feed_forward.w1"
    stored = to_comfyui(state)
    weight = stored.pop(f"{name}.weight")
    packed = torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
    for number, more in enumerate(({}, {f"{name}.weight_scale_2": torch.ones(())})):
        with pytest.raises(errors.OverrideArchMismatch, match=re.escape(name)):
            plan(save(tmp_path / f"{number}.safetensors", {**stored, f"{name}.weight": packed, **more}), base)


def test_c15_the_stored_dtype_decides(state: Tensors, base: Path, tmp_path: Path) -> None:
    """e5m2 is read as e5m2; a marker that says otherwise is refused, naming both."""
    name = "layers.0.feed_forward.w1"
    stored = to_comfyui(state)
    written = float8(stored.pop(f"{name}.weight"), torch.float8_e5m2)
    file = save(tmp_path / "x.safetensors", stored | written.stored(name))
    assert torch.equal(worth(file, base, name), written.value(torch.float32))
    for number, says in enumerate(("float8_e4m3fn", "int8_tensorwise")):
        lying = stored | written.stored(name)
        lying[f"{name}.comfy_quant"] = torch.frombuffer(
            bytearray(json.dumps({"format": says}).encode()), dtype=torch.uint8
        )
        with pytest.raises(errors.UnsupportedQuantization, match=rf"{says}.*E5M2|E5M2.*{says}|e5m2.*{says}"):
            plan(save(tmp_path / f"{number}.safetensors", lying), base)


def test_c17_pruned_structures_are_sized_or_refused_by_name(tmp_path: Path) -> None:
    """Fewer blocks at the end: sized. A block missing inside, or all modulation: named. A table instead: Chroma."""
    spec, config = BY_NAME["Qwen-Image"], _tiny(BY_NAME["Qwen-Image"])
    deep = random_state(shapes_of(spec.cls, {**config, "num_layers": 4}))
    base = base_folder(tmp_path / "base", spec, {**config, "num_layers": 4})
    last = {name: tensor for name, tensor in deep.items() if "blocks.3." not in name}
    assert plan(save(tmp_path / "1.safetensors", last), base).config_changes == {"num_layers": 3}
    inside = {name: tensor for name, tensor in deep.items() if "blocks.1." not in name}
    with pytest.raises(errors.MissingTensors, match=r"all of transformer_blocks\.1\b"):
        plan(save(tmp_path / "2.safetensors", inside), base)
    flat = {name: tensor for name, tensor in deep.items() if "txt_mod" not in name}
    with pytest.raises(errors.MissingTensors, match="txt_mod"):
        plan(save(tmp_path / "3.safetensors", flat), base)
    flux, chroma = BY_NAME["FLUX.1"], BY_NAME["Chroma"]
    table = save(tmp_path / "4.safetensors", random_state(shapes_of(chroma.cls, _tiny(chroma))))
    with pytest.raises(errors.WrongArchitecture, match="Chroma"):
        plan(table, base_folder(tmp_path / "flux", flux, _tiny(flux)))


def test_c21_packed_weights_of_a_quantized_folder_are_refused(state: Tensors, base: Path, tmp_path: Path) -> None:
    """A folder that SDNQ or bitsandbytes packed is not read as if its bytes were numbers."""
    name = "layers.0.feed_forward.w1.weight"
    rows, columns = state[name].shape
    folder = tmp_path / "folder"
    folder.mkdir()
    for beside in ({}, {f"{name[:-7]}.scale": torch.ones(rows, 1)}, {f"{name}.absmax": torch.ones(4)}):
        packed = {**state, name: torch.zeros(rows * columns // 2, 1, dtype=torch.uint8), **beside}
        save(folder / "diffusion_pytorch_model.safetensors", packed)
        with pytest.raises(errors.OverrideArchMismatch, match=re.escape(name[:-7])):
            plan(folder, base)


@pytest.mark.parametrize("order", [0, 1])
def test_c23_of_two_copies_the_normal_one_is_read(order: int, state: Tensors, base: Path, tmp_path: Path) -> None:
    """Whichever comes first in the file; the other is told and not read. A file with an EMA copy alone is unknown."""
    normal = with_prefix(to_comfyui(state), "model.diffusion_model.")
    averaged = {f"model_ema.{name.replace('.', '')}": torch.full_like(t, 7) for name, t in to_comfyui(state).items()}
    both = [normal, averaged][:: -1 if order else 1]
    file = save(tmp_path / "x.safetensors", dict(itertools.chain(*(part.items() for part in both))))
    planned = plan(file, base)
    assert planned.companions == {"EMA copy": len(averaged)}
    assert_same(loaded(file, base), state)
    alone = identify(normalise(file, averaged))
    assert (alone.kind, alone.why) == ("unknown", f"holds {len(averaged)} EMA copy tensors and nothing else")
    with pytest.raises(errors.WrongArchitecture):
        plan(save(tmp_path / "ema.safetensors", averaged), base)


def test_demo_junk_is_that_of_a10() -> None:
    """The demo's own bundle holds the same junk, so that the WebUI shows it too."""
    assert "norm_final" in Path(make_demo.__file__).read_text("utf-8")
