"""What must hold inside the host. Run by tests/test_sdnext.py in a copy of this folder, in a process of its own."""

import gc
import os
import shutil
import sys
from pathlib import Path

import gradio
import pytest
import torch
import webui
from fastapi import HTTPException
from modules.modeldata import model_data
from pipelines import generic, generic_transformer, generic_util, model_z_image, native_transformer
from pipelines.anima.modeling_llm_adapter import AnimaLLMAdapter
from safetensors.torch import load_file, save_file

import gguf_files
from modules import attention, logger, processing, script_callbacks, script_loading, sd_models, sd_unet, shared
from tiny_models import to_comfyui
from tiny_pipelines import anima, flux2_klein, network, wan, z_image

UNETS = Path("models/UNET")
HUB_ID = "Tongyi-MAI/Z-Image"
ORIGINALS = (
    generic.load_transformer, native_transformer.load, sd_unet.load_unet, sd_unet.load_unet_secondary,
)  # fmt: skip
SWITCHES = ("transplant_loader", "transplant_gguf", "transplant_swap")


def functions():
    return (generic.load_transformer, native_transformer.load, sd_unet.load_unet, sd_unet.load_unet_secondary)


def write_files() -> None:
    UNETS.mkdir(parents=True)
    for name, make in {"z-image": z_image, "klein": flux2_klein, "wan": wan}.items():
        make().save_pretrained(f"models/Diffusers/{name}")
    shutil.copytree("models/Diffusers/z-image", hub_folder(HUB_ID))
    other = z_image().transformer
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    write(to_comfyui(other.state_dict()), UNETS / "zi-comfyui.safetensors")
    write({key: 2 * tensor for key, tensor in to_comfyui(other.state_dict()).items()}, UNETS / "zi-other.safetensors")
    write_gguf(UNETS / "zi.gguf", to_comfyui(other.state_dict()))
    write_fp8(UNETS / "zi-fp8.safetensors", to_comfyui(other.state_dict()))
    (UNETS / "broken.safetensors").write_text("<!DOCTYPE html>")
    wan_file = network("WanTransformer3DModel", seed=5).state_dict()
    write(wan_file, UNETS / "wan-a.safetensors")
    write({key: tensor * 2 for key, tensor in wan_file.items()}, UNETS / "wan-b.safetensors")
    klein = network("Flux2Transformer2DModel", seed=5, joint_attention_dim=24)
    write(klein.state_dict(), UNETS / "klein-a.safetensors")
    write_anima()


def write(tensors, file: Path) -> None:
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, file)


def write_gguf(file: Path, tensors) -> None:
    """Every weight whose rows are whole blocks as Q8_0."""
    quantized = {
        name: gguf_files.quantize(tensor, "Q8_0") if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else tensor.float()
        for name, tensor in tensors.items()
    }
    gguf_files.write(file, quantized, "lumina2")


