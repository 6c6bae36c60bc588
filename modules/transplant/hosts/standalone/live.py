"""Parts of the page that follow the server: each is sent again when what it shows has changed, and only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block

SECONDS = 0.5


@dataclass(frozen=True)
class Follower:
    """One component and what it shows.

    Attributes:
        component: the component.
        read: what it should show, for an owner; compared with what was sent before.
        update: the Gradio update that shows that.
    """

    component: Block
    read: Callable[[str], Any]
    update: Callable[[Any], Any]


def follow(followers: Sequence[Follower]) -> None:
    """Keep components up to date, in every browser tab on its own."""
    if not followers:
        return
    seen = gr.State(None)
    timer = gr.Timer(SECONDS)  # one each: Gradio 6.31 forgets a timer's earlier ticks when a gr.render adds one

    def tick(sent: list[Any] | None, request: gr.Request) -> list[Any]:
        owner = owner_of(request)
        now = [follower.read(owner) for follower in followers]
        before = sent if sent is not None else [None] * len(now)
        updates = [
            follower.update(value) if sent is None or value != old else gr.skip()
            for follower, value, old in zip(followers, now, before, strict=True)
        ]
        return [now, *updates]

    timer.tick(
        tick, [seen], [seen, *(follower.component for follower in followers)],
        queue=False, show_progress="hidden", api_visibility="private",
    )  # fmt: skip


def owner_of(request: gr.Request) -> str:
    """The browser tab that a request comes from; a reloaded page is another one."""
    return request.session_hash or "somebody"
