"""One pipeline and the file in its slot: swaps, refusals, cancels and failures lose nothing."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from test_formats_blocks import mxfp8
from tiny_models import make_demo, random_z_image, save, tiny_base, tiny_flux_bfl, tiny_z_image_config, to_comfyui
from transplant import errors, pipeline
from transplant.generate import GenerationCancelled, generate
from transplant.hosts.base import LoadSettings
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.request import Request, infotext
from transplant.slots import DEFAULT, Override


class TestHost:
    """A host whose cancel button can be pressed after a number of reports."""

    __test__ = False

    def __init__(self) -> None:
        self.settings = LoadSettings(torch.device("cpu"), torch.float32, use_mmap=True)
        self.reports: list[tuple[str, float | None]] = []
        self.cancel_after: int | None = None

    def load_settings(self) -> LoadSettings:
        return self.settings

    def report(self, text: str, fraction: float | None, total_bytes: int | None = None) -> None:
        self.reports.append((text, fraction))

    def cancelled(self) -> bool:
        return self.cancel_after is not None and len(self.reports) >= self.cancel_after


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo: a base model, three files for it, one that is not."""
    folder = tmp_path_factory.mktemp("models")
    make_demo.make_demo(folder)
    return folder


@pytest.fixture
def host() -> TestHost:
    return TestHost()


@pytest.fixture
def session(models: Path, host: TestHost) -> Session:
    session = Session(host)
    session.load_base(models / make_demo.BASE)
    return session


def override(models: Path, name: str) -> Override:
    return Override(Path(name).stem, models / name)


@pytest.fixture
def a(models: Path) -> Override:
    return override(models, make_demo.COMFYUI)


@pytest.fixture
def b(models: Path) -> Override:
    return override(models, make_demo.DIFFUSERS)


@pytest.fixture
def flux(models: Path) -> Override:
    return override(models, make_demo.FLUX)


REQUEST = Request("a red circle", steps=2, width=64, height=64, seed=4)


def drawn(session: Session) -> bytes:
    """The pixels of one small picture."""
    assert session.pipeline is not None
    return next(generate(session.pipeline, REQUEST)).image.tobytes()


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every load finds no memory left, so the old model must go first."""
    monkeypatch.setattr(pipeline, "available_bytes", lambda device: -1)
    yield


def test_choosing_swaps_only_the_transformer(session: Session, a: Override) -> None:
    """Text encoder and VAE are the very same objects before and after."""
    assert session.pipeline is not None
    before = drawn(session)
    others = {name: session.pipeline.components[name] for name in ("text_encoder", "vae", "tokenizer", "scheduler")}
    assert session.choose(a) == pipeline.Outcome(changed=True)
    assert all(session.pipeline.components[name] is part for name, part in others.items())
    assert session.primary.selected == a.name
    with_a = drawn(session)
    assert with_a != before
    assert session.choose(None).changed
    assert session.primary.selected == DEFAULT
    assert drawn(session) == before


@pytest.mark.parametrize("gap", ["tokenizer", "scheduler", "vae"])
def test_a_base_model_without_a_folder_is_refused(tmp_path: Path, models: Path, host: TestHost, gap: str) -> None:
    """transformers makes an empty tokenizer of a missing folder, which reads every prompt as the same one."""
    base = tmp_path / "base"
    shutil.copytree(models / make_demo.BASE, base)
    shutil.rmtree(base / gap)
    with pytest.raises(errors.BaseModelError, match=f"has no folder {gap}.*download the base model again"):
        Session(host).load_base(base)


def test_base_with_a_file_never_reads_its_own_transformer(
    models: Path, a: Override, host: TestHost, tmp_path: Path
) -> None:
    """The base's transformer weights may even be absent."""
    base = tmp_path / "base"
    shutil.copytree(models / make_demo.BASE, base)
    for weights in (base / "transformer").glob("*.safetensors"):
        weights.unlink()
    session = Session(host)
    session.load_base(base, a)
    reference = Session(TestHost())
    reference.load_base(models / make_demo.BASE)
    reference.choose(a)
    assert drawn(session) == drawn(reference)
    with pytest.raises(errors.BaseModelError, match="transformer cannot be loaded"):
        session.choose(None)
    assert session.primary.selected == a.name
    assert drawn(session) == drawn(reference)


