"""The life of a gateway: serve at once, follow the topology, drain, stop.

uvicorn serves the shared socket from the first moment; Gradio, which takes seconds to import, is
imported in a thread meanwhile. EOF on the control connection ends the process, unless the settings
tell it to outlive its supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from servekit.gateway.app import Application, ErrorMiddleware
from servekit.gateway.http.asgi import Envelope
from servekit.gateway.http.limits import LIMITS, Limits, Sweep
from servekit.gateway.http.protocol import Http
from servekit.gateway.http.response import FastHandler
from servekit.gateway.http.tls import Tls
from servekit.gateway.http.trusted_proxies import TrustedProxies
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.worker_connection import NEARBY, Reach
from servekit.gateway.supervisor_channel import Channel, TcpChannel
from servekit.gateway.telemetry import tracing
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.gateway.traffic_reporter import TrafficReporter
from servekit.protocol.adapters import AdapterUnused, TopologyApplied
from servekit.protocol.control.remote_gateway import CertificateUpdate
from servekit.protocol.messages import (
    Drain,
    KeyBudgets,
    KeyUsage,
    Ping,
    Serving,
    SourceReport,
    Stop,
    ToGateway,
    Topology,
)
from servekit.protocol.transport.credentials import Renew
from servekit.protocol.transport.rpc import Way
from servekit.protocol.transport.socket_handover import await_heir
from servekit.system.parent_death import end_group

log: Any = structlog.get_logger("servekit.gateway")

#: Time for interrupted requests to get their error before their connections close.
_LAST_WORDS_S = 0.1
#: Interval at which a gateway checks whether its last requests are done, or their answers sent.
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that the supervisor passes to a gateway on its command line."""

    name: str
    channel: Channel  # to the supervisor
    listen_fds: tuple[int, ...]
    max_body_bytes: int
    ui: bool
    ui_socket: Path | None  # where gateway/0 serves the UI for the others
    request_log: Path | None = None  # of this gateway; None: only the log has its requests
    responses: Path | None = None  # the file of stored responses; None: none is stored
    operators: Way | None = None  # for operators' requests to the supervisor
    tls: Tls | None = None
    legacy: bool = False  # also serve the API of HuixiangDou's LLM server
    reach: Reach = NEARBY  # how to reach workers on other machines
    #: Keep serving without a supervisor: the socket on which to wait for the next one, and the
    #: limit in seconds. None: end with the supervisor.
    outlive: tuple[Path, float] | None = None