def write_fp8(file: Path, tensors) -> None:
    """The layers of the blocks as codes of float8 with a scale."""
    scaled = {"scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in tensors.items():
        if not name.startswith("layers.") or tensor.ndim != 2:
            scaled[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        scaled[name] = (tensor / scale).to(torch.float8_e4m3fn)
        scaled[name.replace(".weight", ".scale_weight")] = scale
    write(scaled, file)


def write_anima() -> None:
    pipe = anima()
    folder = Path("models/Diffusers/anima")
    pipe.transformer.save_pretrained(folder / "transformer")
    AnimaLLMAdapter().save_pretrained(folder / "llm_adapter")
    (folder / "model_index.json").write_text(
        '{"_class_name": "AnimaTextToImagePipeline", "transformer": ["diffusers", "CosmosTransformer3DModel"],'
        ' "llm_adapter": ["modeling_llm_adapter", "AnimaLLMAdapter"]}'
    )
    tensors = {key: tensor + 1 for key, tensor in pipe.transformer.state_dict().items()}
    adapter = {f"llm_adapter.{key}": tensor + 1 for key, tensor in AnimaLLMAdapter().state_dict().items()}
    write({**tensors, **adapter}, UNETS / "anima-a.safetensors")


def hub_folder(repo_id: str) -> Path:
    """A snapshot in the host's own cache."""
    repository = Path("models/huggingface") / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a1b2")
    return repository / "snapshots" / "a1b2"


write_files()
os.environ["HF_HUB_OFFLINE"] = "1"
QUICKSETTINGS, TABS = webui.start()


@pytest.fixture(autouse=True)
def fresh():
    """Every check begins with nothing loaded and every option at its default."""
    for switch in SWITCHES:
        shared.opts.set(switch, True)
    shared.opts.data.clear()
    model_data.sd_model = None
    sd_unet.loaded_unet = sd_unet.loaded_unet_secondary = None
    for told in (sd_models.loads, generic_util.loaded, generic_transformer.calls, native_transformer.calls,
                 logger.lines, gradio.shown, sd_unet.calls):  # fmt: skip
        told.clear()
    yield
    assert shared.state.open == []  # every job that began has ended


def load(base: str):
    shared.opts.set("sd_model_checkpoint", base if "/" in base else f"models/Diffusers/{base}")
    return model_data.sd_model


def post(**values) -> list[str]:
    """POST /sdapi/v1/options."""
    return [key for key, value in values.items() if shared.opts.set(key, value)]


def saved(**values) -> None:
    """Options as they come from config.json, before anything is loaded."""
    shared.opts.data.update(values)


def errors() -> str:
    return "\n".join(text for level, text in logger.lines if level == "ERROR")


def holds(model, file: str, times: float = 1.0) -> bool:
    """Whether a Z-Image transformer has the values of a file in ComfyUI's names."""
    stored = load_file(UNETS / f"{file}.safetensors")
    own = to_comfyui(model.state_dict())
    return all(torch.equal(own[key].float(), tensor.float() * times) for key, tensor in stored.items())


# Start


def test_the_script_ran_and_the_host_started():
    assert script_loading.failed == []
    assert not any("extensions" in path for path in sys.path if path.startswith("extensions"))


def test_same_named_packages_of_others_and_ours_live_side_by_side():
    import extension
    import install
    import modules

    assert extension.OF == install.OF == "another extension"
    assert Path(modules.__file__).parent == Path("modules").absolute()
    assert sys.modules["transplant"].__name__ == "transplant"


def test_options_have_sections_and_the_hosts_own_are_left():
    labels = shared.opts.data_labels
    ours = [key for key, info in labels.items() if info.section == ("transplant", "Transplant")]
    assert ours == [*SWITCHES, "transplant_mmap", "fp8_storage"]
    assert labels["sd_unet"].section == ("sd", "Model Loading")
    assert "sdnq_quantize_weights_group_size" not in labels and "unet_cache" not in labels


def test_registration_can_be_repeated():
    before, callbacks = functions(), {name: len(found) for name, found in script_callbacks.callback_map.items()}
    script_loading.load_scripts()
    assert functions() == before
    assert {name: len(found) for name, found in script_callbacks.callback_map.items()} == callbacks


def test_a_host_without_the_second_slot_gets_it_beside_the_first():
    from transplant.hosts.sdnext import options

    del shared.opts.data_labels["sd_unet_secondary"]
    options.register()
    keys = list(shared.opts.data_labels)
    assert keys.index("sd_unet_secondary") == keys.index("sd_unet") + 1
    assert shared.opts.data_labels["sd_unet_secondary"].section == shared.opts.data_labels["sd_unet"].section
    assert shared.opts.quicksettings_list == ["sd_model_checkpoint", "sd_unet", "sd_unet_secondary"]
    load("wan")
    post(sd_unet_secondary="wan-b")
    assert sd_unet.loaded_unet_secondary == "wan-b"


def test_a_switch_puts_the_hosts_own_functions_back():
    assert not set(functions()) & set(ORIGINALS)
    post(transplant_loader=False, transplant_gguf=False)
    assert functions()[:2] == ORIGINALS[:2]
    post(transplant_swap=False)
    assert functions() == ORIGINALS
    post(transplant_loader=True)
    assert not set(functions()) & set(ORIGINALS)


# Loads


@pytest.mark.parametrize("base", ["z-image", HUB_ID])
def test_a_file_for_a_folder_and_for_a_hub_id(base):
    saved(sd_unet="zi-comfyui")
    pipe = load(base)
    assert holds(pipe.transformer, "zi-comfyui")
    assert sd_unet.loaded_unet == shared.opts.sd_unet == "zi-comfyui"
    assert generic_transformer.calls == []  # the base model's own transformer is never read
    assert sd_models.allow_post_quant is False
    assert shared.state.jobs[-1] == "Load UNET" and max(shared.state.steps) == 100
    assert isinstance(pipe.transformer, model_z_image.diffusers.ModelMixin)


def test_a_gguf_file_is_what_runs():
    saved(sd_unet="zi.gguf")
    pipe = load("z-image")
    assert sd_unet.loaded_unet == "zi.gguf"
    assert any("GGUF" in type(module).__name__ for module in pipe.transformer.modules())


def test_both_slots_and_each_on_its_own():
    saved(sd_unet="wan-a", sd_unet_secondary="wan-b")
    pipe = load("wan")
    assert (sd_unet.loaded_unet, sd_unet.loaded_unet_secondary) == ("wan-a", "wan-b")
    first, second = pipe.transformer.state_dict(), pipe.transformer_2.state_dict()
    assert all(torch.equal(2 * first[key], second[key]) for key in first)
    encoder = pipe.text_encoder
    post(sd_unet_secondary="Default")
    assert model_data.sd_model.text_encoder is encoder
    assert (sd_unet.loaded_unet, sd_unet.loaded_unet_secondary) == ("wan-a", None)
    assert shared.opts.sd_unet == "wan-a"


def test_a_file_for_a_second_transformer_that_is_not_there_is_refused():
    pipe = load("z-image")
    post(sd_unet_secondary="wan-b")
    assert shared.opts.sd_unet_secondary == "Default" and "has no second transformer" in errors()
    assert model_data.sd_model is pipe and len(sd_models.loads) == 1


def test_a_saved_choice_for_a_second_transformer_that_is_not_there_is_reset():
    saved(sd_unet_secondary="wan-b")
    load("z-image")
    assert shared.opts.sd_unet_secondary == "Default" and "has no second transformer" in errors()


def test_a_diffusers_layout_file_with_a_native_spec():
    saved(sd_unet="klein-a")
    pipe = load("klein")
    stored = load_file(UNETS / "klein-a.safetensors")
    assert all(torch.equal(pipe.transformer.state_dict()[key], tensor) for key, tensor in stored.items())
    assert native_transformer.calls == []


def test_siblings_are_returned_as_the_host_expects_them():
    saved(sd_unet="anima-a")
    pipe = load("anima")
    assert type(pipe.llm_adapter) is AnimaLLMAdapter
    stored = load_file(UNETS / "anima-a.safetensors")
    for key, tensor in pipe.llm_adapter.state_dict().items():
        assert torch.equal(tensor, stored[f"llm_adapter.{key}"])
    assert native_transformer.calls == []
    post(sd_unet="broken")
    assert model_data.sd_model is pipe and shared.opts.sd_unet == "anima-a"
    post(sd_unet="Default")  # the adapter came with the file, so all is loaded again
    assert model_data.sd_model is not pipe and sd_unet.loaded_unet is None
    post(sd_unet="anima-a")
    assert torch.equal(model_data.sd_model.llm_adapter.norm.weight, stored["llm_adapter.norm.weight"])


def test_an_anima_that_is_refused_at_start_leaves_the_base_model():
    saved(sd_unet="zi-comfyui")
    pipe = load("anima")
    base = load_file("models/Diffusers/anima/transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(pipe.transformer.state_dict()[key], tensor) for key, tensor in base.items())
    assert shared.opts.sd_unet == "Default" and "Z-Image" in errors()


def test_a_base_model_of_another_type_resets_each_slot():
    saved(sd_unet="wan-a", sd_unet_secondary="wan-b")
    load("wan")
    load("z-image")
    assert (shared.opts.sd_unet, shared.opts.sd_unet_secondary) == ("Default", "Default")
    assert (sd_unet.loaded_unet, sd_unet.loaded_unet_secondary) == (None, None)


# API


def test_routes_are_in_the_hosts_api():
    routes = shared.api.routes
    assert [path for path in routes if "transplant" in path] == [
        "/transplant/v1/slots", "/transplant/v1/inspect", "/transplant/v1/plan",
    ]  # fmt: skip
    load("z-image")
    assert routes["/transplant/v1/inspect"]("zi.gguf")["architecture"] == "Z-Image"
    assert routes["/transplant/v1/plan"]("zi-comfyui")["verdict"] == "can be loaded"
    assert routes["/transplant/v1/plan"]("wan-a")["verdict"] == "refused"
    wrong = (("inspect", ["nothing"], 404), ("plan", ["broken"], 422), ("plan", ["zi.gguf", "x"], 422))
    for path, arguments, status in wrong:
        with pytest.raises(HTTPException) as refused:
            routes[f"/transplant/v1/{path}"](*arguments)
        assert refused.value.status_code == status
    post(sd_unet="wan-a")
    told, _ = routes["/transplant/v1/slots"]()
    assert (told["selected"], told["loaded"]) == ("Default", "Default") and "Wan" in told["refused"]


def test_the_tab_tells_what_a_file_is_and_what_the_slots_hold():
    from transplant.hosts.sdnext import tab

    ((blocks, title, elem_id),) = TABS
    assert (title, elem_id) == ("Transplant", "transplant") and isinstance(blocks, gradio.Blocks)
    load("z-image")
    post(sd_unet="zi-comfyui")
    post(sd_unet="wan-a")
    html = tab.show("zi.gguf", "sd_unet")
    assert "can be loaded" in html and "zi-comfyui" in html and "zi-comfyui stays loaded" in html
    assert "web page" in tab.show("broken", "sd_unet")
    update, _ = tab.refreshed("gone", "sd_unet")
    assert update["value"] is None and "zi.gguf" in update["choices"]


# Refusals


@pytest.mark.parametrize(
    ("file", "why"), [("broken", "web page"), ("wan-a", "Wan"), ("not-there", "not in the folder")]
)
def test_a_refusal_at_load_gives_the_base_model_and_says_why(file, why):
    saved(sd_unet=file)
    pipe = load("z-image")
    assert (
        holds(pipe.transformer, "zi-comfyui", 1 / 1.5) or type(pipe.transformer).__name__ == "ZImageTransformer2DModel"
    )
    assert shared.opts.sd_unet == "Default" and sd_unet.loaded_unet is None
    assert why in errors() and "base model's own transformer is loaded" in errors()
    assert len(sd_models.loads) == 1


def test_a_refusal_keeps_what_is_loaded_and_a_repaired_file_is_taken():
    saved(sd_unet="zi-comfyui")
    pipe = load("z-image")
    transformer = pipe.transformer
    post(sd_unet="broken")
    assert model_data.sd_model is pipe and pipe.transformer is transformer
    assert shared.opts.sd_unet == sd_unet.loaded_unet == "zi-comfyui"
    assert "zi-comfyui stays loaded" in errors()
    html = (UNETS / "broken.safetensors").read_bytes()
    shutil.copy(UNETS / "zi-other.safetensors", UNETS / "broken.safetensors")
    try:
        post(sd_unet="broken")
        assert sd_unet.loaded_unet == "broken" and pipe.transformer is not transformer
    finally:
        (UNETS / "broken.safetensors").write_bytes(html)


def test_the_reason_appears_over_the_page_when_the_dropdown_was_used():
    load("z-image")
    gradio.in_event(lambda: post(sd_unet="wan-a"))
    assert len(gradio.shown) == 1 and "Wan" in gradio.shown[0]
    post(sd_unet="wan-a")
    assert len(gradio.shown) == 1  # the API's reader has no page


def test_an_interrupt_keeps_what_is_loaded(monkeypatch):
    pipe = load("z-image")
    transformer = pipe.transformer
    monkeypatch.setattr(type(shared.state), "interrupted", property(lambda _: True, lambda *_: None), raising=False)
    shared.state.__dict__.pop("interrupted", None)
    post(sd_unet="zi-comfyui")
    assert pipe.transformer is transformer and shared.opts.sd_unet == "Default"
    assert "cancelled" in errors()


def test_a_fault_of_ours_is_one_line_and_the_hosts_own_code(monkeypatch):
    from transplant.hosts.sdnext import loading

    def fail(*_, **__):
        raise ZeroDivisionError("in\ntwo lines")

    monkeypatch.setattr(loading, "plan", fail)
    saved(sd_unet="klein-a")
    pipe = load("klein")
    assert native_transformer.calls == ["klein-a.safetensors"]  # the host's own loader took it
    assert sd_unet.loaded_unet == shared.opts.sd_unet == "klein-a" and pipe is not None
    assert errors() == (
        "Transplant: klein-a.safetensors could not be loaded (ZeroDivisionError: in two lines); "
        "the host goes on by itself"
    )


def test_where_the_hosts_own_code_fails_too_there_is_the_base_model(monkeypatch):
    from transplant.hosts.sdnext import loading

    monkeypatch.setattr(loading, "plan", lambda *_, **__: 1 / 0)
    saved(sd_unet="zi-comfyui")
    assert load("z-image") is not None
    assert shared.opts.sd_unet == "Default" and "the host could not load it" in errors()


@pytest.mark.parametrize("leaves", ["what was loaded", "the chosen file", "nothing"])
def test_a_reload_of_the_host_that_fails_leaves_the_option_at_what_is_loaded(leaves, monkeypatch):
    """The host puts an option back to what it was where its callback raises, whatever is loaded by then."""
    post(transplant_swap=False)
    load("z-image")
    post(sd_unet="zi-comfyui")
    reload = sd_models.reload_model_weights

    def fail(**more):
        if leaves == "the chosen file":
            reload(**more)
        elif leaves == "nothing":
            model_data.sd_model = None
        raise ZeroDivisionError("in the host")

    monkeypatch.setattr(sd_models, "reload_model_weights", fail)
    post(sd_unet="zi-other")
    monkeypatch.undo()
    names = {"what was loaded": "zi-comfyui", "the chosen file": "zi-other", "nothing": "Default"}
    assert shared.opts.sd_unet == names[leaves] and "in the host" in errors()
    if leaves != "nothing":
        assert holds(model_data.sd_model.transformer, names[leaves])
    assert shared.sd_model is not None and shared.api.routes["/transplant/v1/slots"]()[0]["loaded"] == names[leaves]


# In place


def test_a_swap_loads_nothing_else():
    pipe = load("z-image")
    kept = {name: part for name, part in pipe.components.items() if name != "transformer"}
    loaded, dispatched = list(generic_util.loaded), len(attention.dispatched)
    before = pipe.transformer
    weak = __import__("weakref").ref(before)
    del before
    for name in ("zi-comfyui", "zi.gguf", "Default", "zi-other"):
        post(sd_unet=name)
        assert model_data.sd_model is pipe and len(sd_models.loads) == 1
        assert sd_unet.loaded_unet == (None if name == "Default" else name)
    gc.collect()
    assert weak() is None  # the old ones are gone
    assert all(pipe.components[name] is part for name, part in kept.items())
    assert generic_util.loaded == loaded
    assert len(attention.dispatched) == dispatched + 4
    assert holds(pipe.transformer, "zi-other")


@pytest.mark.parametrize(
    "options",
    [{"diffusers_offload_mode": "sequential"}, {"diffusers_offload_mode": "group"}, {"transplant_swap": False},
     {"cuda_compile": ["Model"], "cuda_compile_backend": "inductor"}, {"layerwise_quantization": ["Model"]},
     {"sdnq_quantize_mode": "post", "sdnq_quantize_weights": ["Model"]}],
)  # fmt: skip
def test_what_cannot_be_swapped_in_place_is_the_hosts_to_reload(options):
    saved(**options)
    load("z-image")
    post(sd_unet="zi-comfyui")
    assert len(sd_models.loads) == 2
    assert holds(model_data.sd_model.transformer, "zi-comfyui") and sd_unet.loaded_unet == "zi-comfyui"


def test_offload_is_applied_to_what_was_swapped_in():
    saved(diffusers_offload_mode="balanced")
    load("z-image")
    sd_models.calls.clear()
    post(sd_unet="zi-comfyui")
    assert sd_models.calls == ["options", "offload force=True"]


def test_with_the_loader_off_the_host_loads_files_and_gguf_is_still_ours():
    post(transplant_loader=False)
    saved(sd_unet="klein-a")
    load("klein")
    assert native_transformer.calls == ["klein-a.safetensors"]
    saved(sd_unet="zi.gguf")
    load("z-image")
    assert sd_unet.loaded_unet is None  # reset with the type
    post(sd_unet="zi.gguf")
    assert sd_unet.loaded_unet == "zi.gguf"


# Pictures


def test_metadata_name_the_files_with_hash():
    import hashlib

    saved(sd_unet="wan-a", sd_unet_secondary="wan-b")
    load("wan")
    request = processing.request()
    processing.process_images(request, lambda pipe: pipe)
    hashes = [hashlib.sha256((UNETS / f"wan-{which}.safetensors").read_bytes()).hexdigest()[:10] for which in "ab"]
    assert request.extra_generation_params == {
        "UNet hash": hashes[0], "UNet secondary": "wan-b", "UNet secondary hash": hashes[1],
    }  # fmt: skip


def test_a_requests_own_choice_holds_for_it_alone():
    pipe = load("z-image")
    seen = processing.process_images(processing.request(sd_unet="zi-comfyui"), lambda pipe: sd_unet.loaded_unet)
    assert seen == ["zi-comfyui"]
    assert shared.opts.sd_unet == "Default" and sd_unet.loaded_unet is None
    assert model_data.sd_model is pipe and len(sd_models.loads) == 1


def test_a_requests_own_choice_that_is_refused_draws_nothing():
    load("z-image")
    assert processing.process_images(processing.request(sd_unet="broken"), lambda pipe: pipe) == []
    assert "nothing is drawn" in errors() and shared.opts.sd_unet == "Default"


def test_what_is_chosen_and_not_loaded_is_loaded_before_the_picture():
    load("z-image")
    shared.opts.data["sd_unet"] = "zi-comfyui"  # as the grid script and a restored setting do
    processing.process_images(processing.request(), lambda pipe: pipe)
    assert sd_unet.loaded_unet == "zi-comfyui"


def test_the_hosts_own_sdnq_makes_the_layers():
    saved(sd_unet="zi-fp8")
    pipe = load("z-image")
    layers = [module for module in pipe.transformer.modules() if hasattr(module, "sdnq_dequantizer")]
    assert layers
    assert {type(layer).__module__ for layer in layers} == {"modules.sdnq.layers"}
    assert type(layers[0].sdnq_dequantizer).__module__ == "modules.sdnq.dequantizer"
    assert type(pipe.transformer.quantization_config).__module__.startswith("modules.sdnq")
    assert "sdnq" not in sys.modules