def test_same_choice_is_no_load(session: Session, a: Override, host: TestHost) -> None:
    """Redundant loads never happen; a file that changed on disk is another choice."""
    session.choose(a)
    transformer, reports = session.transformer, len(host.reports)
    assert session.choose(a) == pipeline.Outcome(changed=False)
    assert session.transformer is transformer
    assert len(host.reports) == reports


def test_changed_file_is_loaded_again(session: Session, tmp_path: Path) -> None:
    """The same name with other contents is not what is loaded."""
    config = dict(session.transformer.config)  # type: ignore[union-attr]
    file = tmp_path / "x.safetensors"
    save(file, to_comfyui(random_z_image(config, 1, torch.float32).state_dict()))
    chosen = Override("x", file)
    session.choose(chosen)
    first = drawn(session)
    replacement = to_comfyui(random_z_image(config, 2, torch.float32).state_dict())
    save(tmp_path / "new.safetensors", replacement).replace(file)
    assert session.choose(chosen).changed
    assert drawn(session) != first


def test_refused_file_leaves_everything(session: Session, a: Override, flux: Override) -> None:
    """Nothing is released; the option goes back to what is loaded; a picture is as before."""
    session.choose(a)
    transformer, before = session.transformer, drawn(session)
    outcome = session.choose(flux)
    assert isinstance(outcome.refused, errors.WrongArchitecture)
    assert not outcome.changed
    assert session.transformer is transformer
    assert session.primary.selected == a.name
    assert session.primary.failed is not None and session.primary.failed.override == flux
    assert drawn(session) == before


def test_refused_with_the_base_falls_back_to_its_own(models: Path, flux: Override, host: TestHost) -> None:
    """A persisted wrong file never costs the base model."""
    session = Session(host)
    outcome = session.load_base(models / make_demo.BASE, flux)
    assert isinstance(outcome.refused, errors.WrongArchitecture)
    assert session.primary.selected == DEFAULT
    assert drawn(session)


def test_repaired_file_is_tried_again(session: Session, a: Override, tmp_path: Path) -> None:
    """B01: a refusal holds for one state of the file; the repaired one loads."""
    file = tmp_path / "x.safetensors"
    whole = a.path.read_bytes()
    file.write_bytes(whole[:-10])
    chosen = Override("x", file)
    first = session.choose(chosen).refused
    assert isinstance(first, errors.TruncatedFile)
    assert session.choose(chosen).refused is first  # remembered, the file is not opened again
    file.write_bytes(whole)
    assert session.choose(chosen) == pipeline.Outcome(changed=True)
    assert session.primary.failed is None


def test_missing_file_is_refused(session: Session, tmp_path: Path) -> None:
    """A file that is gone is one sentence, and it is tried again once it is back."""
    outcome = session.choose(Override("gone", tmp_path / "gone.safetensors"))
    assert isinstance(outcome.refused, errors.UnreadableFile)
    assert "gone.safetensors" in str(outcome.refused)


def test_ten_swaps_do_not_grow(session: Session, a: Override, b: Override) -> None:
    """Live parameter bytes stay, and nothing of A is alive after B."""

    def live_bytes() -> int:
        gc.collect()
        return sum(o.nbytes for o in gc.get_objects() if type(o) is torch.nn.Parameter)

    session.choose(a)
    session.choose(b)
    baseline = live_bytes()
    for _ in range(10):
        session.choose(a)
        assert session.transformer is not None
        of_a = [weakref.ref(parameter) for parameter in session.transformer.parameters()]
        of_a.append(weakref.ref(session.transformer))
        drawn(session)
        session.choose(b)
        gc.collect()
        assert not any(reference() is not None for reference in of_a)
    assert live_bytes() == baseline