def run_gateway(settings: Settings) -> int:
    """Run a gateway until it is told to stop; return the exit code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(settings))


async def _live(settings: Settings) -> int:
    return await Gateway(settings).run()


class Gateway:
    """The gateway process. All state is changed on the event loop only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._channel = settings.channel
        self._router = Router(
            settings.name,
            self._channel.send,
            lambda adapter: self._channel.send(AdapterUnused(adapter)),
            self._channel.send,
        )
        self._router.reach = settings.reach
        self._reporter = TrafficReporter(self._router, self._channel)
        self._app = Application(
            self._router,
            settings.max_body_bytes,
            ui=settings.ui,
            legacy=settings.legacy,
            operators=settings.operators,
            responses=settings.responses,
        )
        access, measures = self._router.access, self._router.measures
        access.on_change(lambda: tracing.apply_rules(measures, access.rules.tracing, settings.name))
        access.on_change(self._follow_rules)
        RECORDER.path = settings.request_log
        self._tls = settings.tls
        self._told = asyncio.Event()
        self._serial = 0  # of the current Topology
        self._orphaned: asyncio.Task[None] | None = None  # the event loop keeps no strong reference
        self._heir: socket.socket | None = None  # kept open as long as we serve
        self._doors: Doors | None = None
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._pinged: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_message, Stop())
        await self._channel.open(self._on_message, self._on_eof)
        await self._told.wait()  # else a restarted gateway would answer 404 at first
        public, *others = [socket.socket(fileno=fd) for fd in self._settings.listen_fds]
        limit = self._settings.max_body_bytes
        tls = None if self._tls is None else self._tls.context
        envelopes = self._app.envelopes
        guard = ErrorMiddleware(self._app, log, envelopes, self._app.count)
        app = TrustedProxies(guard, self._router.access)
        answers = self._router.measures.answers
        async with serving(
            app,
            public,
            self._app.exchanges,
            limit,
            tls=tls,
            also=others,
            answers=answers,
            envelopes=envelopes,
            stir=self._reporter.stir,
        ) as self._doors:
            keep_out_of_collections()
            self._channel.send(Serving())
            tasks = [self._loop.create_task(self._reporter.run())]
            later = [
                self._loop.create_task(self._app.batches.run_batches()),
                self._loop.create_task(self._app.responses.run_responses(self._app.internal)),
            ]
            if self._settings.ui:
                tasks.append(self._loop.create_task(self._bring_up_ui()))
            await self._stop
            if self._router.fail_all():
                await asyncio.sleep(_LAST_WORDS_S)
            for task in (*tasks, *later):
                task.cancel()
        self._reporter.report_counts()
        await asyncio.to_thread(RECORDER.flush)
        await asyncio.wait(later)
        await asyncio.to_thread(self._app.responses.close)
        await asyncio.to_thread(self._app.batches.close)
        if (tracer := self._router.measures.tracer) is not None:
            await asyncio.to_thread(tracer.close)
        await self._channel.close()
        return 0

    def _follow_rules(self) -> None:
        rules = self._router.access.rules
        RECORDER.on = rules.log_requests
        Http.write_timeout_s = rules.write_timeout_s
        Http.bodies.limit_bytes = max(rules.max_queue_bytes, self._settings.max_body_bytes)

    def _on_message(self, message: ToGateway | CertificateUpdate) -> None:
        match message:
            case CertificateUpdate(stamp, certificate, key):
                if self._tls is not None:
                    self._tls.load_from_memory(stamp, certificate + b"\n" + key)
            case Topology():
                self._router.apply_topology(message)
                if self._tls is not None:
                    self._tls.renew(message.access.certificate)
                self._serial = message.serial
                self._channel.send(TopologyApplied(message.serial))
                self._told.set()
                self._reporter.stir()
            case Ping():
                self._channel.send(TopologyApplied(self._serial))
                self._reporter.look_at_rest()
                self._pinged.set_result(None)
                self._pinged = self._loop.create_future()
            case KeyUsage():
                self._router.access.add_usage(message)
            case KeyBudgets():
                self._router.access.apply_budgets(message)
            case SourceReport():
                self._router.add_source_report(message)
            case Renew(credentials):
                assert self._settings.reach.identity is not None  # else none is sent
                self._settings.reach.identity.renew(credentials)
            case Drain():
                self._router.drain()
                self._loop.create_task(self._stop_when_idle())
            case Stop():
                self._end()

    async def _stop_when_idle(self) -> None:
        await self._router.idle.wait()
        while self._doors and self._doors.are_used():  # noqa: ASYNC110 - answers go one by one
            await asyncio.sleep(_LOOK_EVERY_S)
        self._end()

    def _end(self) -> None:
        self._told.set()
        if not self._stop.done():
            self._stop.set_result(None)

    def _on_eof(self, error: Exception | None) -> None:
        if self._stop.done():
            return
        log.error("supervisor_lost", error=str(error or "EOF"))
        if isinstance(self._channel, TcpChannel):
            self._end()  # no supervisor has reconnected in time
        elif self._settings.outlive is None:
            end_group()
        else:
            self._orphaned = self._loop.create_task(self._serve_on(*self._settings.outlive))

    async def _serve_on(self, heir: Path, grace_s: float) -> None:
        """Serve by the last topology until the next supervisor's gateways serve, or time is up."""
        self._heir = await await_heir(heir, self._settings.listen_fds, grace_s)
        if self._heir is not None and self._doors is not None:
            self._doors.close()  # the successors listen on the port, too
            while self._router.in_flight:  # noqa: ASYNC110 - connections go one by one
                await asyncio.sleep(_LOOK_EVERY_S)
            self._router.drain()
            await self._stop_when_idle()
        self._end()

    # ---- the UI

    async def _bring_up_ui(self) -> None:
        """Import Gradio off the event loop and serve it under /ui.

        Only the first gateway of a machine does; the others forward to it through a Unix socket. A
        gateway without such a socket serves its own.
        """
        try:
            if self._settings.ui_socket is None or self._settings.name.endswith("/0"):
                await self._serve_ui()
            else:
                await self._borrow_ui()
        except Exception:
            log.exception("ui_failed")
            self._app.ui_state = "the UI failed to start; see the gateway's log"

    async def _serve_ui(self) -> None:
        from servekit.gateway.ui.app import build_app

        limit = self._settings.max_body_bytes
        ui = await asyncio.to_thread(build_app, self._router, self._app.supervisor, limit)
        await ui.startup()
        self._app.ui = ui.app
        keep_out_of_collections()
        path = self._settings.ui_socket
        if path is None:
            return
        path.unlink(missing_ok=True)
        try:
            async with contextlib.AsyncExitStack() as servers:
                while not self._stop.done():
                    if not path.exists():  # at first, and after somebody has removed it
                        with contextlib.suppress(FileNotFoundError):  # no directory
                            app, stir = ErrorMiddleware(ui.app, log), self._reporter.stir
                            ui_server = serving(app, _bound(path), stir=stir)
                            await servers.enter_async_context(ui_server)
                    # no timer of its own: each wake-up costs power
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait((self._stop, self._pinged), return_when=first)
        finally:
            await ui.shutdown()  # else the streams of open pages delay the end

    async def _borrow_ui(self) -> None:
        from servekit.gateway.http.unix_proxy import UnixProxy

        assert self._settings.ui_socket is not None
        limit = self._settings.max_body_bytes
        self._app.ui = UnixProxy(self._settings.ui_socket, limit, self._app.show_waiting)


