"""Whole pipelines of every architecture: files in their slots draw what the same weights placed by hand draw."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils

from kitchen import Written, float8, int8
from original_layouts import WRITTEN_OUT, Tensors, from_recipes
from test_architectures import BY_NAME, FROM_MANIFEST, WIDTH_IS_FIXED, made_of
from test_session import TestHost
from tiny_models import save, tiny_flux_bfl, with_prefix
from tiny_pipelines import PIPELINES, TinyPipeline, filled
from transplant import errors, pipeline
from transplant.base_model import read_base
from transplant.hosts.base import LoadSettings
from transplant.pipeline import Outcome, Session
from transplant.plan import plan
from transplant.recipe import Made
from transplant.slots import DEFAULT, PRIMARY, SECONDARY, SLOTS, Override, SlotKind

NOT_COVERED: dict[str, str] = {}
DUAL = [name for name, tiny in PIPELINES.items() if len(tiny.slots) == 2]
WIDTH_IN_SOURCE = {
    "FLUX.1": ("convert_flux_transformer_checkpoint_to_diffusers", {"inner_dim = 3072": "inner_dim = 16"}),
    "Chroma": ("convert_chroma_transformer_checkpoint_to_diffusers", {"inner_dim = 3072": "inner_dim = 16"}),
    "HunyuanVideo": ("convert_hunyuan_video_transformer_to_diffusers", {"hidden_size = 3072": "hidden_size = 16"}),
    "Lumina 2": ("convert_lumina2_to_diffusers", {"q_dim = 2304": "q_dim = 48", "v_dim = 768": "v_dim = 16"}),
}
"""Converters of diffusers that know one width, and the numbers in their source that say so."""

MANIFEST = {**FROM_MANIFEST, **WIDTH_IS_FIXED}


@cache
def recipes(architecture: str) -> dict[str, Made]:
    """What its converter makes of a real header. Asked for first while diffusers' own converter is in place."""
    return made_of(MANIFEST[architecture])


def with_halves_swapped(layout: Tensors) -> Tensors:
    """The last block's context modulation has shift and scale the other way round, and the real last is another."""
    last = f"joint_blocks.{max(int(name.split('.')[1]) for name in layout if name.startswith('joint_blocks'))}."
    swapped = {name for name in layout if name.startswith(f"{last}context_block.adaLN_modulation")}
    assert len(swapped) == 2
    return {name: torch.cat(t.chunk(2)[::-1]) if name in swapped else t for name, t in layout.items()}


