"""The page: layout, and which event does what. Imports Gradio: only `ui.build` imports this."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import gradio as gr

from servekit.gateway.router import Router
from servekit.gateway.ui_chat import THOUGHTS, Chats, Settings, Turn, View, Visit, turn_at, turns_of
from servekit.gateway.ui_status import choices, error_note, progress_note, workers

STATUS_EVERY_S = 1.0
#: Longest message that can be typed or pasted; a browser keeps about three times as much.
MAX_CHARS = 1_000_000
#: BrowserState obfuscates what it stores; a fixed key lets a restarted gateway read it.
STORE_SECRET = "servekit"
SETTINGS = ("system", "temperature", "top_p", "top_k", "max_tokens", "seed")
LATEX: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]
ICON = (  # inline, so that the browser asks for no favicon
    '<link rel="icon" href="data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 '
    "viewBox=%220 0 16 16%22><rect width=%2216%22 height=%2216%22 rx=%224%22 fill=%22%2314b8a6%22/>"
    '<path d=%22M4 5h8M4 8h8M4 11h5%22 stroke=%22white%22 stroke-width=%221.6%22/></svg>">'
)
EXAMPLES = ("Why is the sky blue?", "Write a haiku about autumn.", "Give me three tips for sleep.")
Update = dict[Any, Any]


def theme() -> gr.themes.Base:
    """Calm, and with the reader's own fonts: nothing is fetched from anywhere."""
    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="zinc",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
        radius_size="lg",
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """The components that events read and write."""

    model: gr.Dropdown
    chat: gr.Chatbot
    box: gr.Textbox
    note: gr.HTML
    new: gr.Button
    workers: gr.HTML
    settings: list[gr.Number | gr.Textbox]
    turns: gr.BrowserState
    chosen: gr.BrowserState
    seen: gr.State


def page(router: Router) -> gr.Blocks:
    """Build the page on a router; its callbacks must run on the router's loop."""
    with gr.Blocks(title="servekit", analytics_enabled=False, fill_height=True) as blocks:
        parts = _layout(router)
        Events(router, parts).bind(blocks)
    return cast(gr.Blocks, blocks)


def _layout(router: Router) -> Parts:
    turns = gr.BrowserState([], storage_key="servekit.conversation", secret=STORE_SECRET)
    chosen = gr.BrowserState(None, storage_key="servekit.settings", secret=STORE_SECRET)
    with gr.Row(elem_id="sk-top"):
        gr.HTML("<h1>servekit</h1>", elem_id="sk-brand")
        model = _model_choice(router)
        new = gr.Button("New chat", size="sm", min_width=80, elem_id="sk-new")
    with gr.Row(elem_id="sk-body"):
        with gr.Column(elem_id="sk-main"):
            chat = _chat()
            note = gr.HTML("", elem_id="sk-note")
            box = _question()
        with gr.Column(elem_id="sk-side"):
            status = gr.HTML(workers(router), elem_id="sk-workers")
            with gr.Accordion("Settings", open=False, elem_id="sk-settings"):
                settings = _settings()
    return Parts(model, chat, box, note, new, status, settings, turns, chosen, gr.State(""))


def _model_choice(router: Router) -> gr.Dropdown:
    return gr.Dropdown(
        choices(router),
        label="Model",
        show_label=False,
        container=False,
        allow_custom_value=True,  # the choices change; the router judges
        elem_id="sk-model",
    )