def _bound(path: Path) -> socket.socket:
    """Return a Unix socket bound to `path` that only this user can open. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError:
        listener.close()
        raise
    return listener


def keep_out_of_collections() -> None:
    """Exclude all present objects from garbage collection; most of them are modules.

    Requests allocate enough to trigger collections all the time, and a full one would walk the
    hundred thousand objects of the frameworks. Present garbage is never freed, but there is
    little of it.
    """
    gc.freeze()  # without a collection before, which would block the loop for tenths of a second


class Doors:
    """The listening sockets of a server, and the connections through them."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server

    def close(self) -> None:
        """Accept no more connections; each open one is closed after its next response."""
        Http.leaving = True
        for listening in self._server.servers:
            listening.close()

    def are_used(self) -> bool:
        """Return whether a client is reading a response that is partly unsent."""
        now_s = asyncio.get_running_loop().time()
        connections: Any = self._server.server_state.connections
        return any(connection.is_read(now_s) for connection in connections)


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    sock: socket.socket,
    hot: Mapping[bytes, FastHandler] | None = None,
    max_body_bytes: int = 0,
    limits: Limits = LIMITS,
    tls: ssl.SSLContext | None = None,
    also: Sequence[socket.socket] = (),
    answers: defaultdict[Any, int] | None = None,
    envelopes: Mapping[str, Envelope] | None = None,
    keep_alive_s: float = 75.0,
    stir: Callable[[], None] = lambda: None,
) -> AsyncIterator[Doors]:
    """Serve `app` with uvicorn on `sock` and the sockets `also`, as long as the context is open.

    `answers` counts the responses of `hot`, by path and status. `envelopes` has, by path, the
    formats of their errors other than OpenAI's. `stir` is called when there are connections again,
    and each second while there are any.

    uvicorn's own `serve` is not used, because it would install signal handlers.
    """
    sweep: Sweep  # of the server, which is made with this
    http = partial(
        Http, hot=hot or {}, max_body_bytes=max_body_bytes, limits=limits, answers=answers,
        envelopes=envelopes, connected=lambda: sweep.start_timer(),
    )  # fmt: skip
    server = _server(app, http, keep_alive_s)
    sweep = Sweep(server, limits, stir)
    for listening in (sock, *also):
        server.servers.append(await _listen(server, listening, tls, limits.header_s))

    try:
        yield Doors(server)
    finally:
        await server.shutdown(sockets=[sock, *also])
        sweep.stop_timer()


async def _listen(
    server: uvicorn.Server, sock: socket.socket, tls: ssl.SSLContext | None, handshake_s: float
) -> asyncio.Server:
    """Accept connections as uvicorn's `startup` does, with a time limit for TLS handshakes.

    Connections count only after it. uvicorn leaves the event loop's limit, a minute, in which a
    crowd of silent clients would hold all file descriptors.
    """
    config = server.config
    make: Any = config.http_protocol_class
    return await asyncio.get_running_loop().create_server(
        partial(make, config, server.server_state, {}),
        sock=sock,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else handshake_s,
        backlog=config.backlog,
    )


def _server(app: Any, http: Any, keep_alive_s: float) -> uvicorn.Server:
    """Return a uvicorn server; `http` creates the protocol of a connection."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=http,
        ws="none",
        lifespan="off",
        proxy_headers=False,  # see `TrustedProxies`
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # whole seconds, it says
        timeout_graceful_shutdown=1,
        backlog=2048,
    )
    config.load()
    server = uvicorn.Server(config)
    server.servers = []
    server.lifespan = config.lifespan_class(config)
    # the gateway has its own log, and invalid HTTP and forms from clients must not fill it
    for library in ("uvicorn.error", "python_multipart"):
        logging.getLogger(library).setLevel(logging.ERROR)
    return server