class Studio:
    """A tiny base model in a session, and the same pipeline with weights placed by hand."""

    def __init__(self, tiny: TinyPipeline, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        tiny.make().save_pretrained(str(folder / "base"))
        self.host = TestHost()
        self.host.settings = LoadSettings(torch.device("cpu"), torch.float32, use_mmap=False)
        self.session = self.new_session()

    def new_session(self, *files: Override | None) -> Session:
        session = Session(self.host)
        session.load_base(self.folder / "base", *files)
        return session

    def choose_none(self) -> None:
        for kind in SLOTS[: len(self.tiny.slots)]:
            self.session.choose(None, kind)

    def network(self, component: str, **changes: Any) -> Any:
        """One of the pipeline's models as diffusers makes it."""
        base = self.session.base
        assert base is not None
        return getattr(diffusers, base.components[component].cls).from_config({**base.config(component), **changes})

    def state(self, seed: int) -> Tensors:
        """The tensors of a transformer with numbers of its own."""
        return filled(self.network(self.tiny.slots[0]), seed).state_dict()

    def original(self, state: Tensors) -> Tensors:
        """The tensors in the layout that is published; diffusers' own where no other is."""
        name = self.tiny.architecture
        if name in WRITTEN_OUT:
            return WRITTEN_OUT[name](state)
        layout = from_recipes(recipes(name), state) if name in MANIFEST else dict(state)
        return with_halves_swapped(layout) if name == "Stable Diffusion 3" else layout

    def file(self, name: str, tensors: Tensors) -> Override:
        path = self.folder / f"{name}.safetensors"
        return Override(name, save(path, with_prefix(tensors, self.tiny.prefix)))

    def override(self, name: str, seed: int) -> Override:
        """A file in the original layout."""
        return self.file(name, self.original(self.state(seed)))

    def drawn(self, session: Session | None = None, **states: Tensors) -> torch.Tensor:
        """Latents that a session's pipeline makes; with `states` in its transformers where they are given."""
        pipe: Any = (session or self.session).pipeline
        held = {component: getattr(pipe, component) for component in states}
        for component, state in states.items():
            network = self.network(component)
            network.load_state_dict(state)
            setattr(pipe, component, network.eval())
        for name, value in self.tiny.attributes.items():
            setattr(pipe, name, value)
        for block in self.tiny.left_out:
            pipe._blocks.sub_blocks.pop(block, None)
        result = self.call(pipe)
        for component, network in held.items():
            setattr(pipe, component, network)
        assert result.isfinite().all()
        return result

    def call(self, pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        call = {**self.tiny.call, "generator": torch.Generator().manual_seed(0)}
        if isinstance(pipe, diffusers.ModularPipeline):
            return pipe(**call, output=self.tiny.output)
        return pipe(**call, output_type="latent", return_dict=False)[0]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Small networks are quickest on one thread, and a swap's garbage collection without all that is here already."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def any_width() -> Iterator[None]:
    """Let diffusers' converters of one width convert small networks: their own source with another number in it."""
    with pytest.MonkeyPatch.context() as patch:
        for architecture, (name, numbers) in WIDTH_IN_SOURCE.items():
            recipes(architecture)
            source = inspect.getsource(getattr(single_file_utils, name))
            for old, new in numbers.items():
                assert old in source
                source = source.replace(old, new)
            scope = dict(vars(single_file_utils))
            exec(source, scope)
            patch.setattr(single_file_utils, name, scope[name])
        yield


@pytest.fixture(scope="module", params=PIPELINES)
def studio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return Studio(PIPELINES[request.param], tmp_path_factory.mktemp("studio"))


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "available_bytes", lambda device: -1)


def differ(*pictures: torch.Tensor) -> bool:
    return not any(torch.equal(a, b) for index, a in enumerate(pictures) for b in pictures[:index])


# One file


def test_a_file_in_the_original_layout(studio: Studio) -> None:
    """It draws bit for bit what diffusers draws with its weights, and not what the base's own draw."""
    session, component = studio.session, studio.tiny.slots[0]
    studio.choose_none()
    default = studio.drawn()
    state = studio.state(seed=7)
    assert session.choose(studio.file("a", studio.original(state))) == Outcome(changed=True)
    drawn = studio.drawn()
    assert differ(drawn, default)
    assert torch.equal(drawn, studio.drawn(**{component: state}))


def test_a_quantized_file(studio: Studio) -> None:
    """It draws bit for bit what comfy-kitchen's dequantized weights draw; int8 and float8 in turns."""
    component = studio.tiny.slots[0]
    state = studio.state(seed=8)
    stored, values, layers = quantized(studio.original(state), itertools.cycle((int8, float8)))
    planned = plan(studio.file("quantized", stored).path, studio.folder / "base", dtype=torch.float32)
    assert len(planned.layers) == layers > 2
    assert {target.form.holder for target in planned.targets if target.form} == {"sdnq"}
    assert studio.session.choose(studio.file("quantized", stored)).changed
    by_hand = taken_back(studio.original, state, values)
    assert torch.equal(studio.drawn(), studio.drawn(**{component: by_hand}))


def quantized(stored: Tensors, writers: Iterator[Callable[[torch.Tensor], Written]]) -> tuple[Tensors, Tensors, int]:
    """A file whose blocks' Linears are quantized, what its tensors are worth, and how many layers that are."""
    file, values, layers = dict(stored), dict(stored), 0
    for name, tensor in stored.items():
        if tensor.ndim == 2 and re.search(r"(blocks|layers)\.\d+\..*\.weight$", name):
            written = next(writers)(tensor)
            del file[name]
            file |= written.stored(name.removesuffix(".weight"))
            values[name] = written.value(torch.float32)
            layers += 1
    return file, values, layers


def taken_back(layout: Callable[[Tensors], Tensors], state: Tensors, stored: Mapping[str, torch.Tensor]) -> Tensors:
    """The state that has `stored` for its layout. A layout moves elements only, so numbers tell where each went."""
    sizes = [tensor.numel() for tensor in state.values()]
    flat = torch.cat([tensor.flatten() for tensor in state.values()])

    def unflattened(values: torch.Tensor) -> Tensors:
        parts = zip(state.items(), values.split(sizes), strict=True)
        return {name: part.view(tensor.shape) for (name, tensor), part in parts}

    for name, places in layout(unflattened(torch.arange(len(flat)))).items():
        flat[places.flatten()] = stored[name].flatten()
    return unflattened(flat)


@pytest.mark.parametrize("studio", ["Anima"], indirect=True)
def test_anima_with_its_conditioner_at_another_depth(studio: Studio) -> None:
    """Both models that the file holds are put in place, and both of the base come back."""
    session = studio.session
    studio.choose_none()
    default = studio.drawn()
    deeper = filled(studio.network("transformer", num_layers=5), 7).eval()
    conditioner = filled(studio.network("text_conditioner"), 8)
    bundled = {f"llm_adapter.{name}": tensor for name, tensor in conditioner.state_dict().items()}
    assert session.choose(studio.file("deeper", studio.original(deeper.state_dict()) | bundled)).changed
    drawn = studio.drawn()
    held: Any = session.pipeline
    held.update_components(transformer=deeper, text_conditioner=conditioner)
    assert torch.equal(studio.drawn(), drawn)
    assert session.choose(None).changed
    assert torch.equal(studio.drawn(), default)


def test_anima_of_40_blocks_over_28(tmp_path: Path) -> None:
    """Anima 2.9B over the base of Anima 1.0, at a small width, through diffusers' modular pipeline."""
    tiny = replace(PIPELINES["Anima"], make=lambda: PIPELINES["Anima"].make(num_layers=28))
    studio = Studio(tiny, tmp_path)
    base: Any = studio.session.transformer
    assert base.config.num_layers == 28
    deeper = filled(studio.network("transformer", num_layers=40), 7).eval()
    stored = from_recipes(made_of("anima_2_9b_bf16"), deeper.state_dict())
    default = studio.drawn()
    assert studio.session.choose(studio.file("deeper", stored)).changed
    drawn, held = studio.drawn(), studio.session.pipeline
    assert studio.session.transformer.config.num_layers == 40  # type: ignore[union-attr]
    held.update_components(transformer=deeper)  # type: ignore[union-attr]
    assert torch.equal(studio.drawn(), drawn)
    assert differ(drawn, default)
    gap = {name: tensor for name, tensor in stored.items() if "blocks.17." not in name}
    refused = studio.session.choose(studio.file("gap", gap)).refused
    assert isinstance(refused, errors.MissingTensors)
    assert all(name.startswith("transformer_blocks.17.") for name in refused.names)
    assert torch.equal(studio.drawn(), drawn)


def test_index_of_a_modular_pipeline(tmp_path: Path) -> None:
    """Components with and without a class of their own in it; what is nowhere or is no component, is none."""
    hint = {"type_hint": ["diffusers", "AutoencoderKLQwenImage"], "subfolder": "vae"}
    nowhere = {"type_hint": ["transformers", "Qwen3Model"], "subfolder": "", "pretrained_model_name_or_path": None}
    entries = {
        "_class_name": "AnimaModularPipeline", "transformer": ["diffusers", "CosmosTransformer3DModel", {}],
        "vae": [None, None, hint], "guider": [None, None, {}], "sizes": [1, 2], "x": [None, None], "y": [[], [], {}],
        "text_encoder": [None, None, nowhere],
    }  # fmt: skip
    (tmp_path / "modular_model_index.json").write_text(json.dumps(entries))
    base = read_base(tmp_path)
    assert base.pipeline == "AnimaModularPipeline"
    assert {name: component.cls for name, component in base.components.items()} == {
        "transformer": "CosmosTransformer3DModel", "vae": "AutoencoderKLQwenImage",
    }  # fmt: skip


@pytest.mark.parametrize("studio", [name for name in PIPELINES if name not in DUAL], indirect=True)
def test_no_second_slot(studio: Studio) -> None:
    transformer = studio.session.transformer
    with pytest.raises(errors.BaseModelError, match="has no second transformer"):
        studio.session.choose(Override("x", studio.folder / "x.safetensors"), SECONDARY)
    assert studio.session.transformer is transformer


def test_not_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """Every architecture has a pipeline here or a reason why not."""
    with capsys.disabled():
        for name, reason in NOT_COVERED.items():
            print(f"\nno pipeline of {name}: {reason}", end="")
    assert NOT_COVERED.keys() | {tiny.architecture for tiny in PIPELINES.values()} == BY_NAME.keys()
    assert NOT_COVERED.keys().isdisjoint(tiny.architecture for tiny in PIPELINES.values())


# Two files


@pytest.mark.parametrize("seeds", [(7, None), (None, 8), (7, 8), (8, 7), (7, 7)], ids=str)
@pytest.mark.parametrize("studio", DUAL, indirect=True)
def test_slots_of_two_transformers(studio: Studio, seeds: tuple[int | None, int | None]) -> None:
    """The slot decides where a file goes, whatever it is called; a slot without one keeps the base's own."""
    names = {7: "x_low_noise_unconditional", 8: "x_high_noise_conditional"}
    files = [studio.override(names[seed], seed) if seed else None for seed in seeds]
    expected = {component: studio.state(seed) for component, seed in zip(studio.tiny.slots, seeds, strict=True) if seed}
    with_base, chosen = studio.new_session(*files), studio.session
    studio.choose_none()
    default = studio.drawn(chosen)
    for kind, file in zip(SLOTS, files, strict=True):
        assert chosen.choose(file, kind) == Outcome(changed=file is not None)
    by_hand = studio.drawn(chosen, **expected)
    assert differ(by_hand, default)
    for session in (with_base, chosen):
        assert torch.equal(studio.drawn(session), by_hand)
        assert [slot.selected for slot in session.slots.values()] == [file.name if file else DEFAULT for file in files]


@pytest.mark.parametrize("studio", DUAL, indirect=True)
def test_every_choice_of_two_files_draws_another_picture(studio: Studio) -> None:
    studio.choose_none()
    a, b = studio.state(7), studio.state(8)
    primary, secondary = studio.tiny.slots
    choices = [{}, {primary: a}, {secondary: b}, {primary: a, secondary: b}, {primary: b, secondary: a}]
    assert differ(*(studio.drawn(**choice) for choice in choices))


@pytest.mark.parametrize("wrong", SLOTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("studio", DUAL, indirect=True)
def test_wrong_file_in_one_slot(studio: Studio, wrong: SlotKind) -> None:
    """It is refused there; the other slot has its file, with and without a base model to load."""
    other = SECONDARY if wrong is PRIMARY else PRIMARY
    flux = Override("flux", save(studio.folder / "flux.safetensors", tiny_flux_bfl()))
    fitting = studio.override("fitting", 7)
    session = studio.new_session(*(flux if kind is wrong else fitting for kind in SLOTS))
    assert_refused_in_one(session, wrong, flux)
    assert session.slots[other.name].selected == fitting.name
    held, before = both(session), studio.drawn(session)
    assert isinstance(session.choose(flux, wrong).refused, errors.WrongArchitecture)
    assert_refused_in_one(session, wrong, flux)
    assert both(session) == held
    assert torch.equal(studio.drawn(session), before)


def both(session: Session) -> list[Any]:
    """The two transformers of a pipeline."""
    assert session.base is not None
    return [getattr(session.pipeline, kind.component_in(session.base) or "") for kind in SLOTS]


def assert_refused_in_one(session: Session, wrong: SlotKind, file: Override) -> None:
    for kind in SLOTS:
        failed = session.slots[kind.name].failed
        assert (failed.override if failed else None) == (file if kind is wrong else None)
    assert session.slots[wrong.name].selected == DEFAULT


@pytest.mark.parametrize("memory", ["to spare", "short"])
@pytest.mark.parametrize("cancelled", SLOTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("studio", DUAL, indirect=True)
def test_cancel_restores_one_slot(
    studio: Studio, cancelled: SlotKind, memory: str, request: pytest.FixtureRequest
) -> None:
    """The slot has its old file again; the other's transformer was never touched."""
    session = studio.new_session(studio.override("a", 7), studio.override("b", 8))
    other = SLOTS.index(SECONDARY if cancelled is PRIMARY else PRIMARY)
    held, before = both(session), studio.drawn(session)
    if memory == "short":
        request.getfixturevalue("short_of_memory")
    studio.host.cancel_after = len(studio.host.reports) + 5
    with pytest.raises(errors.LoadCancelled):
        session.choose(studio.override("c", 9), cancelled)
    studio.host.cancel_after = None
    assert both(session)[other] is held[other]
    assert (both(session) == held) == (memory == "to spare")
    assert [slot.selected for slot in session.slots.values()] == ["a", "b"]
    assert torch.equal(studio.drawn(session), before)
