"""The chat, the first of the pages: its layout, and the callbacks of its events.

Imports Gradio: only `ui.app.build` imports this module.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast, get_args

import gradio as gr

from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.tool_servers.registry import Offer, can_start_servers, may_use_tools
from servekit.gateway.ui.chat_images import render_picker, render_sight
from servekit.gateway.ui.chat_session import Chats, Decision, OpenOffer, View
from servekit.gateway.ui.chat_tools import render_question, render_servers
from servekit.gateway.ui.chat_turns import show_turns
from servekit.gateway.ui.conversation import (
    THOUGHTS,
    Conversation,
    Settings,
    StoredMessage,
    cut_to_question,
    is_answered,
    is_cut,
    make_messages,
    make_question,
    mark_cut,
    parse_conversation,
    store_turns,
    turn_at,
)
from servekit.gateway.ui.conversation_list import (
    render_alert,
    render_drawer,
    render_gone,
    render_tools,
)
from servekit.gateway.ui.pages import (
    admin_page,
    compare,
    dashboard,
    embeddings,
    playground,
    requests,
    structured,
    transcribe,
)
from servekit.gateway.ui.pages.language import Say
from servekit.gateway.ui.pages.page_layout import NOW, QUIET, Frame, get_visit
from servekit.gateway.ui.status_html import (
    error_note,
    explain_unable,
    list_choices,
    progress_note,
    render_note,
    render_status,
    retry_note,
)
from servekit.gateway.ui.widgets.request_runner import CHAT, RequestOptions
from servekit.protocol.types import Capability

STATUS_EVERY_S = 1.0
#: The longest message that can be typed or pasted; a browser stores about three times as much.
MAX_CHARS = 1_000_000
#: BrowserState obfuscates stored values; with a fixed key a restarted gateway can read them.
STORE_SECRET = "servekit"
SETTINGS = ("system", "temperature", "top_p", "top_k", "max_tokens", "seed")
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
EXAMPLES = ("chat.example1", "chat.example2", "chat.example3")
#: The builders of the other pages, by address.
OTHERS = {
    "compare": compare.build_compare_page,
    "playground": playground.build_playground,
    "embeddings": embeddings.build_embeddings_page,
    "structured": structured.build_structured_page,
    "transcribe": transcribe.build_transcribe_page,
    "dashboard": dashboard.build_dashboard,
    "requests": requests.build_requests_page,
    "operate": admin_page.build_admin_page,
}
#: Have conversations.js make what a question sends: the conversation, and the files of its images.
SEND = "(text, _, ...more) => servekitChats.pack(true, text).then((all) => [text, all, ...more])"
SEND_AGAIN = "(_, ...more) => servekitChats.pack(false).then((all) => [all, ...more])"
Update = dict[Any, Any]
Choices = list[tuple[str, str]]


def make_theme() -> gr.themes.Base:
    """Return a calm theme with the reader's own fonts, so that nothing is loaded from elsewhere."""
    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="zinc",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
        radius_size="lg",
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """The components that callbacks read and write."""

    model: gr.Dropdown
    chat: gr.Chatbot
    box: gr.Textbox
    note: gr.HTML
    sight: gr.HTML
    fold: gr.Accordion
    servers: gr.Dropdown  # MCP servers that are on, by name or address
    offered: gr.HTML
    ticked: gr.BrowserState  # `servers`, as this browser keeps it
    decide: gr.Button
    decision: gr.Textbox
    new: gr.Button
    workers: gr.HTML
    settings: list[gr.Number | gr.Textbox]
    kept: gr.Textbox  # the conversation as JSON, on its way to and from the browser's store
    show: gr.Button
    again: gr.Button
    chosen: gr.BrowserState
    seen: gr.State


def build_pages(frame: Frame) -> gr.Blocks:
    """Build all pages of one language; their callbacks must run on the router's loop."""
    with gr.Blocks(title="servekit", analytics_enabled=False, fill_height=True) as blocks:
        frame.head("")
        Events(frame, _lay_out(frame)).bind(blocks)
    for name, build in OTHERS.items():
        with blocks.route(name, name, show_in_navbar=False):  # `Frame.head` has the bar
            build(frame, blocks)
    return cast(gr.Blocks, blocks)


