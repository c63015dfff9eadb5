"""The last requests, as `servekit requests` lists them, for administrators. No text is in it."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from servekit.gateway.ui.pages.page_layout import NOW, Frame
from servekit.gateway.ui.widgets.request_table import (
    FAILED,
    SLOW_S,
    FilterChoices,
    RequestFilter,
    find_choices,
    render_requests,
)

EVERY_S = 2.0


def build_requests_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("requests")
    with gr.Column(elem_classes="sk-page sk-wide"):
        frame.title("requests")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(f"<h2>{escape(say('requests.title'))}</h2>")
            with gr.Row(elem_classes="sk-settings", visible=False) as settings:
                model = _make_filter(frame, "model")
                key = _make_filter(frame, "key")
                status = _make_filter(frame, "status")
                slow = gr.Dropdown(
                    [(say("requests.all"), 0.0), *((f"≥ {one:g} s", one) for one in SLOW_S)],
                    value=0.0, label=say("requests.total"), elem_id="sk-requests-slow",
                )  # fmt: skip
                held = gr.Checkbox(False, label=say("log.hold"), elem_id="sk-requests-hold")
            table = gr.HTML("", elem_id="sk-requests")
            seen = gr.State((0, FilterChoices()))
    wanted = [model, key, status, slow]

    async def update(request: gr.Request, before: Any, *chosen: Any) -> list[Any]:
        """Return what has changed since this browser's last tick."""
        old_html, old_choices = before
        choices, html = await _read_page(frame, request, _make_wanted(*chosen))
        updates: list[Any] = [gr.skip()] * 5
        if hash(html) != old_html:
            updates[0] = html
        if choices != old_choices:
            updates[1:] = [gr.update(visible=choices is not None), *_offer(frame, choices)]
        return [(hash(html), choices), *updates]

    async def tick(request: gr.Request, before: Any, hold: bool, *chosen: Any) -> list[Any]:
        if hold and before[0]:
            return [gr.skip()] * 6
        return await update(request, before, *chosen)

    shown = [seen, table, settings, model, key, status]
    blocks.load(update, [seen, *wanted], shown, **NOW)
    gr.Timer(EVERY_S).tick(tick, [seen, held, *wanted], shown, **NOW)
    for one in wanted:
        one.input(update, [seen, *wanted], shown, **NOW)


def _make_filter(frame: Frame, name: str) -> gr.Dropdown:
    return gr.Dropdown(
        [(frame.say("requests.all"), "")],
        value="",
        label=frame.say(f"requests.{name}"),
        elem_id=f"sk-requests-{name}",
        allow_custom_value=True,  # a choice stays when its last request has left the list
    )


def _make_wanted(model: Any, key: Any, status: Any, slow_s: Any) -> RequestFilter:
    return RequestFilter(model or "", key or "", status or "", float(slow_s or 0.0))


def _offer(frame: Frame, choices: FilterChoices | None) -> list[Any]:
    """Return updates of the filters for models, keys and statuses."""
    say, found = frame.say, choices or FilterChoices()
    everything = [(say("requests.all"), "")]
    statuses = [(say("requests.failed"), FAILED), *((one, one) for one in found.statuses)]
    return [
        gr.update(choices=everything + [(one, one) for one in found.models]),
        gr.update(choices=everything + [(one, one) for one in found.keys]),
        gr.update(choices=everything + statuses),
    ]


async def _read_page(
    frame: Frame, request: gr.Request, wanted: RequestFilter
) -> tuple[FilterChoices | None, str]:
    """Return the choices and the table; for other visitors only a sentence."""
    caller = await frame.caller(request)
    if caller is None or not caller.rule.admin:
        return None, frame.explain_admins("requests")
    if not frame.router.access.rules.log_requests:
        return None, f'<p class="sk-quiet">{escape(frame.say("requests.off"))}</p>'
    records = await frame.requests.records()
    return find_choices(records), render_requests(records, wanted, frame.say)