def test_what_was_swapped_out_comes_back_at_once(
    session: Session, a: Override, b: Override, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very model: nothing is read. Beyond the limit, after another setting or another base it is loaded."""
    host.settings = replace(host.settings, keep=2)
    own = session.transformer
    held = {None: own}
    for choice in (a, b):
        session.choose(choice)
        held[choice] = session.transformer
    before = drawn(session)
    monkeypatch.setattr(pipeline, "build", lambda *_, **__: pytest.fail("a file was read"))
    monkeypatch.setattr(pipeline, "load_component", lambda *_: pytest.fail("the base model was read"))
    for choice in (a, None, b, a, None, b):
        assert session.choose(choice).changed
        assert session.transformer is held[choice]
        assert session.primary.selected == (choice.name if choice else DEFAULT)
    assert drawn(session) == before
    monkeypatch.undo()
    host.settings = replace(host.settings, keep=1)
    session.choose(a)
    session.choose(None)  # keeps a, lets go of its own older one
    session.choose(b)
    assert session.transformer is not held[b]
    host.settings = replace(host.settings, dtype=torch.bfloat16)
    session.choose(None)
    assert session.transformer is not own and next(session.transformer.parameters()).dtype is torch.bfloat16
    kept = weakref.ref(held.pop(a))
    held.clear()
    session.unload()
    gc.collect()
    assert kept() is None


def test_what_is_kept_goes_first_when_memory_is_short(
    session: Session, a: Override, b: Override, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.settings = replace(host.settings, keep=4)
    kept = weakref.ref(session.transformer)
    session.choose(a)
    gc.collect()
    assert kept() is not None
    available = iter((-1, 1 << 40, 1 << 40))
    monkeypatch.setattr(pipeline, "available_bytes", lambda _: next(available))
    loaded = weakref.ref(session.transformer)
    session.choose(b)
    gc.collect()
    assert kept() is None  # was let go of
    assert loaded() is not None  # is kept: it did not have to go


def test_cancelled_swap_keeps_the_old(session: Session, a: Override, b: Override, host: TestHost) -> None:
    """With memory to spare the old transformer is untouched."""
    session.choose(a)
    transformer, before = session.transformer, drawn(session)
    host.cancel_after = len(host.reports) + 20
    with pytest.raises(errors.LoadCancelled):
        session.choose(b)
    host.cancel_after = None
    assert session.transformer is transformer
    assert session.primary.selected == a.name
    assert drawn(session) == before


@pytest.mark.usefixtures("short_of_memory")
def test_cancelled_swap_restores_the_old_when_it_had_to_go(
    session: Session, a: Override, b: Override, host: TestHost
) -> None:
    """Short of memory the old transformer is freed first, and loaded again after the cancel."""
    session.choose(a)
    before = drawn(session)
    old = weakref.ref(session.transformer)
    host.cancel_after = len(host.reports) + 20
    with pytest.raises(errors.LoadCancelled):
        session.choose(b)
    host.cancel_after = None
    assert old() is None
    assert session.primary.selected == a.name
    assert drawn(session) == before


@pytest.mark.usefixtures("short_of_memory")
def test_old_goes_first_when_memory_is_short(session: Session, a: Override, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the time the new transformer is built nothing of the old is alive."""
    assert session.transformer is not None
    old = weakref.ref(session.transformer)
    seen: list[object] = []
    real_build = pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args, **kwargs: (seen.append(old()), real_build(*args, **kwargs))[1])
    session.choose(a)
    assert seen == [None]


