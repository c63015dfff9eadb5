"""The parts that all pages share: the bar, the choice of a model, the request as code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr
from gradio.components import Navbar

from servekit.errors import RequestError
from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_servers.registry import ToolServers
from servekit.gateway.ui.pages import snippets
from servekit.gateway.ui.pages.language import NAMES, PAGES, Say, get_root
from servekit.gateway.ui.status_html import error_note, list_choices, may_see, progress_note
from servekit.gateway.ui.widgets.log_tail import Tail
from servekit.gateway.ui.widgets.request_runner import RequestOptions, Runs, Shown, Visit
from servekit.gateway.ui.widgets.request_table import RecentRequests
from servekit.gateway.ui.widgets.status_poller import StatusPoller

MODELS_EVERY_S = 5.0
#: The most characters of a prompt, which is also shown as code and sent with each event.
MAX_CHARS = 100_000
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
NOW: dict[str, Any] = {**QUIET, "queue": False}


#: An icon: a door with an arrow out of it.
_OUT = (
    '<svg viewBox="0 0 16 16" width="16" height="16" fill="none" stroke="currentColor" '
    'stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">'
    '<path d="M6.5 2.5h-4v11h4M10.5 5l3 3-3 3M13.5 8h-7"/></svg>'
)


def get_visit(request: gr.Request) -> Visit:
    """Return the visitor who sent a request."""
    client = f"ui {request.client.host if request.client else ''}"
    authorization = request.headers.get("authorization") or ""
    return Visit(str(request.session_hash), client, authorization)


@dataclass(frozen=True, slots=True)
class Frame:
    """The objects that the pages of one language are built from."""

    router: Router
    say: Say
    supervisor: Supervisor
    watch: StatusPoller
    runs: Runs
    tail: Tail
    requests: RecentRequests
    tools: ToolServers
    max_body_bytes: int

    # ---- the top of each page

    def head(self, page: str) -> None:
        """Add the bar with all pages, the language and the theme."""
        Navbar(visible=False)  # Gradio's bar neither fits a phone nor switches languages
        gr.HTML(self._head(page), elem_id="sk-head")

    def title(self, page: str) -> None:
        """Add a page's heading and purpose."""
        title, lead = self.say(f"nav.{page}"), self.say(f"{page}.lead")
        html = f"<h1>{escape(title)}</h1><p class='sk-quiet'>{escape(lead)}</p>"
        gr.HTML(html, elem_classes="sk-title")

    def _head(self, page: str) -> str:
        say, base = self.say, get_root(self.say.language)
        links = "".join(
            f'<a href="{base}/{name}"{_mark_current(name == page)}>'
            f"{escape(_make_title(name, say))}</a>"
            for name in PAGES
        )
        others = "".join(
            f'<a lang="{other}" hreflang="{other}" data-lang="{other}" '
            f'href="{get_root(other)}/{page}">{name}</a>'
            for other, name in NAMES.items()
            if other != say.language
        )
        return (
            f'<header class="sk-bar" data-lang-now="{say.language}">'
            f'<a class="sk-brand" href="{base}/">servekit</a>'
            f'<nav aria-label="{escape(say("nav.label"))}">{links}'
            f'<a href="/docs">{escape(say("nav.docs"))}</a></nav>'
            '<div class="sk-tools"><button type="button" class="sk-out" hidden '
            f'data-sign-out="{escape(say("nav.sign_out"))}">{_OUT}</button>'
            f'{others}<button type="button" class="sk-theme" '
            f'aria-label="{escape(say("nav.theme"))}" title="{escape(say("nav.theme"))}">◐</button>'
            "</div></header>"
        )

    # ---- models

    def model(self, label: str, task: str = "generate", at: int = 0, **more: Any) -> gr.Dropdown:
        """Return a choice of the models and adapters that serve `task`, at first of that one.

        The page is built once for all visitors; the choices are filled in as each visitor loads it.
        """
        found = [] if self.router.access.closed else list_choices(self.router, self.say, task=task)
        value = found[min(at, len(found) - 1)][1] if found else None
        return gr.Dropdown(found, value=value, label=label, allow_custom_value=True, **more)

    def may_see(self, caller: ApiKey | None, model: str) -> bool:
        """Return whether a visitor may see a model; see `caller`."""
        return may_see(self.router, caller, model)

    def sees_all(self, caller: ApiKey | None) -> bool:
        """Return whether a visitor may see all models: by the key's models, or as an admin."""
        if not self.router.access.closed:
            return True
        return caller is not None and (caller.rule.admin or caller.rule.models is None)

    def keep_choices(self, blocks: gr.Blocks, models: Sequence[gr.Dropdown], task: str) -> None:
        """Keep the choices up to date as models appear, disappear and change their state."""
        seen = gr.State("")

        async def tick(request: gr.Request, before: str, *chosen: str | None) -> list[Any]:
            found = list_choices(self.router, self.say, await self.caller(request), task)
            now = str(found)
            if now == before:
                return [gr.skip() for _ in (0, *chosen)]
            return [now, *self.update_choices(found, chosen)]

        async def start(request: gr.Request) -> list[Any]:
            """Choose anew: what the page was built with was known before any model was."""
            found = list_choices(self.router, self.say, await self.caller(request), task)
            return [str(found), *self.update_choices(found, [None] * len(models))]

        blocks.load(start, None, [seen, *models], **NOW)
        gr.Timer(MODELS_EVERY_S).tick(tick, [seen, *models], [seen, *models], **NOW)

    def update_choices(
        self, found: Sequence[tuple[str, str]], chosen: Sequence[str | None]
    ) -> list[Any]:
        """Return the updates of dropdowns, by their choices and the model that each has now.

        One without a model gets one of the choices, each a different one; so does one whose model
        is not among them, as it has turned out to serve other tasks. A model that is gone stays,
        because it may come back.
        """
        names = [name for _, name in found]
        updates = []
        for at, one in enumerate(chosen):
            stays = one and (one in names or not self.router.serves(one))
            value: dict[str, Any] = (
                {} if stays else {"value": names[min(at, len(names) - 1)] if names else None}
            )
            updates.append(gr.update(choices=list(found), **value))
        return updates

    async def caller(self, request: gr.Request) -> ApiKey | None:
        """Return the visitor's key, or the owner; None for all others.

        Without keys that are all visitors but the owner.
        """
        access = self.router.access
        header = (request.headers.get("authorization") or "").encode("latin-1")
        try:
            return await access.holder([(b"authorization", header)])
        except RequestError:
            return None

    def hint_at_link(self, words: str, instead: str) -> str:
        """Return how to become an administrator by a link, after `words`; else only `instead`."""
        if not self.router.access.rules.browser_link:
            return instead
        return f"{words} {self.say('operate.link')}".strip()

    def explain_admins(self, what: str) -> str:
        """Return to others than administrators, as HTML, what it takes to see `what`."""
        if self.router.access.closed:
            words = self.say(f"{what}.admins")
        else:
            words = self.hint_at_link("", self.say(f"{what}.no_keys"))
        return f'<p class="sk-quiet">{escape(words)}</p>'

    # ---- a request

    async def run_request(
        self, request: gr.Request, make: Callable[[], RequestOptions], slot: str = ""
    ) -> AsyncGenerator[tuple[Shown | None, str]]:
        """Run the request that `make` returns; yield its progress, and a note on it as HTML.

        Progress is None if the request is wrong, as the note says; then nothing has run.
        """
        try:
            options = await asyncio.to_thread(make)  # it may have to check a schema
        except RequestError as error:
            yield None, error_note(error.message, self.say)
            return
        async with aclosing(self.runs.stream_run(get_visit(request), options, slot)) as told:
            async for shown in told:
                note = progress_note(shown.progress, busy=shown.busy, say=self.say)
                yield shown, error_note(shown.error, self.say) if shown.error else note

    def leave_empty(self, blocks: gr.Blocks, numbers: Sequence[gr.Number]) -> None:
        """Clear number fields on load: Gradio's page shows 0 for a field without a value."""

        async def empty() -> Any:
            return [None for _ in numbers] if len(numbers) > 1 else None

        blocks.load(empty, None, list(numbers), **NOW)

    def stop_with(self, blocks: gr.Blocks, stop: gr.Button) -> None:
        """End the running requests when the button is clicked or the visit ends."""

        async def end_runs(request: gr.Request) -> None:
            self.runs.stop_runs(str(request.session_hash))

        async def leave(request: gr.Request) -> None:
            self.runs.drop_runs(str(request.session_hash))

        stop.click(end_runs, None, None, **NOW)
        blocks.unload(leave)

    def code(self, make: Callable[..., RequestOptions], inputs: Sequence[Any]) -> None:
        """Show the request that the page would send, as `curl` and Python, while it is unfolded."""
        with gr.Accordion(self.say("code.title"), open=False, elem_classes="sk-fold") as fold:
            block = gr.HTML("", elem_classes="sk-codes")

        async def tell(request: gr.Request, *values: Any) -> str:
            try:
                options = await asyncio.to_thread(make, *values)
            except RequestError as error:
                return error_note(error.message, self.say)
            origin = request.headers.get("origin") or ""
            return snippets.render_snippets(
                origin, options, self.say, closed=self.router.access.closed
            )

        # of texts, which change with every letter or word, only when they are left or unfolded
        changed = [one.blur if isinstance(one, gr.Textbox) else one.change for one in inputs]
        gr.on([fold.expand, *changed], tell, list(inputs), block, trigger_mode="always_last", **NOW)


def _make_title(page: str, say: Say) -> str:
    return say(f"nav.{page or 'chat'}")


def _mark_current(is_it: bool) -> str:
    return ' aria-current="page"' if is_it else ""
