"""The standalone host without its page: options on disk, jobs in order, pictures, and what the server lets in."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import transplant
from tiny_models import make_demo, tiny_base
from transplant.digest import Digests
from transplant.errors import OptionError, TransplantError
from transplant.generate import Picture
from transplant.hosts.standalone import page
from transplant.hosts.standalone.folders import Catalog
from transplant.hosts.standalone.guard import is_local
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.jobs import EVERYONE, Job, JobQueue, Notice
from transplant.hosts.standalone.models import BASE
from transplant.hosts.standalone.server import ServeError, parse
from transplant.hosts.standalone.settings import Settings
from transplant.hosts.standalone.worker import Worker
from transplant.inventory import Entry
from transplant.options import option
from transplant.request import make_request

DEMO_BASE, UNET = "transplant-demo-z-image", "sd_unet"
ME = "me"


# Settings


def test_settings_survive_and_unknown_keys_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"from_the_future": [1, 2], "samples_save": false}')
    settings = Settings(file)
    assert settings.get("samples_save") is False
    assert settings.set_many({"cuda_dtype": "bf16", "samples_save": False}) == ["cuda_dtype"]
    assert json.loads(file.read_text()) == {"from_the_future": [1, 2], "samples_save": False, "cuda_dtype": "bf16"}
    assert Settings(file).get("cuda_dtype") == "bf16"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_broken_file_is_set_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "transplant"):
        settings = Settings(file)
    assert len(caplog.records) == 1
    assert (tmp_path / "config.json.broken").read_bytes() == content
    assert settings.get("cuda_dtype") == "auto"
    settings.set_many({"cuda_dtype": "fp32"})
    assert Settings(file).get("cuda_dtype") == "fp32"


def test_a_refused_value_has_its_default_and_stays_in_the_file_until_it_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"cuda_dtype": "fp64", "samples_save": "yes"}')
    settings = Settings(file)
    assert (settings.get("cuda_dtype"), settings.get("samples_save")) == ("auto", True)
    assert len(settings.warnings) == 2
    assert "fp64" in settings.warnings[0]
    settings.set_many({"samples_save": True})
    assert json.loads(file.read_text()) == {"cuda_dtype": "fp64", "samples_save": True}


def test_settings_are_set_all_or_none(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "config.json")
    with pytest.raises(OptionError, match="transplant_mmap"):
        settings.set_many({"cuda_dtype": "bf16", "transplant_mmap": "perhaps"})
    with pytest.raises(OptionError, match="no such option"):
        settings.set_many({"cuda_dtype": "bf16", "nonsense": 1})
    assert settings.get("cuda_dtype") == "auto"
    assert not settings.path.exists()


def test_settings_that_cannot_be_saved_are_not_changed(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    settings = Settings(blocked / "config.json")
    with pytest.raises(OSError):
        settings.set_many({"cuda_dtype": "bf16"})
    assert settings.get("cuda_dtype") == "auto"


def test_many_threads_lose_no_setting(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "config.json")
    values = {"cuda_dtype": "bf16", "transplant_mmap": "off", "samples_save": False, BASE: "x"}
    threads = [threading.Thread(target=settings.set_many, args=({key: value},)) for key, value in values.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = Settings(settings.path)
    assert {key: again.get(key) for key in values} == values


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_killed_while_saving_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """SIGKILL at any moment: the file holds one of the two values, and every other option."""
    file = tmp_path / "config.json"
    writer = (
        "import itertools, sys; from pathlib import Path; from transplant.hosts.standalone.settings import Settings\n"
        "settings = Settings(Path(sys.argv[1])); print('ready', flush=True)\n"
        "for value in itertools.cycle(('bf16', 'fp16')): settings.set_many({'cuda_dtype': value})"
    )
    file.write_text(json.dumps({"from_the_future": "x" * 100_000, "cuda_dtype": "bf16"}))
    environment = {**os.environ, "PYTHONPATH": str(Path(transplant.__file__).parents[1])}
    command = [sys.executable, "-c", writer, str(file)]
    for moment in range(12):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.003 * moment)
        process.kill()
        process.wait()
        process.stdout.close()
        settings = Settings(file)
        assert settings.warnings == []
        assert settings.get("cuda_dtype") in ("bf16", "fp16")
        assert json.loads(file.read_text())["from_the_future"] == "x" * 100_000


# Jobs


@pytest.fixture
def queue() -> Iterator[JobQueue]:
    queue = JobQueue(lambda: None)
    queue.start()
    yield queue
    assert queue.stop()


def test_jobs_run_in_order_one_at_a_time(queue: JobQueue) -> None:
    ran: list[str] = []
    jobs = [queue.submit(ME, name, lambda job: ran.append(job.title)) for name in "abcdef"]
    assert all(job.wait(5) for job in jobs)
    assert ran == list("abcdef")
    assert {job.status for job in jobs} == {"finished"}


def test_running_and_waiting_jobs_can_be_cancelled(queue: JobQueue) -> None:
    from transplant.errors import LoadCancelled

    def until_cancelled(job: Job) -> None:
        while not job.cancelled:
            time.sleep(0.005)
        raise LoadCancelled("it was cancelled")

    running = queue.submit(ME, "running", until_cancelled, {UNET: "a"})
    waiting = queue.submit(ME, "waiting", lambda _: None, {UNET: "b"})
    last = queue.submit("somebody", "last", lambda _: None)
    while queue.current()[0] is not running:
        time.sleep(0.005)
    assert queue.current()[1] == 2
    assert queue.pending(UNET) == "b"
    queue.cancel(waiting.number)
    assert waiting.wait(0)
    assert queue.pending(UNET) == "a"
    queue.cancel(running.number)
    assert last.wait(5)
    assert [job.status for job in (running, waiting, last)] == ["cancelled", "cancelled", "finished"]
    assert queue.pending(UNET) is None


def test_errors_become_one_sentence_and_the_next_job_runs(queue: JobQueue, caplog: pytest.LogCaptureFixture) -> None:
    def raising(error: Exception) -> Job:
        def work(_: Job) -> None:
            raise error

        return queue.submit(ME, "Loading x", work)

    for nbytes in (1 << 50, 1 << 62):  # more than there is, and more than can be counted
        with pytest.raises(RuntimeError) as short:
            torch.empty(nbytes, dtype=torch.float64)
        job = raising(short.value)
        assert job.wait(5) and job.notice is not None
        assert "There was not enough memory: choose a smaller file" in job.notice.text
    ours, memory, foreign = (
        raising(error) for error in (TransplantError("the file is bad"), MemoryError(), RuntimeError("boom\nmore"))
    )
    after = queue.submit(ME, "after", lambda _: Notice("info", "done"))
    assert after.wait(5)
    told = [job.notice.text if job.notice else "" for job in (ours, memory, foreign, after)]
    assert told[0] == "The file is bad."
    assert "not enough memory" in told[1]
    assert told[2] == "Loading x failed. RuntimeError: boom. The log has the details."
    assert told[3] == "done"
    assert "Traceback" in caplog.text


def test_notices_are_for_who_asked_or_for_everyone(queue: JobQueue) -> None:
    queue.tell(EVERYONE, Notice("warning", "start"))
    queue.tell("a", Notice("error", "for a"))
    assert [queue.notice(owner) for owner in "ab"] == [Notice("error", "for a"), Notice("warning", "start")]
    assert queue.submit("a", "Loading x", lambda _: None).wait(5)
    assert queue.notice("b") is None  # what was wrong at the start is over


# Pictures


def test_pictures_are_numbered_and_carry_their_parameters(tmp_path: Path) -> None:
    store = PictureStore(tmp_path / "outputs")
    image = Image.new("RGB", (8, 8))
    text = "a prompt – ü\nSteps: 8"
    paths = [store.save(Picture(image, 7), text, True) for _ in range(2)]
    assert [path.name for path in paths] == ["00000-7.png", "00001-7.png"]
    assert paths[0].parent.parent == tmp_path / "outputs"
    assert Image.open(paths[1]).info["parameters"] == text
    unsaved = store.save(Picture(image, 7), text, False)
    assert unsaved.is_relative_to(store.temporary)
    store.close()
    assert not unsaved.exists()
    assert paths[0].exists()


def test_a_picture_that_cannot_be_saved_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    store = PictureStore(tmp_path / "outputs")
    with pytest.raises(TransplantError, match="cannot be saved"):
        store.save(Picture(Image.new("RGB", (8, 8)), 7), "", True)
    store.close()


# The worker, on the real demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    make_demo.make_demo(out)
    tiny_base(out / "Diffusers" / "wider", dim=72)
    return out


class Studio:
    """A worker on a models folder, with what the tests ask it."""

    def __init__(self, models: Path, data: Path, **settings: object) -> None:
        data.mkdir(parents=True, exist_ok=True)
        config = data / "config.json"
        if not config.exists():
            config.write_text(json.dumps({"transplant_hub_cache": False, **settings}))
        self.pictures = PictureStore(data / "outputs")
        if not (models / "Diffusers").exists():
            make_demo.make_demo(data / "demo")
        catalog = Catalog(models, data / "demo")
        self.worker = Worker(Settings(config), catalog, self.pictures, Digests(), "cpu")
        self.worker.start()

    def settle(self) -> Job:
        """Wait until nothing is to be done any more; the newest job."""
        while (job := self.worker.queue.latest(ME)) is None or not job.is_over or self.worker.queue.current()[0]:
            time.sleep(0.01)
        return job

    def set(self, **values: object) -> Job:
        self.worker.set_options(ME, values)
        return self.settle()

    def draw(self, seed: int = 1, batch: int = 1) -> Job:
        job = self.worker.generate(ME, make_request("a cat", "", 2, 1, 64, 64, seed, batch))
        assert job.wait(60)
        return job

    @property
    def saved(self) -> tuple[str, str]:
        values = json.loads(self.worker.settings.path.read_text())
        return values.get(BASE, ""), values.get(UNET, "Default")

    @property
    def held(self) -> tuple[str, str] | None:
        holding = self.worker.holding
        return (holding.base, holding.overrides[UNET]) if holding else None

    def close(self) -> None:
        assert self.worker.stop()
        self.pictures.close()


@pytest.fixture
def studio(demo: Path, tmp_path: Path) -> Iterator[Studio]:
    studio = Studio(demo, tmp_path, **{BASE: DEMO_BASE})
    studio.settle()
    yield studio
    studio.close()


def pixels(job: Job) -> bytes:
    return Image.open(job.pictures[0].path).tobytes()


def test_what_is_loaded_is_what_the_options_the_file_and_the_metadata_say(studio: Studio) -> None:
    assert studio.held == studio.saved == (DEMO_BASE, "Default")
    own = studio.draw()
    assert "Model: transplant-demo-z-image" in own.pictures[0].infotext
    assert "UNET" not in own.pictures[0].infotext

    assert studio.set(sd_unet="demo-comfyui-bf16").notice is None
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    other = studio.draw()
    digest = Digests().short(studio.worker.catalog.overrides["demo-comfyui-bf16"])
    assert other.pictures[0].infotext.endswith(f"UNET: demo-comfyui-bf16, UNET hash: {digest}")
    assert pixels(own) != pixels(other)

    refused = studio.set(sd_unet="demo-flux").notice
    assert refused is not None and refused.level == "error"
    assert "FLUX.1" in refused.text and "demo-comfyui-bf16 stays loaded" in refused.text
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    assert pixels(studio.draw()) == pixels(other)

    studio.set(sd_unet="Default")
    assert pixels(studio.draw()) == pixels(own)


def test_a_new_base_keeps_the_override_only_where_it_fits(studio: Studio) -> None:
    studio.set(sd_unet="demo-bundle-fp16")
    notice = studio.set(sd_model_checkpoint="wider").notice
    assert notice is not None and "another size" in notice.text and "own transformer is loaded" in notice.text
    assert studio.held == studio.saved == ("wider", "Default")
    studio.set(sd_model_checkpoint=DEMO_BASE, sd_unet="demo-bundle-fp16")
    assert studio.held == studio.saved == (DEMO_BASE, "demo-bundle-fp16")


def test_choices_while_a_job_runs_wait_and_show_what_is_to_come(studio: Studio) -> None:
    job = studio.worker.generate(ME, make_request("", "", 60, 1, 128, 128, 1, 4))
    studio.worker.set_options(ME, {UNET: "demo-comfyui-bf16"})
    studio.worker.set_options(ME, {UNET: "demo-diffusers-fp32"})
    studio.worker.set_options(ME, {UNET: "demo-diffusers-fp32"})
    assert studio.worker.shown(UNET) == "demo-diffusers-fp32"
    assert studio.worker.settings.get(UNET) == "Default"
    while job.text[:4] not in ("Step", "Pict"):
        time.sleep(0.01)
    assert studio.worker.queue.current()[1] == 2
    studio.worker.queue.cancel(job.number)
    studio.settle()
    assert job.status == "cancelled"
    assert studio.held == (DEMO_BASE, "demo-diffusers-fp32")


def test_a_load_that_is_cancelled_leaves_a_model_that_draws(studio: Studio) -> None:
    before = pixels(studio.draw())
    for values in ({UNET: "demo-comfyui-bf16"}, {BASE: "wider"}):
        studio.worker.set_options(ME, values)
        job = studio.worker.queue.latest(ME)
        assert job is not None
        while job.status == "waiting":
            pass
        studio.worker.queue.cancel(job.number)
        studio.settle()
        assert job.status == "cancelled"
        assert studio.held == studio.saved == (DEMO_BASE, "Default")
        assert pixels(studio.draw()) == before


def test_settings_that_need_it_load_the_model_again(studio: Studio) -> None:
    studio.set(sd_unet="demo-comfyui-bf16")
    studio.set(cuda_dtype="bf16")
    assert studio.worker.holding is not None and studio.worker.holding.how == "bfloat16 on cpu"
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    assert studio.draw().status == "finished"
    studio.set(cuda_dtype="fp32", sd_unet="Default")
    assert studio.worker.holding.how == "float32 on cpu"
    assert studio.held == studio.saved == (DEMO_BASE, "Default")


def test_bad_values_change_nothing_and_say_why(studio: Studio) -> None:
    with pytest.raises(OptionError, match=r"there is no .*secret"):
        studio.worker.set_options(ME, {"cuda_dtype": "bf16", UNET: "../../secret"})
    assert studio.worker.settings.get("cuda_dtype") == "auto"
    for wrong in ({"width": 100}, {"steps": 0}, {"seed": -2}, {"seed": None}, {"batch": 1.5}, {"guidance": None}):
        values = {"steps": 8, "guidance": 1, "width": 64, "height": 64, "seed": 1, "batch": 1, **wrong}
        with pytest.raises(OptionError, match=r"must be"):
            make_request("", "", **values)  # pyright: ignore


def test_pictures_that_are_not_saved_are_gone_at_exit(studio: Studio) -> None:
    studio.set(samples_save=False)
    path = studio.draw().pictures[0].path
    assert path.exists() and not path.is_relative_to(studio.pictures.outputs)
    studio.pictures.close()
    assert not path.exists()


def test_a_restart_loads_what_was_chosen(demo: Path, tmp_path: Path) -> None:
    first = Studio(demo, tmp_path, **{BASE: DEMO_BASE, UNET: "demo-comfyui-bf16"})
    first.settle()
    picture = pixels(first.draw())
    first.close()
    second = Studio(demo, tmp_path)
    second.settle()
    assert second.held == second.saved == (DEMO_BASE, "demo-comfyui-bf16")
    assert pixels(second.draw()) == picture
    second.close()


def test_a_missing_override_is_named_kept_and_loaded_when_it_is_back(demo: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_demo.make_demo(models)
    file = models / make_demo.COMFYUI
    away = file.rename(tmp_path / "away")
    studio = Studio(models, tmp_path / "data", **{BASE: DEMO_BASE, UNET: "demo-comfyui-bf16"})
    notice = studio.settle().notice
    assert notice is not None and notice.level == "warning"
    assert "demo-comfyui-bf16 is missing" in notice.text
    assert studio.held == (DEMO_BASE, "Default")
    assert studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    shown = studio.worker.shown(UNET)
    assert page.choices(studio.worker.dynamic()["overrides"], shown)[0] == (
        "demo-comfyui-bf16 (missing)", "demo-comfyui-bf16",
    )  # fmt: skip
    assert "UNET" not in studio.draw().pictures[0].infotext
    away.rename(file)
    studio.worker.refresh(ME)
    studio.settle()
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    studio.close()


def test_a_missing_base_is_named_and_never_replaced(demo: Path, tmp_path: Path) -> None:
    studio = Studio(demo, tmp_path, **{BASE: "gone", UNET: "demo-comfyui-bf16"})
    notice = studio.settle().notice
    assert notice is not None and "gone is missing" in notice.text
    assert studio.held is None
    assert studio.saved == ("gone", "demo-comfyui-bf16")
    job = studio.draw()
    assert job.status == "failed" and job.notice is not None and "gone is missing" in job.notice.text
    studio.set(sd_model_checkpoint=DEMO_BASE)
    assert studio.held == studio.saved == (DEMO_BASE, "demo-comfyui-bf16")
    studio.close()


def test_nothing_is_chosen_by_itself_where_there_are_several(demo: Path, tmp_path: Path) -> None:
    studio = Studio(demo, tmp_path)
    studio.settle()
    assert studio.held is None
    job = studio.draw()
    assert job.notice is not None and "choose one first" in job.notice.text
    studio.close()


def test_an_own_base_model_takes_the_place_of_the_demo(tmp_path: Path) -> None:
    models, data = tmp_path / "models", tmp_path / "data"
    first = Studio(models, data)
    first.settle()
    first.set(sd_unet="demo-comfyui-bf16")
    assert first.saved == (DEMO_BASE, "demo-comfyui-bf16")
    first.close()
    tiny_base(models / "Diffusers" / "mine")
    second = Studio(models, data)
    assert second.settle().notice is None
    assert second.held == second.saved == ("mine", "Default")
    second.close()


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        (
            "mark",
            ["Default", "None (same as Default)", "a", "b (missing)", "flux (FLUX.1)", "lora (LoRA)", "new", "odd"],
        ),
        ("hide", ["Default", "None (same as Default)", "a", "b (missing)", "new", "odd"]),
        ("show", ["Default", "None (same as Default)", "a", "b (missing)", "flux", "lora", "new", "odd"]),
    ],
)
def test_files_for_other_base_models_are_marked_or_hidden(others: str, shown: list[str]) -> None:
    """What was not looked at yet, or is unknown, may be for it; what is chosen is never left out."""
    names = ["Default", "None", "a", "flux", "lora", "new", "odd"]
    seen = {"a": Entry("transformer", "Z-Image"), "flux": Entry("transformer", "FLUX.1"), "lora": Entry("LoRA")}
    seen["odd"] = Entry("unknown")
    entries = page.file_choices(names, "b", seen, "Z-Image", others)
    assert sorted(label for label, _ in entries) == sorted(shown)
    labels = [label for label, _ in page.file_choices(names, "flux", seen, "Z-Image", others)]
    assert any(label.startswith("flux") for label in labels)
    seen["flux"] = Entry("transformer", "FLUX.1", or_else="Z-Image")
    assert ("flux", "flux") in page.file_choices(names, "a", seen, "Z-Image", "mark")
    unloaded = [label for label, _ in page.file_choices(names, "a", seen, "", "mark")]
    assert "flux" in unloaded and "lora (LoRA)" in unloaded


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("sdnq_modules_dtype_dict", '{"int99": ["a"]}', "SDNQ has no 'int99'"),
        ("sdnq_modules_dtype_dict", "{bad", "is not valid JSON"),
        ("sdnq_modules_to_not_convert", "a, (*", "is no pattern that SDNQ can read"),
        ("sdnq_quantize_weights_mode", "int99", "there is no 'int99'"),
    ],
)
def test_names_in_the_file_that_sdnq_does_not_know_are_told_at_the_start(
    key: str, value: str, reason: str, demo: Path, tmp_path: Path
) -> None:
    """The option has its default, and the model loads."""
    mode = {"sdnq_quantize_weights_mode": "int8"}
    studio = Studio(demo, tmp_path, **{BASE: DEMO_BASE, **mode, key: value})
    notice = studio.settle().notice
    assert notice is not None and notice.level == "warning"
    default = option(key).default
    assert notice.text.startswith(f"config.json: {key}: ") and reason in notice.text
    assert f"{default!r} is used instead" in notice.text
    assert studio.held == (DEMO_BASE, "Default") and studio.worker.settings.get(key) == default
    assert json.loads(studio.worker.settings.path.read_text())[key] == value
    studio.close()


# Page and server


def test_what_the_page_shows_is_escaped() -> None:
    assert "<img" not in page.message(Notice("error", "<img src=x>"))
    job = Job(1, ME, "<b>", lambda _: None, {}, text='<b>"', fraction=0.5)
    assert "<b>" not in page.status(job, 2, None) and "50 %" in page.status(job, 2, None)


def test_a_job_that_is_to_end_says_so_and_what_came_of_it_is_told() -> None:
    job = Job(7, ME, "Comparing 1 file", lambda _: None, {}, text="Picture 1 of 2: a, step 1 of 8", fraction=0.1)
    assert "ancel" not in page.status(job, 0, None)
    job.cancel()
    told = page.status(job, 0, None)
    assert "Cancelling after this step · Picture 1 of 2" in told and 'data-told="Cancelling Comparing 1 file"' in told
    job.end("cancelled", None)
    told = page.status(None, 0, None, (), job)
    assert 'data-job="7" data-told="Comparing 1 file: cancelled. Nothing is loaded."' in told
    assert ">Nothing is loaded.<" in told


def test_apply_says_what_follows() -> None:
    told = page.applied([option("cuda_dtype"), option("transplant_mmap"), option("quicksettings_list")]).text
    assert told.startswith("Saved: Compute dtype, Map files into memory, Quicksettings.")
    assert told.count("loaded again") == 1 and told.endswith("Reload the page to see it.")


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("//localhost:7860", True), ("//127.0.0.1", True), ("//[::1]:7860", True), ("http://LOCALHOST:1", True),
        ("//evil.example:7860", False), ("http://localhost.evil.example", False), ("null", False), ("//", False),
        ("//[", False), ("//127.0.0.1@evil.example", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize("argv", [["--listen"], ["--auth", "me"], ["--auth", ":x"], ["--port", "70000"]])
def test_contradicting_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(ServeError):
        parse(argv)


def test_arguments_have_defaults_of_this_machine_alone(tmp_path: Path) -> None:
    arguments = parse(["--models-dir", str(tmp_path), "--auth", "me:pass:word"])
    assert (arguments.address, arguments.port, arguments.login) == ("127.0.0.1", 7860, ("me", "pass:word"))
    assert arguments.models_dir == Path(os.path.realpath(tmp_path))
