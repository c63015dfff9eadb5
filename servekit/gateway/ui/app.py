"""The Gradio UI, as an ASGI application that answers everything under /ui.

Importing Gradio takes seconds, so `build_app` does it, and is called in a thread. The callbacks are
async and run on the gateway's event loop, beside the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.http.asgi import ASGIApp, Receive, Scope, Send, send_json
from servekit.gateway.http.unix_proxy import refuse_long_body
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_servers.registry import ToolServers
from servekit.gateway.ui.lean_gradio import build_without_apps, import_gradio
from servekit.gateway.ui.login import ADDRESSES
from servekit.gateway.ui.pages.language import DEFAULT, NAMES, Say, get_preferred, get_root
from servekit.gateway.ui.pages.sign_in import ICON
from servekit.gateway.ui.widgets.log_tail import Tail
from servekit.gateway.ui.widgets.request_runner import Runs
from servekit.gateway.ui.widgets.request_table import RecentRequests
from servekit.gateway.ui.widgets.status_poller import StatusPoller

if TYPE_CHECKING:
    import gradio
    from fastapi import FastAPI

Hook = Callable[[], Awaitable[None]]
#: The most browser sessions that Gradio keeps, at about 80 kB each. Forgetting one loses nothing.
SESSIONS = 1000
#: The time between two polls of Gradio's queue, s, by default a millisecond; and the time without
#: requests of pages after which the queue is paused.
POLL_S = 0.02
QUIET_AFTER_S = 2.0
#: What pages ask of Gradio's API. The rest of it stores uploads for ever, or answers for ever.
API = "/gradio_api/"
ASKED = {"queue/join", "queue/data", "run/predict", "cancel", "reset", "info", "app_id"}
#: Pages show the output of models. Whatever passes the sanitizer, the browser may contact no other
#: host, and no other site may frame the page.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; font-src 'self' data:; img-src data: blob:; "
    "media-src blob:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-src 'none'; frame-ancestors 'self'"
)
#: In the order in which they run.
SCRIPTS = (
    *("ui.js", "store.js", "images.js", "conversations.js", "chat.js"),
    *("recordings.js", "transcripts.js"),
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


@dataclass(frozen=True, slots=True)
class UI:
    """The UI's application, with its startup and shutdown on the event loop."""

    app: ASGIApp
    startup: Hook
    shutdown: Hook


def build_app(router: Router, supervisor: Supervisor, max_body_bytes: int) -> UI:
    """Import Gradio and build the pages. Blocks for seconds: call it in a thread.

    The longest body is a conversation as the browser stores it, with its images.
    """
    from fastapi import FastAPI

    import_gradio()
    from servekit.gateway.ui.chat_page import build_pages
    from servekit.gateway.ui.pages.page_layout import Frame

    watch, folder = StatusPoller(router, supervisor), supervisor.run_dir
    tools = ToolServers(router.access)
    shared = watch, Runs(router), Tail(folder), RecentRequests(folder), tools
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    made, queues = [], []
    for language in sorted(NAMES, key=lambda one: one == DEFAULT):  # the longer path comes first
        frame = Frame(router, Say(language), supervisor, *shared, max_body_bytes)
        with build_without_apps():
            blocks = build_pages(frame)
        queues.append(calm_gradio(blocks))
        _mount_pages(outer, blocks, get_root(language))
        made.append(blocks)
    return UI(Shield(outer, max_body_bytes, queues), *_make_lifespan(outer, made, watch, tools))


def _mount_pages(outer: FastAPI, blocks: gradio.Blocks, path: str) -> None:
    from gradio import mount_gradio_app

    from servekit.gateway.ui.chat_page import make_theme

    here = Path(__file__)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode")  # SSR is not used
        mount_gradio_app(
            outer,
            blocks,
            path=path,
            footer_links=[],
            run_history=False,
            max_file_size="1b",  # no page uploads files
            ssr_mode=False,
            enable_monitoring=False,
            pwa=False,
            mcp_server=False,
            theme=make_theme(),
            head=ICON
            + "".join(f"<script>{here.with_name(name).read_text()}</script>" for name in SCRIPTS),
            css_paths=[here.with_name("ui.css"), here.with_name("ui_pages.css")],
        )
    # Otherwise an open page would hold one of the six connections that a browser opens. The
    # heartbeat only reports the end of a visit, which the stream of an answer reports, too.
    blocks.config["connect_heartbeat"] = False


