"""Offloading: diffusers' own hooks on every model, also after a swap, and the same pictures.

On the CPU, where every hook runs as it does with a GPU but for the device it moves to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled

from test_session import TestHost, drawn, override
from test_standalone import DEMO_BASE, ME, Studio
from tiny_models import make_demo
from transplant import offload, pipeline
from transplant.errors import LoadCancelled
from transplant.generate import GenerationCancelled, generate
from transplant.hosts.base import LoadSettings
from transplant.offload import Offload, refusal_on
from transplant.pipeline import Session
from transplant.plan import plan
from transplant.request import Request
from transplant.sdnq_bridge import Compute, Portable, portable_on
from transplant.slots import Override

CPU = torch.device("cpu")
MODES = ("model", "group")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_demo.make_demo(folder)
    return folder


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPLANT_OFFLOAD_ON_CPU", "1")


@pytest.fixture
def files(models: Path) -> list[Override]:
    return [override(models, name) for name in (make_demo.COMFYUI, make_demo.DIFFUSERS)]


def settings(mode: Any, keep: int = 0) -> LoadSettings:
    return replace(LoadSettings(CPU, torch.float32, use_mmap=True), keep=keep).offloaded(Offload(mode))


def loaded(models: Path, mode: str, keep: int = 0) -> tuple[Session, TestHost]:
    host = TestHost()
    host.settings = settings(mode, keep)
    session = Session(host)
    session.load_base(models / make_demo.BASE)
    return session, host


def hooked(session: Session, mode: str) -> list[str]:
    """Names of the components that are offloaded in this way; the others must have no hook at all."""
    assert session.pipeline is not None
    found: list[str] = []
    for name, part in session.pipeline.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        whole = isinstance(getattr(part, "_hf_hook", None), accelerate.hooks.CpuOffload)
        grouped = _is_group_offload_enabled(part)
        if {"model": whole, "group": grouped}[mode]:
            found.append(name)
        assert not (whole and grouped)
    return sorted(found)


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("mode", MODES)
def test_every_model_is_offloaded_also_after_swaps_and_draws_the_same(
    models: Path, files: list[Override], mode: str
) -> None:
    plain, _ = loaded(models, "none")
    session, _ = loaded(models, mode)
    assert hooked(plain, mode) == []
    for choice in (None, *files, None):
        session.choose(choice)
        plain.choose(choice)
        assert hooked(session, mode) == ["text_encoder", "transformer", "vae"]
        assert drawn(session) == drawn(plain)
    assert session.placement == f"float32 on cpu, offloaded ({mode})"


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_the_old_transformer_stays(models: Path, files: list[Override], mode: str) -> None:
    """diffusers' hooks know each other: one that is swapped out must not be held by its neighbours."""
    session, _ = loaded(models, mode)
    for choice in files:
        drawn(session)
        old = weakref.ref(session.transformer)
        session.choose(choice)
        gc.collect()
        assert old() is None


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("mode", MODES)
def test_old_goes_first_when_memory_is_short(
    models: Path, files: list[Override], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, host = loaded(models, mode)
    session.choose(files[0])
    before = drawn(session)
    monkeypatch.setattr(pipeline, "available_bytes", lambda _: -1)
    old, seen, build = weakref.ref(session.transformer), [], pipeline.build
    monkeypatch.setattr(pipeline, "build", lambda *args, **named: (seen.append(old()), build(*args, **named))[1])
    host.cancel_after = len(host.reports) + 20
    with pytest.raises(LoadCancelled):
        session.choose(files[1])
    assert seen[0] is None
    assert hooked(session, mode) == ["text_encoder", "transformer", "vae"]
    assert drawn(session) == before


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_comes_back_and_is_offloaded_again(models: Path, files: list[Override], mode: str) -> None:
    session, _ = loaded(models, mode, keep=2)
    own, before = session.transformer, drawn(session)
    session.choose(files[0])
    assert not hasattr(own, "_hf_hook") and not _is_group_offload_enabled(own)
    session.choose(None)
    assert session.transformer is own
    assert hooked(session, mode) == ["text_encoder", "transformer", "vae"]
    assert drawn(session) == before


@pytest.mark.usefixtures("acts")
def test_a_cancelled_picture_leaves_no_model_on_the_device(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call that ended early had brought there would take the place of the next one's."""
    session, _ = loaded(models, "model")
    assert session.pipeline is not None
    freed: list[object] = []
    monkeypatch.setattr(session.pipeline, "maybe_free_model_hooks", lambda: freed.append(1))
    with pytest.raises(GenerationCancelled):
        next(generate(session.pipeline, Request("x", steps=2, width=64, height=64), cancelled=lambda: True))
    assert freed == [1]


@pytest.mark.usefixtures("acts")
def test_weights_lie_in_ram_and_are_held_for_the_device_that_computes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for the CPU, where they may stay in the file; what the GPU's layers need is decided by the GPU."""
    cuda = torch.device("cuda")
    host = LoadSettings(cuda, torch.bfloat16, True, Compute(fp8_storage=True)).offloaded(Offload("group"))
    assert (host.device, host.rests_on, host.compute.runs_on) == (cuda, CPU, cuda)
    file, base = models / make_demo.DIFFUSERS, models / make_demo.BASE
    planned = plan(file, base, dtype=host.dtype, device=host.rests_on, compute=host.compute)
    assert planned.device == CPU and not planned.warnings
    assert any(target.dtype is torch.float8_e4m3fn for target in planned.targets)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert portable_on(host.compute, host.rests_on) == Portable(codes=False, scales=True)
    assert portable_on(Compute(), CPU) == Portable(codes=False, scales=False)


@pytest.mark.usefixtures("acts")
def test_a_pipeline_without_an_order_of_models_is_offloaded_by_groups(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As modular pipelines are: they have no `enable_model_cpu_offload`."""
    session, _ = loaded(models, "none")
    monkeypatch.setattr(type(session.pipeline), "model_cpu_offload_seq", None)
    before = drawn(session)
    offload.enable(session.pipeline, Offload("model"), CPU)
    assert hooked(session, "group") == ["text_encoder", "transformer", "vae"]
    assert drawn(session) == before


@pytest.mark.parametrize(
    ("device", "told"),
    [("cpu", "needs CUDA or XPU, the models run on cpu"), ("mps", "mps"), ("cuda:1", ""), ("xpu", "")],
)
def test_where_it_acts(device: str, told: str) -> None:
    reason = refusal_on(torch.device(device))
    assert told in reason and bool(told) == bool(reason)
    assert settings("none").rests_on == CPU


# In the WebUI


@pytest.fixture
def studio(models: Path, tmp_path: Path) -> Iterator[Studio]:
    studio = Studio(models, tmp_path, sd_model_checkpoint=DEMO_BASE)
    studio.settle()
    yield studio
    studio.close()


def test_without_a_gpu_it_says_so_and_changes_nothing(studio: Studio) -> None:
    note = studio.worker.notes["diffusers_offload_mode"]
    assert (note.text, note.enabled) == ("No effect: needs CUDA or XPU, the models run on cpu.", False)
    notice = studio.set(diffusers_offload_mode="model").notice
    assert notice is not None and notice.text == f"Offloading: {note.text}"
    assert studio.worker.holding is not None and studio.worker.holding.how == "float32 on cpu"
    assert studio.draw().status == "finished"


@pytest.mark.usefixtures("acts")
def test_the_option_is_honoured_at_load_and_swap(studio: Studio) -> None:
    worker = studio.worker
    assert not worker.notes or worker.notes["diffusers_offload_mode"].enabled
    for mode in MODES:
        studio.set(diffusers_offload_mode=mode)
        for file in ("demo-comfyui-bf16", "Default"):
            studio.set(sd_unet=file)
            assert worker.holding is not None and worker.holding.how == f"float32 on cpu, offloaded ({mode})"
            assert hooked(worker.models.session(), mode) == ["text_encoder", "transformer", "vae"]
    studio.set(diffusers_offload_mode="none")
    assert hooked(worker.models.session(), "model") == hooked(worker.models.session(), "group") == []
    assert worker.queue.notice(ME) is None