@pytest.mark.parametrize("fault", [MemoryError("no"), RuntimeError("CUDA out of memory"), OSError(5, "I/O error")])
@pytest.mark.usefixtures("short_of_memory")
def test_failed_build_restores_the_old(
    fault: Exception, session: Session, a: Override, b: Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a load fails with after the plan, the user has a model that draws."""
    session.choose(a)
    before = drawn(session)
    real_build = pipeline.build
    failures = [fault]

    def build_once_broken(*args: object, **kwargs: object) -> object:
        if failures:
            raise failures.pop()
        return real_build(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline, "build", build_once_broken)
    with pytest.raises(type(fault)):
        session.choose(b)
    assert session.primary.selected == a.name
    assert drawn(session) == before


def test_change_of_base(session: Session, models: Path, a: Override, tmp_path: Path) -> None:
    """Another base of the same network keeps a file that fits; a file of another size is refused there."""
    session.choose(a)
    same = tmp_path / "same"
    shutil.copytree(models / make_demo.BASE, same)
    assert session.load_base(same, a).refused is None
    assert session.primary.selected == a.name
    wider = tiny_base(tmp_path / "wider", dim=72)
    outcome = session.load_base(wider, a)
    assert isinstance(outcome.refused, errors.ShapeMismatch)
    assert session.primary.selected == DEFAULT
    assert drawn(session)


@pytest.mark.parametrize("damage", ["absent", "no text encoder", "broken weights", "pickle weights"])
def test_bad_base_keeps_the_old_pipeline(
    damage: str, session: Session, models: Path, a: Override, tmp_path: Path
) -> None:
    """A base model that cannot be loaded costs nothing; pickles are never opened."""
    session.choose(a)
    before = drawn(session)
    broken = tmp_path / "broken"
    if damage != "absent":
        shutil.copytree(models / make_demo.BASE, broken)
    if damage == "no text encoder":
        shutil.rmtree(broken / "text_encoder")
    for weights in list((broken / "text_encoder").glob("*.safetensors")):
        if damage == "broken weights":
            weights.write_bytes(weights.read_bytes()[:100])
        elif damage == "pickle weights":
            torch.save({}, weights.with_name("pytorch_model.bin"))
            weights.unlink()
    with pytest.raises(errors.BaseModelError):
        session.load_base(broken)
    assert session.primary.selected == a.name
    assert drawn(session) == before


@pytest.mark.usefixtures("short_of_memory")
def test_bad_base_brings_the_old_pipeline_back(session: Session, models: Path, a: Override, tmp_path: Path) -> None:
    """Short of memory the old pipeline goes first, and comes back with its file when the new one fails."""
    session.choose(a)
    before = drawn(session)
    broken = tmp_path / "broken"
    shutil.copytree(models / make_demo.BASE, broken)
    shutil.rmtree(broken / "vae")
    with pytest.raises(errors.BaseModelError):
        session.load_base(broken)
    assert session.base is not None and session.base.path == models / make_demo.BASE
    assert session.primary.selected == a.name
    assert drawn(session) == before


def test_cancelled_base(session: Session, models: Path, a: Override, host: TestHost, tmp_path: Path) -> None:
    """A change of base model that is cancelled leaves the old one."""
    session.choose(a)
    before = drawn(session)
    host.cancel_after = len(host.reports) + 1
    with pytest.raises(errors.LoadCancelled):
        session.load_base(tiny_base(tmp_path / "other"))
    host.cancel_after = None
    assert drawn(session) == before


def test_choose_without_a_base(host: TestHost, a: Override) -> None:
    """There is nothing to put a transformer into."""
    with pytest.raises(errors.BaseModelError, match="choose one first"):
        Session(host).choose(a)


def test_wrong_file_is_refused_for_the_base_that_was_chosen(session: Session, tmp_path: Path) -> None:
    """A refusal over one base says nothing about another."""
    config = tiny_z_image_config(dim=72)
    file = save(tmp_path / "wide.safetensors", to_comfyui(random_z_image(config, 1, torch.bfloat16).state_dict()))
    wide = Override("wide", file)
    assert isinstance(session.choose(wide).refused, errors.ShapeMismatch)
    assert session.load_base(tiny_base(tmp_path / "wider", dim=72), wide).refused is None
    assert session.primary.selected == "wide"


def test_generation_can_be_stopped_and_repeated(session: Session) -> None:
    """A stopped generation keeps what was finished; each picture repeats alone from its own seed."""
    assert session.pipeline is not None
    steps: list[tuple[int, int, int]] = []
    batch = Request("x", steps=3, width=64, height=64, seed=10, batch=3)
    pictures = []
    with pytest.raises(GenerationCancelled):
        for picture in generate(
            session.pipeline, batch, on_step=lambda *step: steps.append(step), cancelled=lambda: len(steps) == 5
        ):
            pictures.append(picture)
    assert [picture.seed for picture in pictures] == [10]
    assert steps == [(0, 1, 3), (0, 2, 3), (0, 3, 3), (1, 1, 3), (1, 2, 3)]
    alone = next(generate(session.pipeline, Request("x", steps=3, width=64, height=64, seed=10)))
    assert alone.image.tobytes() == pictures[0].image.tobytes()


def test_guidance_uses_the_negative_prompt(session: Session) -> None:
    """With guidance the negative prompt changes the picture."""
    assert session.pipeline is not None
    pictures = [
        next(generate(session.pipeline, Request("x", text, 2, 4.0, 64, 64))).image.tobytes() for text in ("", "blue")
    ]
    assert pictures[0] != pictures[1]


def test_infotext_is_what_others_read() -> None:
    """The form of A1111 and SD.Next: prompt lines, then one line of entries; commas in names are quoted."""
    text = infotext(
        Request("a cat", "a dog", 8, 1.5, 512, 256), 7, {"Model": "base", "UNET": "x, y", "UNET hash": "0a"}
    )
    assert text == (
        "a cat\nNegative prompt: a dog\n"
        'Steps: 8, Size: 512x256, Seed: 7, CFG scale: 1.5, Model: base, UNET: "x, y", UNET hash: 0a'
    )


def test_flux_file_is_small() -> None:
    """The wrong file of these tests is a real FLUX.1 layout, not an empty one."""
    assert any(name.startswith("double_blocks.") for name in tiny_flux_bfl())


def with_bad_scale(models: Path, folder: Path) -> Override:
    """A file that only its block scales betray, which no plan reads: its plan is accepted."""
    state = dict(load_file(models / make_demo.COMFYUI))
    written = mxfp8(state.pop("layers.0.feed_forward.w1.weight").float())
    written.tensors["weight_scale"].view(torch.uint8)[0] = 0xFF  # e8m0 has one NaN
    file = save(folder / "nan.safetensors", state | written.stored("layers.0.feed_forward.w1"))
    assert plan(file, models / make_demo.BASE)
    return Override("nan", file)


def test_file_that_is_refused_while_loading_costs_nothing(
    session: Session, models: Path, a: Override, host: TestHost, tmp_path: Path
) -> None:
    """NaN in block scales shows only when they are read: the old transformer stays, a base comes with its own."""
    bad = with_bad_scale(models, tmp_path)
    session.choose(a)
    before = drawn(session)
    outcome = session.choose(bad)
    assert isinstance(outcome.refused, errors.UnsupportedQuantization)
    assert session.primary.selected == a.name
    assert session.primary.failed is not None and session.primary.failed.override == bad
    assert drawn(session) == before
    fresh = Session(host)
    outcome = fresh.load_base(models / make_demo.BASE, bad)
    assert isinstance(outcome.refused, errors.UnsupportedQuantization)
    assert fresh.primary.selected == DEFAULT
    assert drawn(fresh)


@pytest.mark.usefixtures("short_of_memory")
def test_file_that_is_refused_while_loading_brings_the_old_back(
    session: Session, models: Path, a: Override, tmp_path: Path
) -> None:
    """The same where the old transformer had to go first."""
    session.choose(a)
    before = drawn(session)
    assert session.choose(with_bad_scale(models, tmp_path)).refused is not None
    assert session.primary.selected == a.name
    assert drawn(session) == before
