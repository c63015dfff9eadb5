"""Operation of the models with an admin key: a table with buttons, and one model in detail.

All visitors may look at the page. Each action checks the visitor's key or session at that moment,
and then asks the supervisor, like the endpoints under /admin.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from typing import Any

import gradio as gr
import structlog
from msgspec.structs import replace

from servekit.errors import Forbidden, RequestError, ServekitError
from servekit.gateway.api.admin.endpoints import ANSWER_S, NothingSuch
from servekit.gateway.api.admin.lora import CHANGE_S, AdapterRefused, require_right
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.auth.sessions import OWNER
from servekit.gateway.ui.pages.dashboard import list_models
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import NOW, QUIET, Frame, get_visit
from servekit.gateway.ui.status_html import error_note, render_note
from servekit.gateway.ui.widgets import log_tail, machine_tables, model_table
from servekit.gateway.ui.widgets.answer_html import clean_text
from servekit.protocol.adapters import AdapterSpec, AddAdapter, RemoveAdapter
from servekit.protocol.messages import Accepted, GetWhy, ModelStatus, Why
from servekit.protocol.types import ExitRecord, ReplicaHistory

log: Any = structlog.get_logger("servekit.gateway")

EVERY_S = 1.0
#: The most characters of the last lines of a worker that ended.
TAIL_CHARS = 8_000


def build_admin_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("operate")
    with gr.Column(elem_classes="sk-page sk-wide"):
        frame.title("operate")
        may = gr.HTML("")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(f"<h2>{escape(say('operate.models'))}</h2>")
            table = gr.HTML("", elem_id="sk-models", js_on_load=model_table.ON_LOAD)
            told = gr.HTML("", elem_id="sk-told")
        details = [_add_detail(name) for name in ("events", "log")]
        chosen, seen = gr.State(""), gr.State(())
        changing = _build_adapters(frame, chosen)
    parts = [table, *details]

    async def greet(request: gr.Request) -> list[Any]:
        note, forbidden = await _note_rights(frame, request)
        return [note, *(gr.Button(interactive=not forbidden) for _ in changing)]

    async def refresh_page(request: gr.Request, name: str, before: Sequence[int]) -> list[Any]:
        """Return the parts that have changed since this browser's last tick."""
        name, shown = await _render_page(frame, request, name)
        now = tuple(map(hash, shown))
        old = before if len(before) == len(now) else (None,) * len(now)
        fresh = [
            html if was != is_now else gr.skip()
            for html, was, is_now in zip(shown, old, now, strict=True)
        ]
        return [name, now, *fresh]

    async def press(
        request: gr.Request, event: gr.EventData, name: str, before: Sequence[int]
    ) -> list[Any]:
        """Carry out what a button of the table says, and show the outcome."""
        pressed = str(event.name)
        if event.act == "show":
            return ["", *await refresh_page(request, pressed, before)]
        note = await _run_action(frame, request, _make_action(frame, str(event.act), pressed))
        return [note, *await refresh_page(request, name, before)]

    blocks.load(greet, None, [may, *changing], **NOW)
    blocks.load(refresh_page, [chosen, seen], [chosen, seen, *parts], **NOW)
    gr.Timer(EVERY_S).tick(refresh_page, [chosen, seen], [chosen, seen, *parts], **NOW)
    # by default a press is dropped while another is being carried out
    table.click(
        press, [chosen, seen], [told, chosen, seen, *parts], trigger_mode="multiple", **QUIET
    )


def _add_detail(name: str) -> gr.HTML:
    with gr.Column(elem_classes="sk-card"):
        return gr.HTML("", elem_id=f"sk-{name}")


