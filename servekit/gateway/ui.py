"""The Gradio UI, as an ASGI application that answers everything under /ui.

Gradio takes seconds to import, so this module does it inside `build`, which is called in a thread.
The callbacks themselves are async and run on the gateway's event loop, beside the router.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servekit.gateway.http import ASGIApp, Receive, Scope, Send, send_json
from servekit.gateway.router import Router

if TYPE_CHECKING:
    import gradio
    from fastapi import FastAPI

Hook = Callable[[], Awaitable[None]]
PATH = "/ui"
#: Longest body the UI accepts: a conversation as the browser keeps it.
MAX_BODY_BYTES = 8 * 2**20
#: Browser sessions Gradio remembers, at about 80 kB each. One that it forgets loses nothing.
SESSIONS = 1000
#: How often Gradio's queue looks for work, s. Its own default is every millisecond.
POLL_S = 0.02
#: What a model writes is shown as a page's content: whatever slips through the sanitizer, the
#: browser speaks to no other host, and nobody frames the page.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; font-src 'self' data:; img-src data: blob:; "
    "media-src 'none'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-src 'none'; frame-ancestors 'self'"
)
#: `detail` is what Gradio's page shows.
TOO_LONG = b'{"detail": "The conversation is too long. Start a new chat."}'
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class UI:
    """The application, and what brings it up and down on the event loop."""

    app: ASGIApp
    startup: Hook
    shutdown: Hook


def build(router: Router) -> UI:
    """Import Gradio and build the page. Blocking, for seconds: call it in a thread."""
    from fastapi import FastAPI
    from gradio import mount_gradio_app

    from servekit.gateway.ui_page import ICON, page, theme

    blocks = page(router)
    _calm(blocks)
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    mount_gradio_app(
        outer,
        blocks,
        path=PATH,
        footer_links=[],
        run_history=False,
        max_file_size="1b",  # nothing is ever uploaded
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        head=ICON,
        css_paths=Path(__file__).with_name("ui.css"),
    )
    return UI(Shield(outer), *_lifespan(outer, blocks))


def _lifespan(outer: FastAPI, blocks: gradio.Blocks) -> tuple[Hook, Hook]:
    stack = contextlib.AsyncExitStack()

    async def startup() -> None:
        await stack.enter_async_context(outer.router.lifespan_context(outer))

    async def shutdown() -> None:
        """End the streams that open pages hold, so that the server need not wait for them."""
        mounted: Any = outer.routes[-1]  # `blocks.app` is another one
        mounted.app.stop_event.set()
        blocks._queue.stopped = True
        await stack.aclose()

    return startup, shutdown


def _calm(blocks: gradio.Blocks) -> None:
    """Let Gradio's own queue neither hold requests back nor burn the gateway's time.

    Requests wait in the router's queue, where they are fair and have a position. Per event, Gradio
    would make a pandas data frame of the last ten thousand events; per idle second, 1100 wake-ups.
    """
    blocks.queue(api_open=False, default_concurrency_limit=None)
    blocks.state_session_capacity = SESSIONS
    queue = blocks._queue
    queue.max_thread_count = 4096  # jobs at once, in spite of its name
    queue.sleep_when_free = POLL_S
    queue.progress_update_sleep_when_free = 3600.0  # gr.Progress is not used
    queue.ANALYTICS_MAX_EVENTS = 1
    queue.ANAYLTICS_CACHE_FREQUENCY = 2**62  # its spelling


class Shield:
    """Adds the page's security headers, and refuses what the page never asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if _declared_bytes(scope) > MAX_BODY_BYTES:
            await send_json(send, TOO_LONG, 413)
            return

        async def shielded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, shielded)


def _declared_bytes(scope: Scope) -> int:
    """The body's length; a body without one is none that the page sends."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return MAX_BODY_BYTES + 1
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else MAX_BODY_BYTES + 1
