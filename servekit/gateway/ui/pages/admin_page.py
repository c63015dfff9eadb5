"""Loading and unloading of models and adapters with an admin key; and the history of workers.

All visitors may look at the page. Each action checks the visitor's key or session at that moment,
and then asks the supervisor, like the endpoints under /admin.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

import gradio as gr
import structlog

from servekit.errors import Forbidden, RequestError, ServekitError
from servekit.gateway.api.admin.endpoints import ANSWER_S, NothingSuch
from servekit.gateway.api.admin.lora import CHANGE_S, AdapterRefused, require_right
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.auth.sessions import OWNER
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import NOW, QUIET, Frame, get_visit
from servekit.gateway.ui.status_html import error_note, render_note
from servekit.gateway.ui.widgets.answer_html import clean_text
from servekit.protocol.adapters import AdapterSpec, AddAdapter, RemoveAdapter
from servekit.protocol.messages import Accepted, GetWhy, Why
from servekit.protocol.residency import Want
from servekit.protocol.types import ExitRecord, ReplicaHistory

log: Any = structlog.get_logger("servekit.gateway")

WANTS: tuple[Want, ...] = ("load", "unload", "sleep", "wake")
#: The most characters of the last lines of a worker that ended.
TAIL_CHARS = 8_000


def build_page(frame: Frame, blocks: gr.Blocks) -> None:
    """Lay the page out, within its route."""
    say = frame.say
    frame.head("operate")
    with gr.Column(elem_classes="sk-page"):
        frame.title("operate")
        may = gr.HTML("")
        with gr.Column(elem_classes="sk-card"):
            gr.HTML(f"<h2>{escape(say('operate.models'))}</h2>")
            model = frame.model(say("model"), "")
            with gr.Row(elem_classes="sk-actions"):
                buttons = {
                    want: gr.Button(say(f"operate.{want}"), elem_id=f"sk-{want}") for want in WANTS
                }
                restart = gr.Button(say("operate.restart"), elem_id="sk-restart")
                why = gr.Button(say("operate.why"), elem_id="sk-why")
            told = gr.HTML("", elem_id="sk-told")
        changing = [*buttons.values(), restart, why, *_build_adapters(frame, model)]
    frame.keep_choices(blocks, [model], "")

    async def greet(request: gr.Request) -> list[Any]:
        note, may_change = await _note_rights(frame, request)
        return [note, *(gr.Button(interactive=may_change) for _ in changing)]

    blocks.load(greet, None, [may, *changing], **NOW)
    for want, button in buttons.items():
        button.click(_make_residency_action(frame, want), model, told, **QUIET)
    restart.click(_make_restart_action(frame), model, told, **QUIET)
    why.click(_make_why_action(frame), model, told, **QUIET)


def _build_adapters(frame: Frame, model: gr.Dropdown) -> list[gr.Button]:
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

    add.click(added, [model, name, path], told, **QUIET)
    remove.click(removed, [name], told, **QUIET)
    return [add, remove]


# ---- the actions


def _make_residency_action(frame: Frame, want: Want) -> Callable[..., Awaitable[str]]:
    async def act(request: gr.Request, model: str) -> str:
        async def do() -> str:
            await frame.supervisor.reside(want, model or "", False)
            return frame.say(f"operate.{want}.begun", model=model)

        return await _run_action(frame, request, do)

    return act


def _make_restart_action(frame: Frame) -> Callable[..., Awaitable[str]]:
    async def act(request: gr.Request, model: str) -> str:
        async def do() -> str:
            await frame.supervisor.restart(model or "", False)
            return frame.say("operate.restart.begun", model=model)

        return await _run_action(frame, request, do)

    return act


def _make_why_action(frame: Frame) -> Callable[..., Awaitable[str]]:
    async def act(request: gr.Request, model: str) -> str:
        async def do() -> Why:
            frame.router.access.require_admin()
            options = GetWhy(model or "")
            return await frame.supervisor.answer_to(options, Why, ANSWER_S, NothingSuch)

        return await _run_action(frame, request, do)

    return act


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


async def _run_action(
    frame: Frame, request: gr.Request, do: Callable[[], Awaitable[str | Why]]
) -> str:
    """Run an action as the visitor, and return its outcome as HTML."""
    before = ACTING.set(None)
    try:
        authorization = get_visit(request).authorization
        caller = await frame.router.access.charge_page_visitor(authorization)
        ACTING.set(caller or await frame.caller(request))  # the owner, without keys
        done = await do()
    except Forbidden as error:
        return error_note(f"{frame.say('operate.forbidden')} {error.message}")
    except ServekitError as error:
        return error_note(error.message)
    finally:
        ACTING.reset(before)
    return render_note(done) if isinstance(done, str) else write_story(done, frame.say)


async def _note_rights(frame: Frame, request: gr.Request) -> tuple[str, bool]:
    """Return a note on whether this visitor may change anything, and whether it is so."""
    caller = await frame.caller(request)
    say = frame.say
    if caller is not None and caller.rule.admin:
        by_link = caller.rule.name == OWNER.name
        key = "operate.you_own" if by_link else "operate.you_may"
        return render_note(say(key, name=caller.rule.name)), True
    if frame.router.access.closed:
        words = say("operate.you_may_not")
        words = frame.hint_at_link(words, words)
    else:
        words = frame.hint_at_link(say("operate.read_only"), say("operate.no_keys"))
    return f'<p class="sk-hint">{escape(words)}</p>', False


# ---- why


def write_story(why: Why, say: Say) -> str:
    """Return the history of a model's workers, with the last lines of those that ended."""
    parts = [f"<h3>{escape(why.model)}</h3>"]
    if why.breaker != "closed":
        parts.append(f'<p class="sk-hint">{escape(clean_text(why.breaker))}</p>')
    if why.residence is not None and why.residence.reason:
        parts.append(render_note(why.residence.reason))
    return "".join(parts) + "".join(_write_history(one, say) for one in why.replicas)


def _write_history(one: ReplicaHistory, say: Say) -> str:
    head = f"{one.name}: {say(f'state.{one.state}')}, {say.count('restart', one.restarts)}"
    said = "".join(
        f'<p class="sk-quiet">{escape(clean_text(text))}</p>'
        for text in (one.reason, one.alert)
        if text
    )
    exits = "".join(_write_exit(record, say) for record in reversed(one.exits))
    none = f'<p class="sk-quiet">{escape(say("why.none"))}</p>'
    return f'<section class="sk-story"><h4>{escape(head)}</h4>{said}{exits or none}</section>'


def _write_exit(record: ExitRecord, say: Say) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.at))
    words = say("why.exit", at=at, lived=f"{record.lived_s:.0f}", phase=record.phase)
    tail = clean_text("\n".join(record.tail))[-TAIL_CHARS:]
    label = escape(say("why.tail"))
    lines = f'<pre tabindex="0" aria-label="{label}">{escape(tail)}</pre>' if tail else ""
    return f"<p><b>{escape(clean_text(record.what))}</b><br>{escape(words)}</p>{lines}"