def _lay_out(frame: Frame) -> Parts:
    say = frame.say
    chosen = gr.BrowserState(None, storage_key="servekit.settings", secret=STORE_SECRET)
    kept = gr.Textbox(visible="hidden")
    show = gr.Button(visible="hidden", elem_id="sk-show")
    again = gr.Button(visible="hidden", elem_id="sk-again")
    decide = gr.Button(visible="hidden", elem_id="sk-decide")
    decision = gr.Textbox(visible="hidden")
    ticked = gr.BrowserState(None, storage_key="servekit.tools", secret=STORE_SECRET)
    with gr.Row(elem_id="sk-top"):
        gr.HTML(render_tools(say), elem_id="sk-tools")
        model = frame.model(say("model"), "", show_label=False, container=False, elem_id="sk-model")
        new = gr.Button(say("chat.new"), size="sm", min_width=80, elem_id="sk-new")
    with gr.Row(elem_id="sk-body"):
        gr.HTML(render_drawer(say), elem_id="sk-kept")
        with gr.Column(elem_id="sk-main"):
            chat = _build_chat(say)
            gr.HTML(render_alert(say), elem_id="sk-store")
            note = gr.HTML("", elem_id="sk-note")
            with gr.Column(elem_id="sk-ask"):
                gr.HTML(render_picker(say, frame.max_body_bytes), elem_id="sk-images")
                box = _build_question(say)
            sight = gr.HTML(render_sight(), elem_id="sk-sight")
        with gr.Column(elem_id="sk-side"):
            with gr.Accordion(say("settings"), open=True, elem_id="sk-settings"):
                settings = _build_settings(say)
            # which visitor may use tools is known as each loads the page: see `restore`
            with gr.Accordion(say("mcp"), open=False, visible=False, elem_id="sk-mcp") as fold:
                servers = _build_servers(say)
                offered = gr.HTML("", elem_id="sk-offered")
            gr.HTML(render_gone(say), elem_id="sk-gone")
            status = gr.HTML("", elem_id="sk-workers")  # depends on the visitor: see `restore`
            frame.code(make_chat_request, [kept, model, *settings])
    return Parts(
        model=model, chat=chat, box=box, note=note, sight=sight, new=new, workers=status,
        fold=fold, servers=servers, offered=offered, ticked=ticked, decide=decide,
        decision=decision, settings=settings, kept=kept, show=show, again=again, chosen=chosen,
        seen=gr.State(""),
    )  # fmt: skip


def make_chat_request(kept: str | None, model: str, *settings: Any) -> RequestOptions:
    """Return the conversation so far as a request; an empty one gets a placeholder question."""
    given = dict(zip(SETTINGS, settings, strict=True))
    system = given.pop("system")
    more = {name: value for name, value in given.items() if value is not None}
    turns = cut_to_question(parse_conversation(kept).turns)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    names = {one["id"]: one["name"] for turn in turns for one in turn.get("images", ())}
    files = {id: f"data:image/png;base64,<{name}>" for id, name in names.items()}
    messages += make_messages(turns, files)
    if not turns:
        messages.append({"role": "user", "content": "…"})
    return RequestOptions(CHAT, {"model": model, "messages": messages, **more})


def _build_question(say: Say) -> gr.Textbox:
    return gr.Textbox(
        label=say("chat.message"),
        placeholder=say("chat.ask"),
        show_label=False,
        container=False,
        lines=1,
        max_lines=8,
        max_length=MAX_CHARS,
        autofocus=True,
        submit_btn=True,
        stop_btn=False,
        elem_id="sk-box",
    )


def _build_settings(say: Say) -> list[gr.Number | gr.Textbox]:
    """Return the fields in the order of SETTINGS; an empty field means the model's default."""

    def number(name: str, step: float = 1, empty: str = "default") -> gr.Number:
        return gr.Number(
            None, label=say(name), info=say(f"{name}.info"), placeholder=say(empty), step=step,
            min_width=0,
        )  # fmt: skip

    return [
        gr.Textbox(label=say("system"), placeholder=say("none"), lines=3),
        number("temperature", step=0.1),
        number("top_p", step=0.05),
        number("top_k"),
        number("max_tokens", step=64),
        number("seed", empty="seed.empty"),
    ]


def _build_servers(say: Say) -> gr.Dropdown:
    """Return the choice of MCP servers; one that is typed is the address of a server."""
    return gr.Dropdown(
        [],
        value=[],
        multiselect=True,
        allow_custom_value=True,
        label=say("mcp.servers"),
        info=say("mcp.info"),
    )


def _build_chat(say: Say) -> gr.Chatbot:
    return gr.Chatbot(
        show_label=False,
        container=False,
        height="100%",
        layout="panel",
        buttons=["copy"],
        editable="user",
        sanitize_html=True,
        reasoning_tags=[THOUGHTS],
        allow_tags=True,  # shown as text; otherwise <think> would swallow all text up to </think>
        latex_delimiters=LATEX,
        autoscroll=False,  # chat.js follows the answer, unless the reader has scrolled up
        allow_file_downloads=False,
        feedback_options=None,
        group_consecutive_messages=False,
        placeholder=f"## {say('chat.empty')}",
        examples=[{"text": say(key)} for key in EXAMPLES],
        elem_id="sk-chat",
    )