def _build_adapters(frame: Frame, chosen: gr.State) -> list[gr.Button]:
    """Lay out the card of adapters; return its buttons."""
    say = frame.say
    with gr.Column(elem_classes="sk-card"):
        gr.HTML(f"<h2>{escape(say('operate.adapters'))}</h2>")
        with gr.Row(elem_classes="sk-settings"):
            name = gr.Textbox(label=say("adapter.name"), max_length=200, elem_id="sk-adapter")
            path = gr.Textbox(
                label=say("adapter.path"), info=say("adapter.path_info"), max_length=4096,
                elem_id="sk-adapter-path",
            )  # fmt: skip
        with gr.Row(elem_classes="sk-actions"):
            add = gr.Button(say("adapter.add"), elem_id="sk-adapter-add")
            remove = gr.Button(say("adapter.remove"), elem_id="sk-adapter-remove")
        told = gr.HTML("", elem_id="sk-adapter-told")

    async def added(request: gr.Request, base: str, named: str, at: str) -> str:
        async def do() -> str:
            return await _add_adapter(frame, base, named.strip(), at.strip())

        return await _run_action(frame, request, do)

    async def removed(request: gr.Request, named: str) -> str:
        async def do() -> str:
            return await _remove_adapter(frame, named.strip())

        return await _run_action(frame, request, do)

    add.click(added, [chosen, name, path], told, **QUIET)
    remove.click(removed, [name], told, **QUIET)
    return [add, remove]


# ---- what is shown


async def _render_page(
    frame: Frame, request: gr.Request, chosen: str
) -> tuple[str, tuple[str, ...]]:
    """Return the model that is shown in detail, and the parts of the page."""
    caller, say = await frame.caller(request), frame.say
    _, forbidden = await _note_rights(frame, request)
    status = await frame.watch.recent_status()
    pushed = {route.status.name: route.status for route in frame.router.routes.values()}
    models = [_move(one, pushed) for one in list_models(frame, caller, status)]
    names = [one.name for one in models]
    chosen = chosen if chosen in names else next(iter(names), "")
    queued = {} if status is None else {one.model: one.queued for one in status.traffic}
    table = model_table.render_models(models, queued, chosen, forbidden, say)
    if status is not None and frame.sees_all(caller):
        table = model_table.render_profiles(status, forbidden, say) + table
    return chosen, (table, *await _render_details(frame, caller, chosen))


def _move(told: ModelStatus, pushed: dict[str, ModelStatus]) -> ModelStatus:
    """Return the model as it comes and goes by the latest push."""
    now = pushed.get(told.name, told)
    return replace(told, residence=now.residence, changing=now.changing, left_out=now.left_out)


async def _render_details(frame: Frame, caller: ApiKey | None, model: str) -> tuple[str, str]:
    """Return a model's events; and for administrators its log, and why its workers ended."""
    say = frame.say
    happenings = [one for one in frame.watch.happenings if one.model == model]
    events = _add_title(say("events.title"), model, machine_tables.render_events(happenings, say))
    if caller is None or not caller.rule.admin:
        return events, _add_title(say("log.title"), model, frame.explain_admins("log"))
    lines = log_tail.render_log(await frame.tail.lines(model), say)
    story = _add_title(say("operate.why"), model, await _tell_story(frame, model))
    return events, _add_title(say("log.title"), model, lines) + story


def _add_title(words: str, model: str, html: str) -> str:
    return f"<h2>{escape(words)} · {escape(model)}</h2>{html}"


async def _tell_story(frame: Frame, model: str) -> str:
    try:
        why = await frame.supervisor.answer_to(GetWhy(model), Why, ANSWER_S, NothingSuch)
    except ServekitError as error:
        return error_note(error.message, frame.say)
    return write_story(why, frame.say)


# ---- the actions


def _make_action(frame: Frame, pressed: str, name: str) -> Callable[[], Awaitable[str]]:
    """Return what a button does; `pressed` and `name` are a browser's words."""

    async def do() -> str:
        frame.router.access.require_admin()
        if pressed == "profile":
            await frame.supervisor.set_profile(name)
            return frame.say("operate.profile.begun", name=name)
        act = next((one for one in model_table.ACTS if one == pressed), None)
        if act is None:
            raise RequestError(frame.say("operate.unknown"))
        route = frame.router.routes.get(name)
        if route and (why := model_table.explain_refusal(route.status, act, frame.say)):
            raise RequestError(why)
        if act == "restart":
            await frame.supervisor.restart(name, False)
        else:
            await frame.supervisor.reside(act, name, False)
        return frame.say(f"operate.{act}.begun", name=name)

    return do


