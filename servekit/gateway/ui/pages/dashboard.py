"""The live state of the service: figures with plots, GPUs, workers, gateways, events.

The gateway renders everything once a second for each open page, and sends what has changed: a page
stores nothing beyond what it shows. The log is shown for keys with `admin: true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr
from msgspec.structs import replace

from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.ui.pages.page_layout import NOW, Frame
from servekit.gateway.ui.widgets import log_tail, machine_tables
from servekit.gateway.ui.widgets.stat_cards import render_figures
from servekit.protocol.messages import ModelStatus, ReplicaStatus, Status

EVERY_S = 1.0


def build_dashboard(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("dashboard")
    with gr.Column(elem_classes="sk-page sk-wide"):
        frame.title("dashboard")
        figures = gr.HTML("", elem_id="sk-figures")
        gpus = gr.HTML("", elem_id="sk-gpus")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(f"<h2>{escape(say('workers.caption'))}</h2>")
            workers = gr.HTML("", elem_id="sk-machine")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(f"<h2>{escape(say('events.title'))}</h2>")
            events = gr.HTML("", elem_id="sk-events")
        _build_log(frame, blocks)
        seen = gr.State(())
    parts = [figures, gpus, workers, events]

    async def refresh_page(request: gr.Request, before: Sequence[int]) -> list[Any]:
        """Return the parts that have changed since this browser's last tick."""
        shown = await render_page(frame, await frame.caller(request))
        now = tuple(map(hash, shown))
        old = before if len(before) == len(now) else (None,) * len(now)
        fresh = [
            html if was != is_now else gr.skip()
            for html, was, is_now in zip(shown, old, now, strict=True)
        ]
        return [now, *fresh]

    async def fill(request: gr.Request) -> list[Any]:
        return await refresh_page(request, ())

    blocks.load(fill, None, [seen, *parts], **NOW)
    gr.Timer(EVERY_S).tick(refresh_page, [seen], [seen, *parts], **NOW)


def _build_log(frame: Frame, blocks: gr.Blocks) -> None:
    """Add the log of all processes or of one; it can be paused for reading."""
    say = frame.say
    with gr.Column(elem_classes="sk-card"):
        gr.HTML(f"<h2>{escape(say('log.title'))}</h2>")
        with gr.Row(elem_classes="sk-settings", visible=False) as settings:
            everything = [(say("log.all"), "")]
            whose = gr.Dropdown(everything, value="", label=say("log.of"), elem_id="sk-log-of")
            held = gr.Checkbox(False, label=say("log.hold"), elem_id="sk-log-hold")
        lines = gr.HTML("", elem_id="sk-log")
        seen = gr.State((0, ()))

    async def refresh_log(
        request: gr.Request, name: str | None, hold: bool, before: Any
    ) -> list[Any]:
        old_html, old_names = before
        names, html = await _list_lines(frame, await frame.caller(request), name or "")
        updates = [gr.skip(), gr.skip(), gr.skip()]
        if hash(html) != old_html and not (hold and old_html):
            updates[0], old_html = html, hash(html)
        if names != old_names:
            choices = [*everything, *((one, one) for one in names)]
            updates[1:] = [gr.update(choices=choices), gr.update(visible=bool(names))]
        return [*updates, (old_html, names)]

    shown = [lines, whose, settings, seen]
    blocks.load(refresh_log, [whose, held, seen], shown, **NOW)
    gr.Timer(EVERY_S).tick(refresh_log, [whose, held, seen], shown, **NOW)
    whose.change(refresh_log, [whose, held, seen], shown, **NOW)


async def _list_lines(
    frame: Frame, caller: ApiKey | None, name: str
) -> tuple[tuple[str, ...], str]:
    """Return the processes with logs, and the last lines; for other visitors only a sentence."""
    if caller is None or not caller.rule.admin:
        return (), frame.explain_admins("log")
    names = tuple(await frame.tail.names())
    return names, log_tail.render_log(await frame.tail.lines(name), frame.say)


async def render_page(frame: Frame, caller: ApiKey | None) -> tuple[str, str, str, str]:
    """Return the parts of the page as they are now, for the models that a visitor may use.

    Figures and gateways cover all models, so a visitor restricted to some models sees neither.
    """
    status = await frame.watch.recent_status()
    whole = frame.sees_all(caller)
    models = list_models(frame, caller, status)
    happenings = [
        one for one in frame.watch.happenings if whole or frame.may_see(caller, one.model)
    ]
    gpus = machine_tables.render_gpus(status.gpus, models, frame.say) if status is not None else ""
    heading = f'<div class="sk-card"><h2>{escape(frame.say("gpu.title"))}</h2>'
    workers = machine_tables.render_workers(models, frame.say)
    if status is not None and whole:
        workers += machine_tables.render_gateways(status.gateways, frame.say)
    return (
        render_figures(list(frame.watch.samples), status, frame.say) if whole else "",
        f'{heading}<div class="sk-gpus">{gpus}</div></div>' if gpus else "",
        workers,
        machine_tables.render_events(happenings, frame.say),
    )


def list_models(
    frame: Frame, caller: ApiKey | None, status: Status | None
) -> Sequence[ModelStatus]:
    """Return the models that a visitor may use.

    They are the supervisor's answer, a second or two old, updated with its later pushes.
    """
    pushed = {route.status.name: route.status for route in frame.router.routes.values()}
    told = list(pushed.values()) if status is None else status.models
    whole = frame.sees_all(caller)
    return [
        refresh_model(one, pushed.get(one.name))
        for one in told
        if whole or frame.may_see(caller, one.name)
    ]


def refresh_model(told: ModelStatus, pushed: ModelStatus | None) -> ModelStatus:
    """Return the model with each worker as pushed, if its state or restart count has changed."""
    now = {} if pushed is None else {one.name: one for one in pushed.replicas}

    def newest(old: ReplicaStatus) -> ReplicaStatus:
        new = now.get(old.name, old)
        return old if (new.state, new.restarts) == (old.state, old.restarts) else new

    return replace(told, replicas=tuple(map(newest, told.replicas)))