class Events:
    """The page's callbacks. All are async, so that Gradio runs them on the event loop."""

    def __init__(self, frame: Frame, parts: Parts) -> None:
        self._frame = frame
        self._router = frame.router
        self._parts = parts
        self._chats = Chats(frame.router, frame.runs)

    def bind(self, blocks: gr.Blocks) -> None:
        parts = self._parts
        asking = [parts.kept, parts.model, parts.servers, *parts.settings]
        shown = [parts.chat, parts.box, parts.note, parts.kept]
        again = {"js": SEND_AGAIN, **QUIET}
        for asked in (
            parts.box.submit(self.ask, [parts.box, *asking], shown, js=SEND, **QUIET),
            parts.chat.example_select(self.example, asking, shown, **again),
            gr.on([parts.chat.retry, parts.again.click], self.retry, asking, shown, **again),
            parts.chat.edit(self.edit, asking, shown, **again),
        ):
            for end in (asked.then, asked.failure):
                end(None, parts.kept, parts.box, js="(kept) => servekitChats.end(kept)", **NOW)
        undone = "() => [servekitChats.undo()]"
        parts.chat.undo(self.undo, parts.kept, shown, js=undone, **NOW)
        parts.kept.change(None, parts.kept, None, js="(kept) => servekitChats.keep(kept)", **NOW)
        parts.model.change(self.look, parts.model, [parts.sight, parts.workers], **NOW)
        stopped = "() => [servekitChats.getAsked()]"
        parts.box.stop(self.stop_answer, parts.decision, None, js=stopped, **NOW)
        decided = "() => [servekitDecision()]"
        parts.decide.click(self.decide_call, parts.decision, None, js=decided, **NOW)
        kept_ticks = {"js": "(servers) => [servers]", **NOW}
        parts.servers.change(None, parts.servers, parts.ticked, **kept_ticks)
        told = [parts.offered, parts.fold]
        parts.servers.change(self.list_tools, parts.servers, told, **QUIET)
        begin = "() => [servekitChats.begin()]"
        gr.on([parts.new.click, parts.chat.clear], self.show, parts.kept, shown, js=begin, **NOW)
        chosen = "() => [servekitChats.take()]"
        parts.show.click(self.show, parts.kept, shown, js=chosen, trigger_mode="always_last", **NOW)
        gr.on(
            [component.change for component in (parts.model, *parts.settings)],
            None,
            [parts.model, *parts.settings],
            parts.chosen,
            js="(...chosen) => [chosen]",
            **NOW,
        )
        status: list[Any] = [
            parts.model,
            parts.workers,
            parts.sight,
            parts.fold,
            parts.servers,
            parts.seen,
        ]
        seen = [parts.model, parts.seen]
        gr.Timer(STATUS_EVERY_S).tick(self.update_page, seen, status, **NOW)
        restored: list[Any] = [parts.chat, parts.note, parts.kept, parts.workers, parts.model]
        restored += [parts.fold, parts.servers, *parts.settings]
        start = "(_, ...more) => servekitChats.start().then((kept) => [kept, ...more])"
        stored = [parts.kept, parts.chosen, parts.model, parts.ticked]
        blocks.load(self.restore, stored, restored, js=start, **NOW)
        blocks.unload(self.leave)

    # ---- asking

    async def ask(
        self, request: gr.Request, text: str, sent: str, model: str, *chosen: Any
    ) -> AsyncGenerator[Update, None]:
        conversation = parse_conversation(sent)
        turns = conversation.turns
        if not text.strip() and not conversation.picked:
            return
        turns.append(make_question(text, conversation.picked))
        needed: dict[Capability, bool] = {
            "images": any("images" in turn for turn in turns),
            "tools": bool(chosen[0]),
        }
        caller = await self._frame.caller(request)
        for what in (what for what, needs in needed.items() if needs):
            if unable := explain_unable(self._router, self._frame.say, caller, model, what):
                yield {self._parts.note: error_note(unable)}  # the question stays in its field
                return
        async for update in self._stream_answer(conversation, model, chosen, request):
            yield update

    async def example(
        self, request: gr.Request, data: gr.SelectData, sent: str, model: str, *chosen: Any
    ) -> AsyncGenerator[Update, None]:
        conversation = parse_conversation(sent)
        conversation.turns.append(make_question(str(data.value["text"])))
        async for update in self._stream_answer(conversation, model, chosen, request):
            yield update

    async def retry(
        self, request: gr.Request, sent: str, model: str, *chosen: Any
    ) -> AsyncGenerator[Update, None]:
        """Ask the last question again."""
        conversation = parse_conversation(sent)
        if cut_to_question(conversation.turns):
            async for update in self._stream_answer(conversation, model, chosen, request):
                yield update

    async def edit(
        self, request: gr.Request, data: gr.EditData, sent: str, model: str, *chosen: Any
    ) -> AsyncGenerator[Update, None]:
        conversation = parse_conversation(sent)
        turns = conversation.turns
        at = _get_turn(turns, data.index)
        images = turns[at].get("images", []) if at < len(turns) else []
        turns[at:] = [make_question(str(data.value), images)]
        async for update in self._stream_answer(conversation, model, chosen, request):
            yield update

    async def _stream_answer(
        self,
        conversation: Conversation,
        model: str,
        chosen: tuple[Any, ...],
        request: gr.Request,
    ) -> AsyncGenerator[Update, None]:
        """Answer the last turn; `chosen` are the MCP servers, then the settings."""
        who, turns = get_visit(request), conversation.turns
        servers, *values = chosen
        settings = Settings.from_fields(*values)
        box, kept = _build_box(busy=True, value=""), store_turns(conversation, turns)
        parts, busy = self._parts, True
        shown = show_turns(turns, self._frame.say)
        yield {parts.chat: shown, parts.box: box, parts.kept: kept}
        opens = self._open_offer(request, servers) if servers else None
        views = self._chats.answer_turn(
            who, model or "", turns, settings, conversation.files, opens, conversation.id,
            conversation.event,
        )  # fmt: skip
        async with aclosing(views):
            async for view in views:
                if view.save:
                    ends = not view.busy and not view.error
                    kept = store_turns(conversation, view.turns if ends else mark_cut(view.turns))
                busy = view.busy
                yield {**self._show(view), parts.kept: kept}
        if busy:  # it was left: at the end, Gradio shows the last update once more
            yield {parts.note: gr.skip()}

    def _open_offer(self, request: gr.Request, servers: list[str]) -> OpenOffer:
        async def open_offer() -> Offer:
            return await self._frame.tools.open_tools(servers, await self._frame.caller(request))

        return open_offer

    def _show(self, view: View) -> Update:
        parts, shown = self._parts, show_turns(view.turns, self._frame.say)
        return {parts.chat: shown, parts.note: self._describe(view)}

    def _describe(self, view: View) -> str:
        """Return the line beneath the conversation; with a button to retry what failed."""
        say = self._frame.say
        if view.error:
            return retry_note(error_note(view.error, say), say)
        if view.asks is not None:
            return render_question(view.asks, say)
        if view.starting:
            return render_note(say("mcp.starting"))
        if view.calling:
            return render_note(say("mcp.calling", tools=", ".join(view.calling)))
        note = progress_note(view.progress, busy=view.busy, say=say)
        return note if view.busy or is_answered(view.turns) else retry_note(note, say)

    # ---- tools

    async def list_tools(self, request: gr.Request, servers: list[str] | None) -> Update:
        """Show the tools of the chosen servers, which are started for it, and how many are on."""
        parts, say = self._parts, self._frame.say
        label = f"{say('mcp')} ({len(servers)})" if servers else say("mcp")
        caller = await self._frame.caller(request)
        listed = await self._frame.tools.list_tools(servers or (), caller)
        return {parts.offered: render_servers(listed, say), parts.fold: gr.update(label=label)}

    async def decide_call(self, request: gr.Request, sent: str) -> None:
        """Take the visitor's answer to a call: its id, and the word of the button."""
        call, _, word = (sent or "").partition(" ")
        if word in get_args(Decision):
            self._chats.decide_call(str(request.session_hash), call, cast(Decision, word))

    def _offer_servers(self, caller: ApiKey | None, **more: Any) -> Update:
        """Return the choice of servers, hidden from visitors who may use none."""
        names = self._frame.tools.list_names(caller)
        admin = may_use_tools(caller) and caller is not None and caller.rule.admin
        info = self._frame.say("mcp.info_admin" if admin else "mcp.info")
        visible = bool(names) or (admin and can_start_servers())
        return {
            self._parts.fold: gr.update(visible=visible),
            self._parts.servers: gr.update(choices=list(names), info=info, **more),
        }

    # ---- ending

    async def stop_answer(self, request: gr.Request, event: str) -> None:
        """End the answer to the question of this event; it may have ended by now."""
        if event.isdecimal():
            self._chats.stop_answer(str(request.session_hash), int(event))

    async def leave(self, request: gr.Request) -> None:
        self._chats.drop_answer(str(request.session_hash))

    async def show(self, request: gr.Request, kept: str) -> Update:
        """Show another conversation of this browser, or an empty one."""
        self._chats.drop_answer(str(request.session_hash))
        return self._show_kept(kept) | {self._parts.box: _build_box(busy=False)}

    async def undo(self, request: gr.Request, data: gr.UndoData, sent: str) -> Update:
        self._chats.drop_answer(str(request.session_hash))
        conversation = parse_conversation(sent)
        turns = conversation.turns
        at = _get_turn(turns, data.index)
        text = turns[at]["content"] if at < len(turns) else ""
        kept = store_turns(conversation, turns[:at])
        return self._show_kept(kept) | {self._parts.box: _build_box(busy=False, value=text)}

    def _show_kept(self, kept: str) -> Update:
        parts, say = self._parts, self._frame.say
        turns = parse_conversation(kept).turns
        why = say("chat.cut" if is_cut(turns) else "chat.unanswered")
        note = "" if is_answered(turns) else retry_note(render_note(why), say)
        return {parts.chat: show_turns(turns, say), parts.note: note, parts.kept: kept}

    # ---- status

    async def update_page(self, request: gr.Request, model: str | None, seen: str) -> Update:
        """Update what has changed since this browser's last tick."""
        parts = self._parts
        caller = await self._frame.caller(request)
        html, models = self._status(caller, model), self._choices(caller)
        sight, servers = self._sight(caller, model), self._frame.tools.list_names(caller)
        now = f"{html}{models}{sight}{servers}"
        if now == seen:
            return {parts.seen: gr.skip()}
        # a model that is gone stays: it may come back, and no other is asked unnoticed
        choice = gr.update(choices=models) if model else self._model(models, model, None)
        update = {parts.workers: html, parts.model: choice, parts.sight: sight, parts.seen: now}
        return update | self._offer_servers(caller)

    async def look(self, request: gr.Request, model: str | None) -> tuple[str, str]:
        """Return whether the model that was just chosen takes images, and its state."""
        caller = await self._frame.caller(request)
        return self._sight(caller, model), self._status(caller, model)

    def _sight(self, caller: ApiKey | None, model: str | None) -> str:
        blind = explain_unable(self._router, self._frame.say, caller, model, "images")
        return render_sight(blind, self._router.access.rules.limits.images)

    def _status(self, caller: ApiKey | None, model: str | None) -> str:
        return render_status(self._router, model, self._frame.say, caller)

    def _choices(self, caller: ApiKey | None) -> Choices:
        return list_choices(self._router, self._frame.say, caller)

    def _model(self, models: Choices, current: str | None, wanted: str | None) -> Any:
        """Return the choices, and select the wanted model unless the user has already chosen."""
        choice = _choose(models, wanted)
        kwargs: dict[str, Any] = {} if choice == current else {"value": choice}
        return gr.update(choices=models, **kwargs)

    async def restore(
        self, request: gr.Request, kept: str, chosen: Any, current: str | None, ticked: Any
    ) -> Update:
        """Restore what this browser had stored, but not the question: an answer may already run."""
        parts = self._parts
        caller = await self._frame.caller(request)
        given = chosen if isinstance(chosen, list) and len(chosen) == 1 + len(SETTINGS) else None
        wanted, *settings = given or [current, *[None] * len(SETTINGS)]
        models = self._choices(caller)
        update = self._show_kept(kept)
        update[parts.model] = self._model(models, current, wanted)
        update[parts.workers] = self._status(caller, _choose(models, wanted))
        servers = [name for name in ticked if isinstance(name, str)] if ticked else []
        update |= self._offer_servers(caller, value=servers if may_use_tools(caller) else [])
        # None has to be sent, too: the page shows 0 for a number without a value
        return update | dict(zip(parts.settings, settings, strict=True))


def _choose(models: Choices, wanted: str | None) -> str | None:
    """Return the wanted model, or the first if there is no such model."""
    names = [name for _, name in models]
    return wanted if wanted in names else next(iter(names), None)


def _build_box(*, busy: bool, **kwargs: Any) -> Any:
    return gr.update(submit_btn=not busy, stop_btn=busy, **kwargs)


def _get_turn(turns: list[StoredMessage], index: int | tuple[int, int]) -> int:
    return turn_at(turns, index if isinstance(index, int) else index[0])
