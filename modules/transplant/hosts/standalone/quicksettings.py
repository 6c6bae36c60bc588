"""The row of options at the top of the page."""

from __future__ import annotations

from typing import Any, cast

import gradio as gr

from transplant.errors import TransplantError
from transplant.hosts.standalone import controls
from transplant.hosts.standalone.live import Follower, follow, owner_of
from transplant.hosts.standalone.models import NOTED
from transplant.hosts.standalone.worker import Worker
from transplant.options import OPTIONS, Option
from transplant.slots import PRIMARY, SECONDARY


def listed(worker: Worker) -> list[Option]:
    """The options in the row, in the order of `quicksettings_list`; the second slot goes where the first one is."""
    known = {option.key: option for option in OPTIONS}
    keys = [key for key in cast("list[str]", worker.settings.get("quicksettings_list")) if key in known]
    if PRIMARY.option in keys and SECONDARY.option not in keys:
        keys.insert(keys.index(PRIMARY.option) + 1, SECONDARY.option)
    return [known[key] for key in keys]


def draw(worker: Worker) -> None:
    """Draw the row's controls. A choice takes effect at once."""
    followers: list[Follower] = []
    for option in listed(worker):
        component, followed = _control(worker, option)
        _bind(worker, option, component)
        followers += followed
        if option.key in NOTED:
            followers.append(controls.note_follower(worker, option, component, with_help=False))
    follow(followers)


def _control(worker: Worker, option: Option) -> tuple[Any, list[Follower]]:
    if option.choices not in ("bases", "overrides"):
        component = controls.build(worker, option, with_help=False)
        return component, [controls.follower(worker, option, component)]
    with gr.Row(elem_classes="tp-choice", visible=worker.is_shown(option.key)) as row:
        component = controls.build(worker, option, with_help=False)
        name = f"Refresh {option.label}"
        button = gr.Button(name, elem_id=f"refresh_{option.key}", elem_classes="tp-refresh", min_width=36)

    def refresh(request: gr.Request) -> None:
        worker.refresh(owner_of(request))

    button.click(refresh, queue=False, show_progress="hidden", api_visibility="private")
    return component, [controls.follower(worker, option, component), *controls.shown_while_of_use(worker, option, row)]


def _bind(worker: Worker, option: Option, component: Any) -> None:
    def choose(value: object, request: gr.Request) -> None:
        owner = owner_of(request)
        try:
            worker.set_options(owner, {option.key: value})
        except TransplantError as error:
            worker.refuse(owner, error)

    event = getattr(component, controls.INPUT_EVENTS[option.control])
    event(choose, [component], queue=False, show_progress="hidden", trigger_mode="multiple", api_visibility="private")