def _make_lifespan(
    outer: FastAPI, made: list[gradio.Blocks], watch: StatusPoller, tools: ToolServers
) -> tuple[Hook, Hook]:
    stack = contextlib.AsyncExitStack()
    looking: list[asyncio.Task[None]] = []

    async def startup() -> None:
        await stack.enter_async_context(outer.router.lifespan_context(outer))
        looking.append(asyncio.get_running_loop().create_task(watch.poll()))

    async def shutdown() -> None:
        """End the streams of open pages, so that the server need not wait for them."""
        for task in looking:
            task.cancel()
        for mounted in outer.routes[-len(made) :]:
            app: Any = mounted  # `blocks.app` is a different application
            app.app.stop_event.set()
        for blocks in made:
            blocks._queue.stopped = True
        await tools.close()
        await stack.aclose()

    return startup, shutdown


def calm_gradio(blocks: gradio.Blocks) -> PausedQueue:
    """Stop Gradio's own queue from delaying requests and from wasting the gateway's time.

    Requests wait in the router's queue, which is fair and knows positions. By default, Gradio
    builds a pandas data frame of the last ten thousand events for each event, and wakes up 1100
    times per idle second.
    """
    blocks.queue(api_open=False, default_concurrency_limit=None)
    blocks.state_session_capacity = SESSIONS
    queue = blocks._queue
    queue.max_thread_count = 4096  # the most concurrent jobs, despite its name
    queue.sleep_when_free = POLL_S
    queue.progress_update_sleep_when_free = 3600.0  # gr.Progress is not used
    queue.ANALYTICS_MAX_EVENTS = 1
    queue.ANAYLTICS_CACHE_FREQUENCY = 2**62  # Gradio's spelling
    return PausedQueue(queue)


class PausedQueue:
    """One of Gradio's queues, which polls for events; it does so only between `resume` and `pause`.

    Create it before Gradio starts the queue.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._start_processing = queue.start_processing
        self._used = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        queue.start_processing = self._process_while_used

    @property
    def polls(self) -> bool:
        return self._polling is not None and not self._polling.done()

    def resume(self) -> None:
        self._used.set()

    def pause(self) -> bool:
        """Stop polling, unless events wait or run. Return whether it stops."""
        if len(self._queue) or any(job is not None for job in self._queue.active_jobs):
            return False
        self._used.clear()
        if self._polling is not None:
            self._polling.cancel()
        return True

    async def _process_while_used(self) -> None:
        while True:
            await self._used.wait()
            self._polling = asyncio.get_running_loop().create_task(self._poll())
            await asyncio.wait((self._polling,))
            if not self._polling.cancelled():
                return self._polling.result()

    async def _poll(self) -> None:
        try:
            await self._start_processing()
        except asyncio.CancelledError:
            self._queue.stopped = False  # Gradio has set it, and refuses events of stopped queues
            raise


class Shield:
    """Adds the pages' security headers, and refuses requests that no page makes.

    While it sees no request, Gradio's queues are paused.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, queues: Sequence[PausedQueue]) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._queues = queues
        self._used_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (elsewhere := find_redirect(scope)) is not None:
            await _send_redirect(send, elsewhere)
            return
        if _is_unasked(scope["path"]):
            await send_json(send, b'{"detail": "Not Found"}', 404)
            return
        if await refuse_long_body(scope, send, self._max_body_bytes):
            return
        self._resume()

        async def shielded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self._app(scope, receive, shielded)

    def _resume(self) -> None:
        loop = asyncio.get_running_loop()
        self._used_s = loop.time()
        for queue in self._queues:
            queue.resume()
        if self._timer is None:
            self._timer = loop.call_later(QUIET_AFTER_S, self._pause)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._used_s + QUIET_AFTER_S - loop.time()
        if left_s > 0 or not all(queue.pause() for queue in self._queues):
            self._timer = loop.call_later(max(left_s, 1.0), self._pause)
        else:
            self._timer = None


def find_redirect(scope: Scope) -> str | None:
    """Return the redirect for a visitor who prefers another language; see `language`.

    Also for an address with a superfluous slash, which Gradio would redirect out of the UI.
    """
    path: str = scope["path"]
    found = ADDRESSES.get(path.rstrip("/"))
    if scope["method"] != "GET" or found is None:
        return None
    language, name = found
    if language == DEFAULT:
        language = get_preferred(scope["headers"])
    there = f"{get_root(language)}/{name}"
    return None if path == there else there


def _is_unasked(path: str) -> bool:
    """Return whether a path is of Gradio's API, and of a part that no page uses."""
    _, found, rest = path.partition(API)
    return bool(found) and rest.rstrip("/") not in ASKED


async def _send_redirect(send: Send, where: str) -> None:
    headers = [
        (b"location", where.encode()),
        (b"vary", b"Accept-Language, Cookie"),
        (b"cache-control", b"no-store"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
