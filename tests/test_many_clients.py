"""Many clients at once, and many swaps: one job at a time, in order; no option lost, no model kept, nothing broken."""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from test_api import SMALL, Served, pixels
from test_standalone import Studio
from test_webui import serving
from tiny_models import make_demo, random_z_image, save, tiny_base, tiny_z_image_config, to_comfyui
from transplant.hosts.standalone import jobs
from transplant.memory import anonymous_bytes
from transplant.request import make_request

FILES = ("Default", "demo-comfyui-bf16", "demo-bundle-fp16", "demo-diffusers-fp32")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.draw()  # waits for the start
    yield served
    served.close()


class Watch:
    """Sees every job begin and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[int] = []
        self.most = self._now = 0
        real = jobs._outcome

        def watched(job: jobs.Job) -> Any:
            self._now += 1
            self.most = max(self.most, self._now)
            self.order.append(job.number)
            try:
                return real(job)
            finally:
                self._now -= 1

        monkeypatch.setattr(jobs, "_outcome", watched)


def test_twenty_clients_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and programs that choose, draw, inspect and set options, all at the same time.

    Jobs run one at a time and in the order in which they were asked for, every picture is that of its file, every
    option has the value that was set, and what is loaded at the end is what the options, the file on disk and the page
    say.
    """
    alone = {file: served.draw(override_settings={"sd_unet": file}) for file in FILES}
    worker, watch = served.worker, Watch(monkeypatch)
    wrong: list[str] = []
    options = {"sdnq_svd_rank": 48, "unet_cache": 3, "transplant_other_files": "show", "samples_save": False}

    def draw_by_api(number: int) -> None:
        file = FILES[number % len(FILES)]
        if served.draw(override_settings={"sd_unet": file}) != alone[file]:
            wrong.append(f"{file} drew another picture")

    def draw_by_page(number: int) -> None:
        job = worker.generate(f"page {number}", make_request(SMALL["prompt"], "", 2, 1, 64, 64, 3, 2))
        if not job.wait(300) or len(job.pictures) != 2:
            wrong.append(f"page {number} got {job.status}: {job.notice}")

    def choose(number: int) -> None:
        worker.set_options(f"page {number}", {"sd_unet": FILES[number % len(FILES)]})

    def inspect(number: int) -> None:
        if served.get("/transplant/v1/plan", file=FILES[1 + number % 3])["verdict"] != "can be loaded":
            wrong.append("another verdict")

    def set_option(number: int) -> None:
        key = list(options)[number % len(options)]
        served.post("/sdapi/v1/options", {key: options[key]})

    def look(_: int) -> None:
        for _ in range(20):
            served.get("/sdapi/v1/progress")
            served.get("/sdapi/v1/options")
            served.get("/sdapi/v1/unets")

    kinds = (draw_by_api, draw_by_page, choose, inspect, set_option)
    clients: list[tuple[Callable[[int], None], int]] = [(kind, number) for number in range(4) for kind in kinds]
    at_once(wrong, [*clients, (look, 0), (look, 1)])
    assert served.worker.queue.submit("last", "last", lambda _: None).wait(300)
    assert wrong == []
    assert watch.most == 1
    assert watch.order == sorted(watch.order) and len(watch.order) >= 16
    stored = json.loads(worker.settings.path.read_text())
    assert {key: stored[key] for key in options} == options
    assert worker.holding is not None
    assert worker.holding.overrides["sd_unet"] == worker.shown("sd_unet") == stored["sd_unet"]
    answer = served.post("/sdapi/v1/txt2img", SMALL)
    assert pixels(answer) == alone[stored["sd_unet"]]


def at_once(wrong: list[str], clients: list[tuple[Callable[[int], None], int]]) -> None:
    """Let all begin at the same moment, and wait for all; what one raises is noted."""
    gate = threading.Barrier(len(clients))

    def run(kind: Callable[[int], None], number: int) -> None:
        gate.wait(120)
        try:
            kind(number)
        except Exception as error:
            wrong.append(f"{kind.__name__} {number}: {error!r}")

    threads = [threading.Thread(target=run, args=client) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(400)
    assert not any(thread.is_alive() for thread in threads)


def test_a_hundred_swaps_take_no_memory(tmp_path: Path) -> None:
    """One transformer kept at each swap would be many times what is allowed; pictures are drawn in between."""
    models = tmp_path / "models"
    tiny_base(models / "Diffusers" / "wide", dim=192, n_layers=1)
    config = tiny_z_image_config(dim=192, n_layers=1)
    for name, seed in (("a", 1), ("b", 2)):
        state = random_z_image(config, seed, torch.float32).state_dict()
        save(models / "UNET" / f"{name}.safetensors", to_comfyui(state))
    studio = Studio(models, tmp_path / "data", sd_model_checkpoint="wide", transplant_mmap="off")
    studio.settle()
    size = sum(tensor.nbytes for tensor in state.values())
    taken: list[int] = []
    for swap in range(100):
        assert studio.set(sd_unet="ab"[swap % 2]).notice is None
        if swap % 20 == 19:
            studio.draw()
            gc.collect()
            taken.append(anonymous_bytes())
    studio.close()
    assert size > 5e6
    assert taken[-1] - taken[0] < 10 * size, [f"{bytes_ / 1e6:.0f} MB" for bytes_ in taken]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_server_that_is_killed_starts_with_the_old_options_or_the_new(tmp_path: Path) -> None:
    """SIGKILL while clients set options and choose files: the next start loads what its file says."""
    models = tmp_path / "models"
    make_demo.make_demo(models)
    answers: list[int] = []
    with serving(tmp_path / "data", models) as server:

        def client(number: int) -> None:
            while True:
                body = {"unet_cache": number % 17, "sd_unet": FILES[number % len(FILES)]}
                try:
                    answers.append(post(server.port, body))
                except (OSError, http.client.HTTPException):
                    return
                number += 1

        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        while len(answers) < 12:
            assert any(thread.is_alive() for thread in clients), server.output()
            time.sleep(0.01)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        for thread in clients:
            thread.join()
    assert set(answers) == {200}
    before = server.options()
    assert before["unet_cache"] in range(17) and before["sd_unet"] in FILES
    with serving(tmp_path / "data", models) as server:
        assert post(server.port, {"samples_save": False}) == 200
        assert server.options() == {**before, "samples_save": False}
        assert "broken" not in server.output() and "Traceback" not in server.output()


def post(port: int, body: Any) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/sdapi/v1/options", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()