async def _add_adapter(frame: Frame, base: str, name: str, path: str) -> str:
    require_right(frame.router.access)
    if not name or not path.isprintable() or not path:
        raise RequestError(frame.say("adapter.needs"))
    log.info("adapter_load_requested", adapter=name, path=path, via="page")
    options = AddAdapter(base or "", AdapterSpec(name, path))
    await frame.supervisor.answer_to(options, Accepted, CHANGE_S, AdapterRefused)
    return frame.say("adapter.added", name=name)


async def _remove_adapter(frame: Frame, name: str) -> str:
    require_right(frame.router.access)
    log.info("adapter_unload_requested", adapter=name, via="page")
    options = RemoveAdapter(name)
    await frame.supervisor.answer_to(options, Accepted, CHANGE_S, NothingSuch)
    return frame.say("adapter.removed", name=name)


async def _run_action(frame: Frame, request: gr.Request, do: Callable[[], Awaitable[str]]) -> str:
    """Run an action as the visitor, and return its outcome as HTML."""
    before = ACTING.set(None)
    try:
        authorization = get_visit(request).authorization
        caller = await frame.router.access.charge_page_visitor(authorization)
        ACTING.set(caller or await frame.caller(request))  # the owner, without keys
        return render_note(await do())
    except Forbidden as error:
        return error_note(f"{frame.say('operate.forbidden')} {error.message}")
    except ServekitError as error:
        return error_note(error.message, frame.say)
    finally:
        ACTING.reset(before)


async def _note_rights(frame: Frame, request: gr.Request) -> tuple[str, str]:
    """Return a note on whether this visitor may change anything, and why not, or ""."""
    caller = await frame.caller(request)
    say = frame.say
    if caller is not None and caller.rule.admin:
        by_link = caller.rule.name == OWNER.name
        key = "operate.you_own" if by_link else "operate.you_may"
        return render_note(say(key, name=caller.rule.name)), ""
    if frame.router.access.closed:
        words = say("operate.you_may_not")
        words = frame.hint_at_link(words, words)
    else:
        words = frame.hint_at_link(say("operate.read_only"), say("operate.no_keys"))
    return f'<p class="sk-hint">{escape(words)}</p>', words


# ---- why


def write_story(why: Why, say: Say) -> str:
    """Return the history of a model's workers, with the last lines of those that ended."""
    parts = []
    if why.breaker != "closed":
        parts.append(f'<p class="sk-hint">{escape(clean_text(say.translate(why.breaker)))}</p>')
    if why.residence is not None and why.residence.reason:
        parts.append(render_note(say.translate(why.residence.reason)))
    return "".join(parts) + "".join(_write_history(one, say) for one in why.replicas)


def _write_history(one: ReplicaHistory, say: Say) -> str:
    head = f"{one.name}: {say(f'state.{one.state}')}, {say.count('restart', one.restarts)}"
    said = "".join(
        f'<p class="sk-quiet">{escape(clean_text(say.translate(text)))}</p>'
        for text in (one.reason, one.alert)
        if text
    )
    exits = "".join(_write_exit(record, say) for record in reversed(one.exits))
    none = f'<p class="sk-quiet">{escape(say("why.none"))}</p>'
    return f'<section class="sk-story"><h3>{escape(head)}</h3>{said}{exits or none}</section>'


def _write_exit(record: ExitRecord, say: Say) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.at))
    words = say("why.exit", at=at, lived=f"{record.lived_s:.0f}", phase=record.phase)
    tail = clean_text("\n".join(record.tail))[-TAIL_CHARS:]
    label = escape(say("why.tail"))
    lines = f'<pre tabindex="0" aria-label="{label}">{escape(tail)}</pre>' if tail else ""
    what = escape(clean_text(say.translate(record.what)))
    return f"<p><b>{what}</b><br>{escape(words)}</p>{lines}"