def _question() -> gr.Textbox:
    return gr.Textbox(
        label="Your message",
        placeholder="Ask something…",
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


def _settings() -> list[gr.Number | gr.Textbox]:
    """In the order of SETTINGS. Empty is the model's default."""

    def number(label: str, info: str, step: float = 1, empty: str = "default") -> gr.Number:
        return gr.Number(None, label=label, info=info, placeholder=empty, step=step, min_width=0)

    return [
        gr.Textbox(label="System prompt", placeholder="none", lines=3),
        number("Temperature", "0 is greedy", step=0.1),
        number("Top p", "0 to 1", step=0.05),
        number("Top k", "0 is off"),
        number("Max tokens", "longest answer", step=64),
        number("Seed", "to repeat an answer", empty="random"),
    ]


def _chat() -> gr.Chatbot:
    return gr.Chatbot(
        show_label=False,
        container=False,
        height="100%",
        layout="panel",
        buttons=["copy"],
        editable="user",
        sanitize_html=True,
        reasoning_tags=[THOUGHTS],
        allow_tags=True,  # shown as text; else <think> takes all up to </think> with it
        latex_delimiters=LATEX,
        allow_file_downloads=False,
        feedback_options=None,
        group_consecutive_messages=False,
        placeholder="## What would you like to know?",
        examples=[{"text": text} for text in EXAMPLES],
        elem_id="sk-chat",
    )


def _visit(request: gr.Request) -> Visit:
    client = f"ui {request.client.host if request.client else ''}"
    authorization = request.headers.get("authorization") or ""
    return Visit(str(request.session_hash), client, authorization)


class Events:
    """The callbacks. All are async, so that Gradio runs them on the event loop."""

    def __init__(self, router: Router, parts: Parts) -> None:
        self._router = router
        self._parts = parts
        self._chats = Chats(router)

    def bind(self, blocks: gr.Blocks) -> None:
        parts = self._parts
        asking = [parts.turns, parts.model, *parts.settings]
        shown = [parts.chat, parts.box, parts.note, parts.turns]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        now: dict[str, Any] = {**quiet, "queue": False}
        parts.box.submit(self.ask, [parts.box, *asking], shown, **quiet)
        parts.chat.example_select(self.example, asking, shown, **quiet)
        parts.chat.retry(self.retry, asking, shown, **quiet)
        parts.chat.edit(self.edit, asking, shown, **quiet)
        parts.chat.undo(self.undo, parts.turns, shown, **now)
        parts.box.stop(self.stop, None, None, **now)
        gr.on([parts.new.click, parts.chat.clear], self.clear, None, shown, **now)
        gr.on(
            [component.change for component in (parts.model, *parts.settings)],
            None,
            [parts.model, *parts.settings],
            parts.chosen,
            js="(...chosen) => [chosen]",
            **now,
        )
        status = [parts.model, parts.workers, parts.seen]
        gr.Timer(STATUS_EVERY_S).tick(self.tick, [parts.model, parts.seen], status, **now)
        restored = [parts.chat, parts.workers, parts.model, *parts.settings]
        blocks.load(self.restore, [parts.turns, parts.chosen, parts.model], restored, **now)
        blocks.unload(self.leave)

    # ---- asking

    async def ask(
        self, request: gr.Request, text: str, stored: Any, model: str, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        turns = turns_of(stored)
        if not text.strip():
            return
        turns.append(Turn(role="user", content=text))
        async for update in self._answer(turns, model, settings, request):
            yield update

    async def example(
        self, request: gr.Request, data: gr.SelectData, stored: Any, model: str, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        turns = [*turns_of(stored), Turn(role="user", content=str(data.value["text"]))]
        async for update in self._answer(turns, model, settings, request):
            yield update

    async def retry(
        self, request: gr.Request, data: gr.RetryData, stored: Any, model: str, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        turns = turns_of(stored)
        turns = turns[: _at(turns, data.index) + 1]
        while turns and turns[-1]["role"] != "user":
            turns.pop()
        if turns:
            async for update in self._answer(turns, model, settings, request):
                yield update

    async def edit(
        self, request: gr.Request, data: gr.EditData, stored: Any, model: str, *settings: Any
    ) -> AsyncGenerator[Update, None]:
        turns = turns_of(stored)
        turns = turns[: _at(turns, data.index)]
        turns.append(Turn(role="user", content=str(data.value)))
        async for update in self._answer(turns, model, settings, request):
            yield update

    async def _answer(
        self, turns: list[Turn], model: str, settings: tuple[Any, ...], request: gr.Request
    ) -> AsyncGenerator[Update, None]:
        visit = _visit(request)
        chosen = Settings(**dict(zip(SETTINGS, settings, strict=True)))
        yield {self._parts.chat: turns, self._parts.box: _box(busy=True, value="")}
        views = self._chats.answer(visit, model or "", turns, chosen)
        async with aclosing(views):
            async for view in views:
                yield self._show(view)

    def _show(self, view: View) -> Update:
        parts = self._parts
        note = error_note(view.error) if view.error else ""
        update: Update = {
            parts.chat: view.turns,
            parts.note: note or progress_note(view.progress, busy=view.busy),
        }
        if view.save:
            update[parts.turns] = view.turns
        if not view.busy:
            update[parts.box] = _box(busy=False)
        return update

    # ---- ending

    async def stop(self, request: gr.Request) -> None:
        self._chats.stop(str(request.session_hash))

    async def leave(self, request: gr.Request) -> None:
        self._chats.drop(str(request.session_hash))

    async def clear(self, request: gr.Request) -> Update:
        self._chats.drop(str(request.session_hash))
        return self._shown_now([], "")

    async def undo(self, request: gr.Request, data: gr.UndoData, stored: Any) -> Update:
        self._chats.drop(str(request.session_hash))
        turns = turns_of(stored)
        return self._shown_now(turns[: _at(turns, data.index)], str(data.value))

    def _shown_now(self, turns: list[Turn], text: str) -> Update:
        parts = self._parts
        box = _box(busy=False, value=text)
        return {parts.chat: turns, parts.turns: turns, parts.note: "", parts.box: box}

    # ---- status

    async def tick(self, model: str | None, seen: str) -> Update:
        """Update what has changed since this browser's last tick, if anything has."""
        parts = self._parts
        html, models = workers(self._router), choices(self._router)
        now = f"{html}{models}"
        if now == seen:
            return {parts.seen: gr.skip()}
        return {parts.workers: html, parts.model: self._model(model, model), parts.seen: now}

    def _model(self, current: str | None, wanted: str | None) -> Any:
        """The choices, and the wanted one if it is not chosen already: the user may be quicker."""
        models = choices(self._router)
        names = [name for _, name in models]
        choice = wanted if wanted in names else next(iter(names), None)
        kwargs: dict[str, Any] = {} if choice == current else {"value": choice}
        return gr.update(choices=models, **kwargs)

    async def restore(self, stored: Any, chosen: Any, current: str | None) -> Update:
        """Bring back what this browser had; not the question, which may be under way already."""
        parts = self._parts
        update: Update = {parts.workers: workers(self._router)}
        if turns := turns_of(stored):
            update[parts.chat] = turns
        kept = chosen if isinstance(chosen, list) and len(chosen) == 1 + len(SETTINGS) else None
        model, *settings = kept or [current, *[None] * len(SETTINGS)]
        update[parts.model] = self._model(current, model)
        # None has to be said, too: the page takes a number without a value for 0
        return update | dict(zip(parts.settings, settings, strict=True))


def _box(*, busy: bool, **kwargs: Any) -> Any:
    return gr.update(submit_btn=not busy, stop_btn=busy, **kwargs)


def _at(turns: list[Turn], index: int | tuple[int, int]) -> int:
    return turn_at(turns, index if isinstance(index, int) else index[0])
