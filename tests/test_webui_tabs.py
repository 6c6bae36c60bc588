"""The second slot and the tabs beside Generate, in a real browser. Screenshots go to tests/artefacts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from kitchen import int8
from test_webui import (  # noqa: F401 - `browser` is a fixture
    PATIENCE,
    Server,
    browser,
    choose,
    chosen,
    fill,
    idle,
    message,
    needs_browser,
    opened,
    pick,
    reload,
    screenshot,
    serving,
    settings_tab,
)
from tiny_models import make_demo, random_z_image, save, tiny_base, tiny_z_image_config, to_comfyui
from tiny_pipelines import filled, network, wan

pytestmark = needs_browser


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan with two transformers, a Z-Image with one, and files for each."""
    folder = tmp_path_factory.mktemp("models")
    wan().save_pretrained(str(folder / "Diffusers" / "two"))
    tiny_base(folder / "Diffusers" / "one")
    for name, seed in (("a", 11), ("b", 12)):
        save(folder / "UNET" / f"{name}.safetensors", filled(network("WanTransformer3DModel"), seed).state_dict())
    make_demo.make_demo(folder / "demo")
    (folder / "demo" / make_demo.COMFYUI).rename(folder / "UNET" / "z.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    (data / "config.json").write_text(json.dumps({"sd_model_checkpoint": "two", "transplant_hub_cache": False}))
    with serving(data, models) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:  # noqa: F811
    yield from opened(browser, server)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def row(page: Page) -> list[str]:
    """The options at the top that can be seen, in order."""
    ids = page.locator("#quicksettings [id^=setting_]:visible").evaluate_all("elements => elements.map(e => e.id)")
    return [name.removeprefix("setting_") for name in ids]


def test_the_second_slot_is_there_while_the_base_model_has_two(page: Page, server: Server) -> None:
    idle(page, "two with its own transformers")
    expect(page.locator("#setting_sd_unet_secondary")).to_be_visible()
    assert row(page) == ["sd_model_checkpoint", "sd_unet", "sd_unet_secondary"]
    choose(page, "sd_unet_secondary", "b")
    idle(page, "two with the transformers its own and b")
    chosen(page, "sd_unet", "Default")
    screenshot(page, "two-slots")
    choose(page, "sd_unet_secondary", "z (Z-Image)")
    message(page, "b stays loaded")
    chosen(page, "sd_unet_secondary", "b")
    choose(page, "sd_model_checkpoint", "one")
    idle(page, "one with its own transformer,")
    message(page, "b is not used: one has no second transformer")
    expect(page.locator("#setting_sd_unet_secondary")).to_be_hidden()
    assert row(page) == ["sd_model_checkpoint", "sd_unet"]
    assert server.options()["sd_unet_secondary"] == "Default"
    choose(page, "sd_model_checkpoint", "two")
    idle(page, "two with its own transformers")
    expect(page.locator("#setting_sd_unet_secondary")).to_be_visible()


@pytest.mark.parametrize(
    ("listed", "above", "below"),
    [
        (["sd_unet", "sd_model_checkpoint"], ["sd_unet", "sd_unet_secondary", "sd_model_checkpoint"], []),
        (["sd_unet_secondary", "sd_unet"], ["sd_unet_secondary", "sd_unet"], ["sd_model_checkpoint"]),
        (["sd_unet_secondary"], ["sd_unet_secondary"], ["sd_model_checkpoint", "sd_unet"]),
        (["cuda_dtype"], ["cuda_dtype"], ["sd_model_checkpoint", "sd_unet", "sd_unet_secondary"]),
    ],
)
def test_the_row_has_the_order_of_its_list(
    browser: Browser,  # noqa: F811
    server: Server,
    listed: list[str],
    above: list[str],
    below: list[str],
) -> None:
    """The second slot follows the first; what is in the row is not on the settings page, and the other way round."""
    page = browser.new_page()
    page.request.post(f"{server.url}/sdapi/v1/options", data={"quicksettings_list": listed})
    page.goto(server.url)
    expect(page.locator("#quicksettings [id^=setting_]:visible")).to_have_count(len(above))
    assert row(page) == above
    settings_tab(page)
    for key in ("sd_model_checkpoint", "sd_unet", "sd_unet_secondary"):
        assert page.locator(f"#setting_{key}:visible").count() == 1 or key not in [*above, *below]
    page.request.post(f"{server.url}/sdapi/v1/options", data={"quicksettings_list": ["sd_model_checkpoint", "sd_unet"]})
    page.close()


def test_a_video_is_drawn_and_its_parameters_are_read_back(page: Page, server: Server) -> None:
    idle(page, "two with its own transformers")
    choose(page, "sd_unet", "a")
    idle(page, "the transformers a and its own")
    for field, value in (("width", 64), ("height", 64), ("steps", 3), ("seed", 7), ("frames", 5)):
        fill(page, f"txt2img_{field}", value)
    page.locator("#txt2img_prompt textarea").fill("a red circle, moving")
    pick(page, "#txt2img_sampling", "UniPC FlowMatch")
    page.locator("#txt2img_generate").click()
    expect(page.locator("#txt2img_info textarea")).to_have_value(
        re.compile("Sampler: UniPC FlowMatch, Frames: 5, Size: 64x64, Seed: 7")
    )
    picture = server.pictures()[-1]
    assert getattr(Image.open(picture), "n_frames", 1) == 5
    screenshot(page, "video")

    choose(page, "sd_unet", "Default")
    idle(page, "two with its own transformers")
    reload(page)
    idle(page, "two with its own transformers")
    page.get_by_role("button", name="Read parameters from a picture").click()
    page.locator("#txt2img_recall input[type=file]").set_input_files(picture)
    idle(page, "the transformers a and its own")
    expect(page.locator("#txt2img_prompt textarea")).to_have_value("a red circle, moving")
    expect(page.locator("#txt2img_seed input")).to_have_value("7")
    expect(page.locator("#txt2img_sampling input")).to_have_value("UniPC FlowMatch")
    page.locator("#txt2img_generate").click()
    expect(page.locator("#txt2img_info textarea")).to_have_value(re.compile("Seed: 7"))
    again = server.pictures()[-1]
    assert again != picture
    assert Image.open(again).tobytes() == Image.open(picture).tobytes()
    fill(page, "txt2img_seed", -1)
    page.get_by_role("button", name="Use the shown picture's seed").click()
    expect(page.locator("#txt2img_seed input")).to_have_value("7")


def test_files_are_compared_in_one_grid(page: Page, server: Server) -> None:
    tab(page, "Compare")
    for name in ("a", "z (Z-Image)"):
        pick(page, "#compare_files", name)
        page.keyboard.press("Escape")
    page.locator("#compare_prompts textarea").fill("a red circle\na blue square")
    page.locator("#compare_seeds input, #compare_seeds textarea").fill("1, 2")
    for field, value in (("width", 64), ("height", 64), ("steps", 2)):
        fill(page, f"compare_{field}", value)
    page.locator("#compare_start").click()
    message(page, "Not for the loaded base model, and not drawn: z (Z-Image).")
    message(page, "Refused: z; the grid has the reasons.")
    expect(page.locator("#compare_result img")).to_be_visible()
    expect(page.locator("#compare_info textarea")).to_have_value(re.compile('Compared: "Default, a, z"'))
    screenshot(page, "compare")


def test_a_file_is_inspected_and_loaded_from_there(page: Page, server: Server, models: Path) -> None:
    layout = to_comfyui(random_z_image(tiny_z_image_config(), 5, torch.float32).state_dict())
    fused = [name for name in layout if name.endswith(".attention.qkv.weight")]
    for name in fused:
        layout |= int8(layout.pop(name), convrot=16).stored(name.removesuffix(".weight"))
    save(models / "UNET" / "q.safetensors", layout)
    choose(page, "sd_model_checkpoint", "one")
    idle(page, "one with its own transformer")
    page.locator("#refresh_sd_unet").click()
    tab(page, "Inspect")
    page.locator("#inspect_use").click()
    message(page, "No file is chosen")
    pick(page, "#inspect_file", "q")
    report = page.locator("#inspect_report")
    expect(report).to_contain_text("Fits one: can be loaded.")
    for text in ("Z-Image", "int8_tensorwise", "FP8 storage", "free now", "Formats by block and layer"):
        expect(report).to_contain_text(text)
    assert report.locator("td[title*='attention.qkv, block 0: int8_tensorwise']").count() >= 1
    screenshot(page, "inspect")
    pick(page, "#inspect_file", "a (Wan)")
    expect(report.locator(".tp-error")).to_contain_text("Wan")
    pick(page, "#inspect_file", "q")
    page.locator("#inspect_use").click()
    idle(page, "the transformer q")


def test_a_file_is_found_by_a_part_of_its_name_and_loaded_as_secondary(page: Page, server: Server) -> None:
    choose(page, "sd_model_checkpoint", "two")
    idle(page, "two with its own transformers")
    tab(page, "Inspect")
    page.locator("#inspect_slot").get_by_label("UNET model secondary").check()
    field = page.locator("#inspect_file input")
    field.click()
    expect(page.get_by_role("option", name="z (Z-Image)", exact=True)).to_be_visible()
    page.keyboard.type("b")
    expect(page.get_by_role("option", name="z (Z-Image)", exact=True)).to_be_hidden()
    page.get_by_role("option", name="b", exact=True).click()
    page.locator("#inspect_use").click()
    idle(page, "two with the transformers its own and b")
    chosen(page, "sd_unet_secondary", "b")
    chosen(page, "sd_unet", "Default")


def test_settings_are_searched_marked_and_restored(page: Page, server: Server) -> None:
    settings_tab(page)
    page.locator("#settings_search textarea, #settings_search input").fill("svd")
    expect(page.locator("#setting_sdnq_use_svd")).to_be_visible()
    expect(page.locator("#setting_cuda_dtype")).to_be_hidden()
    page.locator("#settings_search textarea, #settings_search input").fill("")
    expect(page.locator("#setting_cuda_dtype")).to_be_visible()
    fill(page, "setting_sdnq_svd_rank", 48)
    page.locator("#settings_submit").click()
    expect(page.locator("#settings_message")).to_contain_text("Saved: SVD rank.")
    expect(page.locator("#setting_sdnq_svd_rank")).to_contain_text("SVD rank ●")
    screenshot(page, "settings-changed")
    page.locator("#settings_restore").click()
    expect(page.locator("#setting_sdnq_svd_rank input")).to_have_value("32")
    assert server.options()["sdnq_svd_rank"] == 48
    page.locator("#settings_submit").click()
    expect(page.locator("#settings_message")).to_contain_text(re.compile(r"Saved: .*, SVD rank\."))
    expect(page.locator("#setting_sdnq_svd_rank")).not_to_contain_text("●")
    assert server.options()["sdnq_svd_rank"] == 32
    for folder, told in (("/no/such/folder", "Nothing was saved."), ("", "Nothing was changed.")):
        page.locator("#setting_unet_dir input, #setting_unet_dir textarea").fill(folder)
        page.locator("#settings_submit").click()
        expect(page.locator("#settings_message")).to_contain_text(told)
    assert not server.options().get("unet_dir")


def test_a_comparison_says_that_it_is_to_end_and_keeps_what_is_done(page: Page, server: Server) -> None:
    tab(page, "Compare")
    page.locator("#compare_seeds input, #compare_seeds textarea").fill("1, 2, 3, 4, 5, 6, 7, 8")
    for field, value in (("width", 256), ("height", 256), ("steps", 60)):
        fill(page, f"compare_{field}", value)
    page.locator("#compare_start").click()
    progress = page.locator("#transplant_progress")
    expect(progress).to_contain_text(re.compile(r"Picture [2-7] of 8"))
    page.locator("#transplant_cancel").click()
    message(page, "Comparing 1 file: cancelled.")
    expect(page.locator("#compare_result img")).to_be_visible()
    assert "1 file compared" in server.output() and "1 files" not in server.output()


def test_keys_begin_and_end_a_picture(page: Page, server: Server) -> None:
    fill(page, "txt2img_steps", 100)
    fill(page, "txt2img_batch_count", 16)
    prompt = page.locator("#txt2img_prompt textarea")
    prompt.fill("drawn with the keyboard")
    prompt.press("Control+Enter")
    expect(page.locator("#transplant_progress")).to_contain_text("Picture 1 of 16")
    expect(page.locator("#transplant_progress")).to_contain_text(re.compile(r"(steps/s|s/step).* left"))
    prompt.press("Escape")
    message(page, "cancelled")
    assert prompt.input_value() == "drawn with the keyboard"


def test_screen_readers_hear_what_is_done_and_find_a_name_for_everything(page: Page, server: Server) -> None:
    """A region that was there before tells each job once; no control lacks a name; every tab is reached by keys."""
    told = page.locator("#transplant_told[role=status]")
    expect(told).to_have_text(re.compile("with (its own|the) transformer"))
    page.evaluate(
        "() => { window.heard = []; new MutationObserver(() => heard.push(transplant_told.textContent))"
        ".observe(transplant_told, {childList: true}) }"
    )
    fill(page, "txt2img_steps", 150)
    page.locator("#txt2img_generate").click()
    page.wait_for_function("heard.length > 0", timeout=PATIENCE)
    expect(page.locator("#txt2img_gallery img").first).to_be_visible(timeout=60_000)
    expect(told).to_have_text(re.compile("with (its own|the) transformer"))
    heard = page.evaluate("heard")
    assert heard[0] == "Picture" and heard.count("Picture") == 1
    fill(page, "txt2img_steps", 1)
    for _ in range(2):  # over before the page asks again, and told in the same words both times
        before = page.evaluate("heard.length")
        page.locator("#txt2img_generate").click()
        page.wait_for_function(
            f"heard.slice({before}).some((text) => text.startsWith('Picture: finished. '))", timeout=PATIENCE
        )
    assert page.locator("h1").inner_text() == "Transplant"
    page.get_by_role("tab", name="Generate", exact=True).focus()
    for name in ("Compare", "Inspect", "Settings", "Log"):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("tab", name=name, exact=True)).to_have_attribute("aria-selected", "true")
        assert page.evaluate(NAMELESS) == [], name


NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, select, [role=tab], [role=listbox]")]
    .filter((one) => one.offsetParent !== null && !one.closest("[aria-hidden=true]"))
    .filter((one) => !(one.ariaLabel || one.title || one.labels?.[0]?.innerText || one.innerText ||
                       one.getAttribute("aria-labelledby")))
    .map((one) => one.outerHTML.slice(0, 200))"""
"""Controls that can be seen and that no assistive program has a name for."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_tab_without_scrolling_sideways(
    browser: Browser,  # noqa: F811
    server: Server,
    scheme: str,
) -> None:
    """Nothing is wider than the window, and every setting has the width to be read."""
    for page in opened(browser, server, color_scheme=scheme):
        page.set_viewport_size({"width": 390, "height": 844})
        for name in ("Generate", "Compare", "Inspect", "Settings", "Log"):
            reach(page, name)
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
            screenshot(page, f"phone-{scheme}-{name.lower()}")
        reach(page, "Settings")
        widths = page.locator(".tp-section [id^=setting_]").evaluate_all("all => all.map((one) => one.offsetWidth)")
        assert min(width for width in widths if width) > 250


def reach(page: Page, name: str) -> None:
    """Open a tab, also where it is in the menu of those that have no room."""
    one = page.get_by_role("tab", name=name, exact=True)
    if not one.is_visible():
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown").get_by_text(name, exact=True).click()
    else:
        one.click()
