"""LoRA through diffusers and PEFT beside weights that rest in fp8 or are quantized.

A07 (no crash, and the bytes come back), A20 (rotated int8), A21 (a difference smaller than a step of 4 bits),
A22 (the twentieth time is as the first).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, ZImageTransformer2DModel
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer

import transplant
from gguf_files import quantize as as_blocks
from gguf_files import write as write_gguf
from kitchen import float8, int8, write
from test_plan import base_folder
from test_quantized_files import QUANTIZED, quantize, run
from tiny_models import make_demo, random_z_image, save, tiny_z_image_config, to_comfyui
from transplant.build import build
from transplant.errors import AdapterRefused
from transplant.fp8_storage import FP8, store_in_fp8
from transplant.hosts.base import LoadSettings, PlainHost
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.sdnq_bridge import Compute, QuantizeOnLoad

CONFIG = tiny_z_image_config(dim=192, n_layers=1, n_refiner_layers=1)
CAPTION = CONFIG["cap_feat_dim"]
OF_Z_IMAGE = ("t_embedder", "cap_embedder")
LAYER = "layers.0.feed_forward.w1"
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPLANT_FP8_ON_CPU", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_folder(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def network() -> ZImageTransformer2DModel:
    return random_z_image(CONFIG, seed=5, dtype=torch.bfloat16).eval()


def floats(folder: Path, state: State) -> Path:
    return save(folder / "x.safetensors", to_comfyui(state))


def raw_fp8(folder: Path, state: State) -> Path:
    return save(folder / "x.safetensors", {n: t.to(torch.float8_e4m3fn) for n, t in to_comfyui(state).items()})


def kitchen(writer: Callable) -> Callable[[Path, State], Path]:
    return lambda folder, state: save(
        folder / "x.safetensors", quantize({name: tensor.float() for name, tensor in state.items()}, writer)[0]
    )


def gguf(kind: str) -> Callable[[Path, State], Path]:
    def make(folder: Path, state: State) -> Path:
        layout = {name: tensor.float() for name, tensor in to_comfyui(state).items()}
        whole = {
            n: as_blocks(t, kind) if n.removesuffix(".weight").endswith(QUANTIZED) and t.ndim == 2 else t
            for n, t in layout.items()
        }
        return write_gguf(folder / "x.gguf", whole)

    return make


def nvfp4(weight: torch.Tensor) -> object:
    return write(weight, "TensorCoreNVFP4Layout", {"format": "nvfp4"})


KINDS: Mapping[str, tuple[Callable[[Path, State], Path], Compute]] = {
    "FP8 storage": (floats, Compute(fp8_storage=True)),
    "fp8 without scales": (raw_fp8, Compute(fp8_storage=True)),
    "int8": (kitchen(int8), Compute()),
    "int8, rotated": (kitchen(lambda weight: int8(weight, convrot=64)), Compute()),
    "int8, quantized matmul": (kitchen(int8), Compute(quantized_matmul="auto")),
    "float8_e4m3fn": (kitchen(float8), Compute()),
    "nvfp4": (kitchen(nvfp4), Compute()),
    "GGUF Q8_0": (gguf("Q8_0"), Compute()),
    "GGUF Q4_0": (gguf("Q4_0"), Compute()),
    "uint4 on load": (floats, Compute(quantize=QuantizeOnLoad("uint4"))),
}


def loaded(kind: str, folder: Path, base: Path, network: ZImageTransformer2DModel) -> ZImageTransformer2DModel:
    make, compute = KINDS[kind]
    file = make(folder, dict(network.state_dict()))
    return build(plan(file, base, dtype=torch.bfloat16, compute=compute)).transformer


def lora(network: torch.nn.Module, dtype: torch.dtype = torch.bfloat16, size: float = 0.1) -> State:
    """A LoRA of rank 4 on every attention projection and MLP, as a file of diffusers has it."""
    generator, state = torch.Generator().manual_seed(3), {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and re.search(r"attention\.to_|feed_forward", name):
            down = torch.randn(4, module.in_features, generator=generator) * size
            up = torch.randn(module.out_features, 4, generator=generator) * size
            state |= {f"transformer.{name}.lora_A.weight": down.to(dtype)}
            state |= {f"transformer.{name}.lora_B.weight": up.to(dtype)}
    return state


def stored(model: torch.nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    """Everything that a model holds, byte for byte, under its name without adapters."""

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor.detach()).contiguous()  # pyright: ignore

    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name.replace(".base_layer", ""): (tensor.dtype, plain(tensor).flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in named
        if "lora_" not in name
    }


@pytest.mark.parametrize("kind", KINDS)
def test_lora_beside_the_stored_weight(
    kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """Base and adapter add up in the compute dtype, nothing that is stored changes, and unloading leaves no trace."""
    model = loaded(kind, tmp_path, base, network)
    assert model.get_submodule(LAYER).weight.dtype != torch.bfloat16
    before, plain, state = stored(model), run(model, CAPTION), lora(network)
    model.load_lora_adapter(state, adapter_name="x", prefix="transformer")
    layer = model.get_submodule(LAYER)
    assert {p.dtype for name, p in layer.named_parameters() if "lora_" in name} == {torch.bfloat16}
    down, up = (state[f"transformer.{LAYER}.lora_{part}.weight"] for part in "AB")
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        expected = layer.base_layer(x) + (x @ down.T) @ up.T
        assert torch.equal(layer(x), expected)
    assert stored(model) == before
    assert not torch.equal(run(model, CAPTION), plain)
    model.unload_lora()
    assert stored(model) == before
    assert torch.equal(run(model, CAPTION), plain)


@pytest.mark.parametrize("kind", ["FP8 storage", "int8, rotated", "GGUF Q8_0", "uint4 on load"])
def test_the_twentieth_time_is_as_the_first(
    kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    model = loaded(kind, tmp_path, base, network)
    before, outputs = stored(model), []
    for _ in range(20):
        model.load_lora_adapter(lora(network), adapter_name="x", prefix="transformer")
        outputs.append(run(model, CAPTION))
        model.unload_lora()
    assert stored(model) == before
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_lora_smaller_than_a_step_counts(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """A fifth of a step of uint4 would be rounded away if it were quantized; beside the codes all of it counts."""
    model = loaded("uint4 on load", tmp_path, base, network)
    layer = model.get_submodule(LAYER)
    step = float(layer.scale.float().mean())
    column = torch.ones(layer.out_features, 1, dtype=torch.bfloat16)
    row = torch.full((1, layer.in_features), 0.2 * step, dtype=torch.bfloat16)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
        state = {f"{LAYER}.lora_A.weight": row, f"{LAYER}.lora_B.weight": column}
        model.load_lora_adapter(state, adapter_name="x", prefix=None)
        expected = before + (x @ row.T) @ column.T
        assert torch.equal(model.get_submodule(LAYER)(x), expected)
    assert not torch.equal(expected, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adapters_take_the_compute_dtype(
    dtype: torch.dtype, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """Whatever dtype the LoRA has, and by each of diffusers' two ways of loading: the same values."""
    model = loaded("FP8 storage", tmp_path, base, network)
    outputs = []
    for low_cpu_mem_usage in (True, False):
        model.load_lora_adapter(
            lora(network, dtype), adapter_name="x", prefix="transformer", low_cpu_mem_usage=low_cpu_mem_usage
        )
        outputs.append(run(model, CAPTION))
        model.unload_lora()
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in lora(network, dtype).items()}
    model.load_lora_adapter(rounded, adapter_name="x", prefix="transformer")
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], run(model, CAPTION))


