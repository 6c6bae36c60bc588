"""The page: quicksettings, status, messages and tabs."""

from __future__ import annotations

import threading
from typing import Any

import gradio as gr

from transplant.hosts.standalone import (
    compare_tab,
    generate_tab,
    inspect_tab,
    log_panel,
    page,
    quicksettings,
    settings_tab,
)
from transplant.hosts.standalone.live import Follower, follow
from transplant.hosts.standalone.log_panel import LogLines
from transplant.hosts.standalone.worker import Worker

HOUR = 3600

_DRAWING = threading.Lock()
"""One gr.render at a time: Gradio 6.31 counts the ids of components and events without a lock."""


def build(worker: Worker, lines: LogLines) -> gr.Blocks:
    """Build the page. It holds no state: every tab of every browser follows the worker."""
    with gr.Blocks(
        analytics_enabled=False, title="Transplant", fill_width=True, delete_cache=(HOUR, 24 * HOUR)
    ) as blocks:
        gr.HTML("<h1>Transplant</h1>", elem_classes="tp-spoken")
        with gr.Row(elem_id="quicksettings"):

            @gr.render(triggers=[blocks.load], show_progress="hidden")
            def draw_quicksettings() -> None:  # pyright: ignore[reportUnusedFunction] - gradio calls it
                with _DRAWING:
                    quicksettings.draw(worker)

        followers = _status_row(worker)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Generate", id="txt2img"):
                followers += generate_tab.draw(worker)
            with gr.Tab("Compare", id="compare"):
                followers += compare_tab.draw(worker)
            with gr.Tab("Inspect", id="inspect"):
                followers += inspect_tab.draw(worker)
            with gr.Tab("Settings", id="settings"):

                @gr.render(triggers=[blocks.load], show_progress="hidden")
                def draw_settings() -> None:  # pyright: ignore[reportUnusedFunction] - gradio calls it
                    with _DRAWING:
                        settings_tab.draw(worker)

            with gr.Tab("Log", id="log"):
                followers.append(log_panel.draw(lines))
        follow(followers)
    blocks.queue(default_concurrency_limit=None)
    return blocks


def theme() -> gr.themes.Base:
    """Compact, with the system's fonts, so that nothing is fetched from elsewhere, and with enough contrast."""
    return gr.themes.Default(
        spacing_size="sm", radius_size="sm", text_size="sm",
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"],
    ).set(
        body_text_color_subdued="*neutral_600", body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300",
        link_text_color="*primary_700", link_text_color_dark="*primary_500",
        button_primary_background_fill="*primary_700", button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800", button_primary_background_fill_hover_dark="*primary_800",
    )  # fmt: skip


def _status_row(worker: Worker) -> list[Follower]:
    """Messages, what is being done, and the buttons that end it."""
    message = gr.HTML(page.message(None), elem_id="transplant_message")
    shown = gr.State(0)
    with gr.Row(elem_id="transplant_status"):
        progress = gr.HTML(page.status(None, 0, None), elem_id="transplant_progress")
        small: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 90, "visible": False}
        cancel = gr.Button("Cancel", variant="stop", elem_id="transplant_cancel", **small)
        clear = gr.Button("Cancel waiting", elem_id="transplant_cancel_waiting", **small)

    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    cancel.click(worker.queue.cancel, [shown], **quiet)
    clear.click(worker.queue.cancel_waiting, **quiet)

    def number(_: str) -> int:
        job, _waiting = worker.queue.current()
        return job.number if job else 0

    return [
        Follower(message, lambda owner: worker.queue.notice(owner), page.message),
        Follower(progress, lambda owner: _status(worker, owner), lambda html: html),
        Follower(cancel, lambda _: worker.queue.current()[0] is not None, lambda busy: gr.update(visible=busy)),
        Follower(clear, lambda _: worker.queue.current()[1] > 0, lambda busy: gr.update(visible=busy)),
        Follower(shown, number, lambda now: now),
    ]


def _status(worker: Worker, owner: str) -> str:
    last = worker.queue.last_of(owner)
    return page.status(*worker.queue.current(), worker.holding, worker.not_loaded(), last)
