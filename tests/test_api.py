"""The HTTP API against the real application, without a browser: SD.Next's routes, and what a file is."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from tiny_models import make_demo
from transplant.digest import Digests
from transplant.hosts.standalone.folders import Catalog
from transplant.hosts.standalone.images import PictureStore
from transplant.hosts.standalone.log_panel import LogLines
from transplant.hosts.standalone.server import LOCAL, Arguments, application
from transplant.hosts.standalone.settings import Settings
from transplant.hosts.standalone.starting import PROMPT
from transplant.hosts.standalone.worker import Worker
from transplant.options import OPTIONS, option

HOME = "http://127.0.0.1:7860"
SMALL = {"prompt": "a cat", "steps": 2, "width": 64, "height": 64, "seed": 3}


class Served:
    """The application over a worker on the demo."""

    def __init__(self, folder: Path, login: tuple[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"transplant_hub_cache": False}))
        self.pictures = PictureStore(folder / "outputs")
        make_demo.make_demo(folder / "demo")
        catalog = Catalog(folder / "models", folder / "demo")
        self.worker = Worker(Settings(folder / "config.json"), catalog, self.pictures, Digests(), "cpu")
        self.worker.start()
        arguments = Arguments(LOCAL, 7860, login, folder, folder / "models", "cpu", None, False)
        self.client = TestClient(application(arguments, self.worker, LogLines()), base_url=HOME)

    def get(self, path: str, status: int = 200, **query: str) -> Any:
        answer = self.client.get(path, params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def draw(self, status: int = 200, **changes: Any) -> Any:
        answer = self.post("/sdapi/v1/txt2img", {**SMALL, **changes}, status)
        return answer if status != 200 else pixels(answer)

    def close(self) -> None:
        assert self.worker.stop()
        self.pictures.close()


def pixels(answer: Any) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))).tobytes()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("api"))
    served.draw()  # waits for the start
    yield served
    served.close()


@pytest.fixture(autouse=True)
def as_it_was(served: Served) -> Iterator[None]:
    yield
    served.post("/sdapi/v1/options", {"sd_unet": "Default"})


def test_options_are_read_and_set_and_what_they_load_is_loaded(served: Served) -> None:
    values = served.get("/sdapi/v1/options")
    assert list(values) == [option.key for option in OPTIONS]
    own = served.draw()
    answer = served.post("/sdapi/v1/options", {"sd_unet": "demo-comfyui-bf16"})
    assert answer == {"updated": ["sd_unet"], "messages": []}
    assert served.worker.holding is not None
    assert served.worker.holding.overrides == {"sd_unet": "demo-comfyui-bf16"}
    assert served.draw() != own


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"sd_unet": "../../secret"}, "there is no '../../secret'"),
        ({"sd_unet": 3}, "must be a text"),
        ({"samples_save": "yes"}, "must be true or false"),
        ({"sdnq_svd_rank": 0}, "must be from 1 to 512"),
        ({"cuda_dtype": "fp64"}, "the choices are auto, bf16"),
        ({"no_such_option": 1}, "there is no such option"),
        ({"sdnq_modules_dtype_dict": "{bad"}, "is not valid JSON"),
        ({"sdnq_modules_dtype_dict": '{"int99": ["a"]}'}, "sdnq_modules_dtype_dict: SDNQ has no 'int99'; it has int"),
        ({"sdnq_modules_dtype_dict": '{"int8": ["(*"]}'}, "sdnq_modules_dtype_dict: '(*' is no pattern"),
        ({"sdnq_modules_dtype_dict": '{"int8": [1]}'}, "the modules of 'int8' must be a list of names"),
        ({"sdnq_modules_to_not_convert": "a, (*"}, "sdnq_modules_to_not_convert: '(*' is no pattern that SDNQ can"),
        ({"sdnq_modules_to_not_convert": ["a"]}, "must be a text, not list"),
        ({"sdnq_quantize_weights_group_size": 16.5}, "must be a whole number, not 16.5"),
        ({"sdnq_quantize_weights_group_size": -2}, "must be from -1 to 4096"),
        ({"quicksettings_list": ["nothing"]}, "there is no 'nothing'"),
    ],
)
def test_bad_options_are_refused_whole(served: Served, values: dict[str, Any], reason: str) -> None:
    before = served.get("/sdapi/v1/options")
    told = served.post("/sdapi/v1/options", {"samples_save": False, **values}, 422)
    assert reason in told["detail"]
    assert served.get("/sdapi/v1/options") == before


def test_modules_that_sdnq_can_read_are_taken(served: Served) -> None:
    values = {
        "sdnq_modules_dtype_dict": '{"uint4": ["layers.0.*"], "int8": "attention, w2"}',
        "sdnq_modules_to_not_convert": "layers.1.*, .layers.0",
        "sdnq_quantize_weights_group_size": 16.0,
    }
    assert served.post("/sdapi/v1/options", values)["updated"] == list(values)
    stored = served.get("/sdapi/v1/options")
    assert {key: stored[key] for key in values} == values
    served.post("/sdapi/v1/options", {key: option(key).default for key in values})


def test_what_has_no_effect_here_is_said(served: Served) -> None:
    fp8, offload = "FP8 storage: No effect: ", "Offloading: No effect: needs CUDA or XPU, the models run on cpu."
    (told,) = served.post("/sdapi/v1/options", {"fp8_storage": True})["messages"]
    assert told.startswith(fp8) and "cpu" in told.lower()
    assert served.post("/sdapi/v1/options", {"fp8_storage": False})["messages"] == []
    both = {"fp8_storage": True, "diffusers_offload_mode": "model", "sd_unet": "demo-comfyui-bf16"}
    (beside,) = served.post("/sdapi/v1/options", both)["messages"]
    assert told in beside and offload in beside
    served.post("/sdapi/v1/options", {key: option(key).default for key in both})
    served.post("/sdapi/v1/options", {"transplant_load_at_once": False})
    assert served.post("/sdapi/v1/options", {"fp8_storage": True})["messages"] == [told]
    served.post("/sdapi/v1/options", {"fp8_storage": False, "transplant_load_at_once": True})


def test_a_refusal_among_several_options_says_what_is_set(served: Served) -> None:
    values = {"unet_cache": 1, "sd_unet": "demo-flux"}
    told = served.post("/sdapi/v1/options", values, 422)["detail"]
    assert told.startswith("sd_unet: ") and told.endswith(" Applied: unet_cache.")
    assert served.get("/sdapi/v1/options")["unet_cache"] == 1
    served.post("/sdapi/v1/options", {"unet_cache": 0})
    told = served.post("/sdapi/v1/options", {"sd_unet": "demo-flux"}, 422)["detail"]
    assert not told.startswith("sd_unet: ") and "Applied" not in told


def test_a_file_that_does_not_fit_is_an_error_with_its_reason(served: Served) -> None:
    before = served.draw()
    told = served.post("/sdapi/v1/options", {"sd_unet": "demo-flux"}, 422)
    assert "FLUX.1" in told["detail"]
    assert served.get("/sdapi/v1/options")["sd_unet"] == "Default"
    assert served.draw() == before


def test_pictures_come_with_their_parameters(served: Served) -> None:
    answer = served.post("/sdapi/v1/txt2img", {**SMALL, "n_iter": 2})
    assert len(answer["images"]) == 2
    info = json.loads(answer["info"])
    assert info["seed"] == 3
    for number, (image, infotext) in enumerate(zip(answer["images"], info["infotexts"], strict=True)):
        picture = Image.open(io.BytesIO(base64.b64decode(image)))
        assert picture.info["parameters"] == infotext
        assert f"Seed: {3 + number}, " in infotext
    assert served.post("/sdapi/v1/txt2img", {**SMALL, "send_images": False})["images"] == []
    assert "multiple of 16" in served.draw(422, width=100)["detail"]
    assert "no sampler 'Euler a'" in served.draw(422, sampler_name="Euler a")["detail"]
    assert served.draw(sampler_name="Euler FlowMatch") == served.draw()


def test_fields_of_other_programs_are_taken_and_said_to_have_no_effect(served: Served) -> None:
    """SD.Next's and A1111's clients send them with every request; null and numbers as texts are theirs, too."""
    others = {"enable_hr": False, "hr_scale": 2.0, "alwayson_scripts": {}, "restore_faces": False, "styles": []}
    answer = served.post("/sdapi/v1/txt2img", {**SMALL, **others, "steps": "2", "cfg_scale": None, "batch_size": None})
    assert json.loads(answer["info"])["ignored"] == list(others)
    assert pixels(answer) == served.draw()
    assert not set(others) & set(answer["parameters"])
    assert "ignored" not in json.loads(served.post("/sdapi/v1/txt2img", SMALL)["info"])


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("cfgscale", 7, "cfgscale: there is no such field; did you mean cfg_scale?"),
        ("sampler", "Euler", "sampler: there is no such field; did you mean sampler_name?"),
        ("xyzzy", 1, "xyzzy: there is no such field; there are prompt, negative_prompt, "),
        ("cfg_scale", 99, "cfg_scale: must be from 0 to 30, not 99"),
        ("n_iter", 0, "n_iter: must be a whole number from 1 to 64, not 0"),
        ("batch_size", -1, "batch_size: must be a whole number from 1 to 64, not -1"),
        ("frames", 10**9, "frames: must be a whole number from 1 to 1000, not 1000000000"),
        ("steps", True, "steps: must be a number, not True."),
        ("cfg_scale", False, "cfg_scale: must be a number, not False."),
        ("prompt", "a \ud83d cat", r"prompt: \ud83d is half of a character: remove it, or write it whole"),
        ("negative_prompt", "\udfff", r"negative_prompt: \udfff is half of a character: "),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(served: Served, field: str, value: object, told: str) -> None:
    body = json.dumps({**SMALL, field: value}).encode()  # ASCII, with a lone surrogate as an escape
    answer = served.client.post("/sdapi/v1/txt2img", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(told)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("PUT", "/sdapi/v1/options", 405, "GET, POST"),
        ("GET", "/sdapi/v1/txt2img", 405, "POST"),
        ("DELETE", "/transplant/v1/plan", 405, "GET"),
        ("GET", "/sdapi/v1/img2img", 404, None),
        ("POST", "/transplant/v1/nothing", 404, None),
    ],
)
def test_wrong_methods_and_paths_are_told(
    served: Served, method: str, path: str, status: int, allowed: str | None
) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (status, allowed)
    assert path in answer.json()["detail"]


def test_override_settings_hold_for_their_request_alone(served: Served) -> None:
    own = served.draw()
    answer = served.post("/sdapi/v1/txt2img", {**SMALL, "override_settings": {"sd_unet": "demo-bundle-fp16"}})
    assert pixels(answer) != own
    assert "UNET: demo-bundle-fp16" in json.loads(answer["info"])["infotexts"][0]
    assert served.draw() == own
    for wrong, reason in (({"sd_unet": "gone"}, "there is no"), ({"sd_unet": "demo-flux"}, "FLUX.1")):
        assert reason in served.draw(422, override_settings=wrong)["detail"]
        assert served.draw() == own
    reason = served.draw(422, override_settings={"sd_unet_secondary": "demo-bundle-fp16"})["detail"]
    assert "sd_unet_secondary: " in reason
    assert "has no second transformer" in reason
    assert served.draw(override_settings={"sd_unet_secondary": "Default"}) == own


def test_models_files_and_samplers_are_listed(served: Served) -> None:
    (base,) = served.get("/sdapi/v1/sd-models")
    assert base["title"] == "transplant-demo-z-image"
    unets = {entry["name"]: entry for entry in served.get("/sdapi/v1/unets")}
    assert unets["demo-flux"]["architecture"] == "FLUX.1"
    assert unets["demo-comfyui-bf16"]["architecture"] == "Z-Image"
    assert {entry["kind"] for entry in unets.values()} == {"transformer", "all-in-one bundle"}
    assert [entry["name"] for entry in served.get("/sdapi/v1/samplers")][:2] == ["Default", "Euler FlowMatch"]

    folder = served.worker.catalog.models_dir / "UNET"
    folder.mkdir(parents=True)
    (folder / "broken.safetensors").write_bytes(b"<!DOCTYPE html>")
    served.post("/sdapi/v1/refresh-unets")
    broken = next(entry for entry in served.get("/sdapi/v1/unets") if entry["name"] == "broken")
    assert broken["kind"] is None and "web page" in broken["problem"]
    (folder / "broken.safetensors").unlink()
    served.post("/sdapi/v1/refresh-checkpoints")
    assert "broken" not in [entry["name"] for entry in served.get("/sdapi/v1/unets")]


def test_what_a_file_is_and_what_loading_it_would_do(served: Served) -> None:
    told = served.get("/transplant/v1/inspect", file="demo-bundle-fp16")
    assert (told["architecture"], told["prefix"]) == ("Z-Image", "model.diffusion_model.")
    planned = served.get("/transplant/v1/plan", file="demo-bundle-fp16")
    assert planned["verdict"] == "can be loaded" and planned["resident_bytes"] > 0
    refused = served.get("/transplant/v1/plan", file="demo-flux", base="transplant-demo-z-image")
    assert (refused["verdict"], refused["reason"]) == ("refused", "WrongArchitecture")
    assert "no 'gone'" in served.get("/transplant/v1/inspect", 404, file="gone")["detail"]
    assert "second" in served.get("/transplant/v1/plan", 422, file="demo-flux", slot="sd_unet_secondary")["detail"]
    assert "must be one of" in served.get("/transplant/v1/plan", 422, file="demo-flux", slot="x")["detail"]


def test_what_is_not_said_is_as_on_a_new_page(served: Served) -> None:
    answer = served.post("/sdapi/v1/txt2img", {"steps": 1})
    (infotext,) = json.loads(answer["info"])["infotexts"]
    assert infotext.startswith(PROMPT) and "Size: 128x128" in infotext
    assert (answer["parameters"]["prompt"], answer["parameters"]["width"]) == (PROMPT, 128)
    answer = served.post("/sdapi/v1/txt2img", {"steps": 1, "prompt": "", "height": 64})
    (infotext,) = json.loads(answer["info"])["infotexts"]
    assert infotext.startswith("\nSteps") and "Size: 128x64" in infotext


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("POST", "/sdapi/v1/txt2img", b'{"steps": 2,}', "The body is not valid JSON: "),
        ("POST", "/sdapi/v1/options", b"[1]", "The body must be an object, not [1]."),
        ("POST", "/sdapi/v1/options", b"", "The body is missing: send a JSON object."),
        ("POST", "/sdapi/v1/txt2img", b'{"steps": "many"}', "steps: must be a whole number, not 'many'."),
        ("POST", "/sdapi/v1/txt2img", b'{"prompt": 3}', "prompt: must be a text, not 3."),
        ("POST", "/sdapi/v1/txt2img", b'{"override_settings": 1}', "override_settings: must be an object, not 1."),
        ("GET", "/transplant/v1/plan", None, "file: is missing in the query."),
    ],
)
def test_requests_of_the_wrong_form_are_told_in_one_sentence(
    served: Served, method: str, path: str, body: bytes | None, told: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.client.request(method, path, content=body, headers=headers)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(told)


def test_the_log_has_each_refusal_once_and_no_long_prompt(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def told(word: str) -> list[str]:
        return [record.levelname for record in caplog.records if word in record.getMessage()]

    served.worker.models.session().slots = {
        name: replace(slot, failed=None) for name, slot in served.worker.models.session().slots.items()
    }
    with caplog.at_level("INFO", "transplant"):
        served.draw(422, override_settings={"sd_unet": "demo-flux"})
        assert told("demo-flux") == ["WARNING"]
        served.get("/transplant/v1/plan", 422, file="demo-comfyui-bf16", slot="sd_unet_secondary")
        assert "ERROR" not in [record.levelname for record in caplog.records]
        served.draw(prompt="word " * 500)
        (line,) = [record.getMessage() for record in caplog.records if "word word" in record.getMessage()]
        assert len(line) < 500 and "2500 characters" in line and "Seed: 3" in line


def test_progress_and_interrupt(served: Served) -> None:
    assert served.get("/sdapi/v1/progress")["state"]["job_count"] == 0
    answers: list[Any] = []
    long = threading.Thread(
        target=lambda: answers.append(served.draw(409, steps=200, n_iter=20, width=256, height=256))
    )
    long.start()
    while not (now := served.get("/sdapi/v1/progress"))["textinfo"].startswith("Picture"):
        assert long.is_alive()
    assert 0 <= now["progress"] < 1 and now["state"]["job"] == "20 pictures"
    served.post("/sdapi/v1/interrupt")
    state = served.get("/sdapi/v1/progress")["state"]
    assert state["interrupted"] or not state["job"]  # the job may be over before its answer is sent
    long.join(120)
    assert "cancelled" in answers[0]["detail"]


def test_many_clients_are_served_in_order_and_lose_nothing(served: Served) -> None:
    """Twenty at once, drawing with files of their own: each gets its own picture."""
    files = ("Default", "demo-comfyui-bf16", "demo-bundle-fp16", "demo-diffusers-fp32")
    alone = {file: served.draw(override_settings={"sd_unet": file}) for file in files}
    assert len(set(alone.values())) == len(files)
    drawn: list[tuple[str, bytes]] = []

    def client(number: int) -> None:
        file = files[number % len(files)]
        drawn.append((file, served.draw(override_settings={"sd_unet": file})))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(drawn) == 20
    assert all(alone[file] == picture for file, picture in drawn)
    assert served.get("/sdapi/v1/options")["sd_unet"] == "Default"


def test_the_api_describes_itself(served: Served) -> None:
    paths = served.get("/openapi.json")["paths"]
    assert "/sdapi/v1/txt2img" in paths and "/transplant/v1/plan" in paths
    text = served.client.get("/docs").text
    assert all(path in text for path in paths)
    assert "override_settings" in text and "http://" not in text and "https://" not in text


def test_the_login_of_the_page_is_the_login_of_the_api(tmp_path: Path) -> None:
    served = Served(tmp_path, ("me", "secret"))
    for path in ("/sdapi/v1/options", "/transplant/v1/inspect?file=x", "/openapi.json", "/docs"):
        assert served.client.get(path).status_code == 401
        assert served.client.get(path, auth=("me", "wrong")).status_code == 401
        assert served.client.get(path, headers={"Authorization": "Basic !"}).status_code == 401
        assert served.client.get(path, auth=("me", "secret")).status_code in (200, 404)
    assert served.client.put("/sdapi/v1/options").status_code == 401
    assert served.client.post("/sdapi/v1/options", json={}).status_code == 401
    served.client.post("/login", data={"username": "me", "password": "secret"})
    assert served.client.get("/sdapi/v1/options").status_code == 200  # with the page's cookie
    served.client.cookies.clear()
    assert served.client.get("/sdapi/v1/options").status_code == 401
    served.close()


def test_other_sites_are_kept_out(served: Served) -> None:
    headers = {"Origin": "https://elsewhere.example"}
    assert served.client.post("/sdapi/v1/options", json={}, headers=headers).status_code == 403
    assert served.client.get("/sdapi/v1/options", headers={"Host": "elsewhere.example"}).status_code == 403