def test_a_pipeline_with_a_lora(tmp_path: Path) -> None:
    """load_lora_weights and unload_lora_weights of a pipeline whose transformer rests in fp8."""
    make_demo.make_demo(tmp_path)
    session = Session(PlainHost(LoadSettings(torch.device("cpu"), torch.bfloat16, True, Compute(fp8_storage=True))))
    session.load_base(tmp_path / make_demo.BASE)
    pipeline, transformer = session.pipeline, session.transformer
    assert isinstance(pipeline, DiffusionPipeline) and transformer is not None
    file = save(tmp_path / "lora.safetensors", lora(transformer))
    before, plain = stored(transformer), pixels(pipeline)
    for _ in range(2):
        pipeline.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="x")
        with_lora = pixels(pipeline)
        assert with_lora != plain
        pipeline.set_adapters(["x"], [0.5])
        assert pixels(pipeline) not in (with_lora, plain)
        pipeline.unload_lora_weights()
        assert stored(transformer) == before
        assert pixels(pipeline) == plain


def pixels(pipeline: DiffusionPipeline) -> bytes:
    picture = pipeline(  # pyright: ignore
        "a cat", num_inference_steps=1, guidance_scale=1.0, height=64, width=64,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return picture.images[0].tobytes()


def test_order_does_not_matter(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """FP8 storage switched on under a LoRA, or twice, leaves the LoRA in the compute dtype."""
    first = loaded("FP8 storage", tmp_path, base, network)
    first.load_lora_adapter(lora(network), adapter_name="x", prefix="transformer")
    second = random_z_image(CONFIG, seed=5, dtype=torch.bfloat16).eval()
    second.load_lora_adapter(lora(network), adapter_name="x", prefix="transformer")
    held = store_in_fp8(second, OF_Z_IMAGE, "x")
    assert held == store_in_fp8(first, OF_Z_IMAGE, "x") == store_in_fp8(second, OF_Z_IMAGE, "x")
    assert all(p.dtype not in FP8 for n, p in second.named_parameters() if "lora_" in n)
    assert stored(first) == stored(second)
    assert torch.equal(run(first, CAPTION), run(second, CAPTION))


# What is refused


@pytest.mark.parametrize("kind", ["FP8 storage", "int8", "nvfp4", "GGUF Q8_0"])
def test_fusing_is_refused_before_anything_changes(
    kind: str, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    model = loaded(kind, tmp_path, base, network)
    model.load_lora_adapter(lora(network), adapter_name="x", prefix="transformer")
    before, output = stored(model), run(model, CAPTION)
    with pytest.raises(AdapterRefused, match=r"would round the weights of \d+ layers anew"):
        model.fuse_lora()
    assert stored(model) == before
    assert torch.equal(run(model, CAPTION), output)


def test_fusing_into_layers_that_are_not_narrow(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """The time embedder is never in fp8: a LoRA of it alone is fused as ever."""
    model = loaded("FP8 storage", tmp_path, base, network)
    wide = model.get_submodule("t_embedder.mlp.0")
    state = {"t_embedder.mlp.0.lora_A.weight": torch.randn(2, wide.in_features).to(torch.bfloat16)}
    state["t_embedder.mlp.0.lora_B.weight"] = torch.randn(wide.out_features, 2).to(torch.bfloat16)
    before = wide.weight.detach().clone()
    model.load_lora_adapter(state, adapter_name="x", prefix=None)
    model.fuse_lora()
    assert not torch.equal(wide.weight, before)


def test_what_reads_the_weights_is_refused(network: ZImageTransformer2DModel, base: Path, tmp_path: Path) -> None:
    """DoRA, and beginnings that are computed from the weights; no adapter is left behind."""
    model = loaded("int8", tmp_path, base, network)
    plain, magnitude = run(model, CAPTION), {f"transformer.{LAYER}.lora_magnitude_vector": torch.ones(8)}
    with pytest.raises(AdapterRefused, match="DoRA"):
        model.load_lora_adapter({**lora(network), **magnitude}, adapter_name="x", prefix="transformer")
    for config in (
        LoraConfig(use_dora=True),
        LoraConfig(init_lora_weights="pissa"),
        LoraConfig(init_lora_weights="olora"),
    ):
        config.target_modules = {"w1"}
        with pytest.raises(AdapterRefused):
            model.add_adapter(config)
    assert not any(isinstance(module, LoraLayer) for module in model.modules())
    assert torch.equal(run(model, CAPTION), plain)
    model.add_adapter(LoraConfig(r=2, target_modules={"w1"}), "fresh")
    assert torch.equal(run(model, CAPTION), plain)  # it begins at zero


@pytest.mark.parametrize(
    ("kind", "fits"), [("FP8 storage", True), ("int8", True), ("nvfp4", False), ("GGUF Q8_0", False)]
)
def test_lokr_needs_the_shape_of_the_weight(
    kind: str, fits: bool, network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """LoKr's product is brought to the shape of the stored weight, which packed codes do not have."""
    model = loaded(kind, tmp_path, base, network)
    plain, layer = run(model, CAPTION), model.get_submodule(LAYER)
    state = {
        f"transformer.{LAYER}.lokr_w1": torch.full((2, 2), 0.1),
        f"transformer.{LAYER}.lokr_w2": torch.full((layer.out_features // 2, layer.in_features // 2), 0.1),
    }
    if not fits:
        with pytest.raises(AdapterRefused, match="shape"):
            model.load_lora_adapter(state, adapter_name="x", prefix="transformer")
        assert torch.equal(run(model, CAPTION), plain)
        return
    model.load_lora_adapter(state, adapter_name="x", prefix="transformer")
    assert run(model, CAPTION).isfinite().all()
    assert not torch.equal(run(model, CAPTION), plain)


def test_a_peft_that_stores_adapters_in_fp8_is_refused(
    network: ZImageTransformer2DModel, base: Path, tmp_path: Path
) -> None:
    """PEFT before 0.19 does not ask for the compute dtype: as there, the layers say none."""
    model = transplant.load_transformer(floats(tmp_path, dict(network.state_dict())), base=base, fp8_storage=True)
    plain = run(model, CAPTION)
    kinds = {type(m) for m in model.modules() if hasattr(m, "compute_dtype")}
    assert kinds == {torch.nn.Linear}
    from peft.tuners.tuners_utils import BaseTunerLayer

    def older(self: object, layer: torch.nn.Module) -> tuple[torch.device, torch.dtype]:
        return layer.weight.device, layer.weight.dtype  # pyright: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseTunerLayer, "_get_base_layer_device_and_dtype", older)
        with pytest.raises(AdapterRefused, match=r"install PEFT 0\.19"):
            model.load_lora_adapter(lora(network), adapter_name="x", prefix="transformer")
    assert torch.equal(run(model, CAPTION), plain)
