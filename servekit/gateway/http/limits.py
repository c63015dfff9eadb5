"""Limits on slow or large requests: header size, body time and memory, unread responses.

uvicorn bounds neither size nor time: its parser collects a header line that never ends, and its
keep-alive timer covers only the time between requests. A byte count per segment and one sweep a
second over all connections bound both, at nearly no cost for a normal request.

Bodies in transfer are bounded together: over the bound the slowest of the large ones is refused,
so that many half-sent bodies do not lock other clients out.

The same sweep ends the connection of a client that does not read its response. A client that only
closes its sending side after a request (`nc -N`) gets its response. It looks like a client that has
left, so it is sent bytes that mean nothing: a kernel whose socket is closed replies with a reset.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
import struct
import termios
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from servekit.errors import RequestError
from servekit.gateway.http.asgi import (
    JSON,
    ASGIApp,
    Receive,
    Scope,
    Send,
    envelope,
    error_headers,
)
from servekit.gateway.http.request_context import RequestContext
from servekit.system.timers import next_tick_s

if TYPE_CHECKING:
    import uvicorn

log: Any = structlog.get_logger("servekit.gateway")

#: Start value of the header byte count during a body, so that the body stays below the limit.
_BODY = -(1 << 62)
#: Value of the count after a refusal, so that all further data is over the limit and dropped.
_REFUSED = 1 << 62
#: Allowed bytes of chunk framing for each byte of content; a one-byte chunk needs five.
_FRAMING = 8
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: A leading zero of the next chunk's size, or of the last one's: RFC 9112, section 7.1.
_LEADING_ZERO = b"0"
_EVENTS, _EVENT_COMMENT = b"text/event-stream", b":\n\n"
#: Delay after such bytes before the first check for a reset; each sweep checks again.
_RESET_WITHIN_S = 0.02
#: `struct linger` (l_onoff, l_linger) that makes a close send a reset.
_RESET = struct.pack("ii", 1, 0)
#: Paths that are served whatever the number of connections: health checks decide on restarts.
VITAL = (b"/livez", b"/readyz", b"/health", b"/v1/health", b"/ping")
_TELL_EVERY_S = 10.0
#: How long a client may take nothing of its response, before the end of the gateway waits no more.
READS_WITHIN_S = 3.0


class BadHttp(RequestError):
    """The request is not HTTP/1.1. Look at the client, or at a proxy between."""

    code = "invalid_http"


class RequestTimeout(RequestError):
    """The header or the body came too slowly. Send the request again."""

    status = 408
    code = "request_timeout"


class TooManyConnections(RequestError):
    """The gateway has as many connections as its file descriptors allow. Close idle ones, or raise
    the limit of open files.
    """

    status = 503
    code = "too_many_connections"


class TooManyBodies(RequestError):
    """Bodies that are being sent hold all the memory there is for them. Send the request again
    after `Retry-After`.
    """

    status = 503
    code = "too_many_bodies"


class HeaderTooLarge(RequestError):
    """The header is over the limit of 64 KiB. Send a shorter one."""

    status = 431
    code = "header_too_large"


#: File descriptors reserved for workers, logs, pages and spare connections; at most a quarter.
_KEPT_FILES = 256


def _files() -> tuple[int, int]:
    """Return how many files this process may open, and how many of them clients do not get."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files, min(_KEPT_FILES, files // 4)


def _most_connections() -> int:
    files, kept = _files()
    return files - kept


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a connection: `header_s` for a whole header, `body_s` for silence in a body.

    A body may take `body_s` plus the time of its bytes at `body_bytes_per_s`.
    """

    header_bytes: int = 64 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    #: Time and bytes for a refused client to read its error: closing at once may send a reset.
    linger_s: float = 2.0
    linger_bytes: int = 1024 * 1024
    #: Limit for the rest of a body whose request has been answered already.
    unread_bytes: int = 64 * 1024 * 1024
    sweep_every_s: float = 1.0
    #: Above `most_connections` only `VITAL` paths are served, and idle connections are closed. Of
    #: the spare ones above it the oldest is closed for each over `most_spares`: without a file
    #: descriptor for the next connection, the kernel's queue would be closed, health checks too.
    most_connections: int = field(default_factory=_most_connections)
    most_spares: int = field(default_factory=lambda: _files()[1] // 4)


LIMITS = Limits()


class Bodies:
    """The request bodies in transfer on all connections of this process."""

    def __init__(self) -> None:
        self.limit_bytes = 256 * 2**20
        self.size_bytes = 0
        self.senders: set[LimitedProtocol] = set()
        self._tell_at_s = 0.0

    def make_room(self, now_s: float) -> None:
        """Refuse the slowest body of at least half the average size, until the rest fits.

        Smaller bodies would free little; the larger ones hold at least half of the total. A single
        body is never refused here: its own limit bounds it.
        """
        while self.size_bytes > self.limit_bytes and len(self.senders) > 1:
            if now_s >= self._tell_at_s:
                self._tell_at_s = now_s + _TELL_EVERY_S
                log.warning("too_many_bodies", bodies=len(self.senders))
            large_bytes = self.size_bytes / len(self.senders) / 2
            large = [one for one in self.senders if one.held_bytes >= large_bytes]
            slowest = min(large, key=lambda one: one.body_bytes_per_s(now_s))
            said = f"bodies that are being sent hold {self.limit_bytes // 2**20} MiB already"
            slowest.refuse(TooManyBodies(f"{said}; try later", retry_after_s=1.0))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within limits; answers invalid HTTP with OpenAI's error envelope."""

    limits: Limits
    #: Seconds without any progress in sending a response, after which the connection ends.
    write_timeout_s: ClassVar[float] = 60.0
    spares: ClassVar[dict[LimitedProtocol, None]] = {}  # oldest first
    bodies: ClassVar[Bodies] = Bodies()

    def __init__(
        self, *args: Any, limits: Limits, connected: Callable[[], None], **kwargs: Any
    ) -> None:
        """Create the protocol; `connected` is called when its connection is made."""
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._connected = connected
        self.url = b""  # of the last request
        self.headers_by_name: dict[bytes, bytes] = {}  # likewise
        self._max_header_bytes = limits.header_bytes
        self._header_bytes = 0  # of the current message; see _BODY and _REFUSED
        self._body_comes = False
        self._body_since_s = 0.0  # set by the first sweep during the body
        self._chunk_bytes = 0  # of the body's earlier chunks
        self._heard_s = self.loop.time()
        self._content_bytes = 0  # of the body, without chunk framing
        self._unread_bytes = 0  # of a body whose request has been answered
        self.held_bytes = 0  # of the body, as counted in `bodies`
        self._held_since_s = 0.0
        self._unsent = 0, 0  # unsent bytes here and in the kernel, at the last sweep
        self._moved_s = self._heard_s  # when `_unsent` last made progress
        self._spare = False  # it was opened above the connection limit, which holds still
        self._half_closed = False  # the client has closed its sending side
        # start of the wait for a header; 0 if there is none, or no sweep has seen it yet
        self._header_since_s = self._heard_s
        self.upgrades = False  # the current request asks for another protocol
        self._active: Any = None  # the cycle whose task runs; `cycle` may be a later one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connected()
        if len(self.connections) > self.limits.most_connections:
            self._spare = True
            self.spares[self] = None
            if len(self.spares) > self.limits.most_spares:
                oldest = next(iter(self.spares))
                del self.spares[oldest]
                oldest.transport.abort()

    # ---- size

    def data_received(self, data: bytes) -> None:
        size = self._header_bytes + len(data)
        if size > self._max_header_bytes:
            self._take_slowly(data)
            return
        self._header_bytes = size
        self._heard_s = self.loop.time()
        self._parse(data)
        if self._body_comes:
            self._check_body(len(data))

    def _check_body(self, size_bytes: int) -> None:
        """Bound the body's chunk framing, and the bytes that come after the response."""
        content_bytes = self._content_bytes
        around_bytes = self._body_bytes() - content_bytes
        if around_bytes > self._max_header_bytes + _FRAMING * content_bytes:
            self.refuse(BadHttp("the body's chunks have too many extra bytes"))
        elif self.cycle is not None and self.cycle.response_complete:
            self._unread_bytes += size_bytes
            self._let_go()
            if self._unread_bytes > self.limits.unread_bytes:
                self.transport.abort()
        elif content_bytes and self._header_bytes < _REFUSED:
            self._count_body_bytes(content_bytes)

    def _count_body_bytes(self, size_bytes: int) -> None:
        """Count `size_bytes` of the unfinished body in `bodies`."""
        bodies = self.bodies
        if not self.held_bytes:
            self._held_since_s = self._heard_s
            bodies.senders.add(self)
        bodies.size_bytes += size_bytes - self.held_bytes
        self.held_bytes = size_bytes
        if bodies.size_bytes > bodies.limit_bytes:
            bodies.make_room(self._heard_s)

    def _let_go(self) -> None:
        if self.held_bytes:
            self.bodies.size_bytes -= self.held_bytes
            self.bodies.senders.discard(self)
            self.held_bytes = 0

    def body_bytes_per_s(self, now_s: float) -> float:
        return self.held_bytes / max(now_s - self._held_since_s, 1e-3)

    def _take_slowly(self, data: bytes) -> None:
        """Parse up to the header limit, and the rest only if the header ended within it."""
        room = self._max_header_bytes - self._header_bytes
        if self._header_bytes >= _REFUSED:
            self._pass_over(len(data))
            return
        if room <= 0:
            limit = self._max_header_bytes
            self.refuse(HeaderTooLarge(f"the header is over the limit of {limit} bytes"))
            return
        self.data_received(data[:room])
        if self.parser is not None and not self.transport.is_closing():
            self.data_received(data[room:])

    def _pass_over(self, size_bytes: int) -> None:
        self._header_bytes += size_bytes
        if self._header_bytes > _REFUSED + self.limits.linger_bytes:
            self.transport.abort()

    # ---- other protocols

    def _parse(self, data: bytes) -> None:
        """Parse as uvicorn's `data_received`, but ignore upgrade requests."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.upgrades:
                self._parse_anew(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            wrong = error.__context__
            self.refuse(wrong if isinstance(wrong, RequestError) else _no_http())

    def _parse_anew(self, rest: bytes) -> None:
        """Parse the request again without its upgrade header.

        The parser would take the body for data of the other protocol. Java's HTTP client asks for
        h2c with every unencrypted POST.
        """
        self.upgrades = False
        parser, self.parser = self.parser, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        version = parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self._header_bytes = 0
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self.upgrades = True
            return
        self.header_ends()
        try:
            super().on_headers_complete()
        except (httptools.HttpParserError, ValueError):  # invalid URL, before a cycle was created
            self._body_comes = False
            raise

    def header_ends(self) -> None:
        """Check the parsed header. Raises BadHttp and TooManyConnections.

        Host must come exactly once: a proxy might use another of several values than we do.
        """
        self.headers_by_name = by_name = dict(self.headers)
        if len(by_name) == len(self.headers):
            hosts = int(b"host" in by_name)
        else:
            hosts = [name for name, _ in self.headers].count(b"host")
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            raise BadHttp(f"the Host header must come once, and came {hosts} times")
        if self._spare and self.url.partition(b"?")[0] not in VITAL:
            if len(self.connections) > self.limits.most_connections:
                raise TooManyConnections(
                    "too many clients are connected; try later", retry_after_s=1.0
                )
            self._spare = False
            self.spares.pop(self, None)
        self._header_bytes = _BODY
        self._body_comes = True

    def on_chunk_header(self) -> None:
        if self._header_bytes < 0:
            self._chunk_bytes += self._header_bytes - _BODY
        self._header_bytes = 0  # the last chunk has no body but trailers, which count as header

    def body_goes_on(self, size_bytes: int) -> None:
        self._content_bytes += size_bytes
        if self._header_bytes >= 0:
            self._header_bytes = _BODY

    def message_ends(self) -> None:
        self._header_bytes = 0
        self._header_since_s = self._body_since_s = 0.0
        self._chunk_bytes = self._content_bytes = self._unread_bytes = 0
        self._body_comes = False
        self._let_go()

    # ---- time

    def sweep(self, now_s: float) -> None:
        """Refuse or disconnect a client that has exceeded a time limit."""
        if self._stalls(now_s):
            log.warning("client_not_reading", address=self.client, unsent_bytes=self._unsent[0])
            # else the kernel keeps the unsent response for minutes
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self.transport.abort()
        elif self._half_closed and self._look_for_reset():
            return
        elif self._header_bytes >= _REFUSED:
            answering = self._answering() and not self.cycle.disconnected
            if not answering and now_s - self._heard_s > self.limits.linger_s:
                self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._body_comes:
            self._sweep_body(now_s)
        elif self._answering():
            self._header_since_s = 0.0  # a pipelined request has no time limit yet
        elif self._header_bytes and not self._header_since_s:
            self._header_since_s = now_s
        elif self._header_since_s and now_s - self._header_since_s > self.limits.header_s:
            self._refuse_header()

    def close_idle(self, now_s: float) -> None:
        """Close the connection if it has been idle for a sweep, to make room for others."""
        waits = self._header_bytes or self._body_comes or self._answering()
        if not waits and now_s - self._heard_s > self.limits.sweep_every_s:
            self.transport.close()

    def _stalls(self, now_s: float) -> bool:
        """Return whether an unsent response has made no progress for `write_timeout_s`.

        The kernel accepts more only once much of its buffer, maybe megabytes, is free again.
        The fill of that buffer therefore tells whether a slow client reads.
        """
        waiting_bytes = self.transport.get_write_buffer_size()
        if not waiting_bytes:
            self._moved_s = now_s
            return False
        before, self._unsent = self._unsent, (waiting_bytes, self._kernel_bytes())
        if waiting_bytes < before[0] or self._unsent[1] != before[1]:
            self._moved_s = now_s
        return now_s - self._moved_s > self.write_timeout_s

    def is_read(self, now_s: float) -> bool:
        """Return whether a response is partly unsent, and its client reads it."""
        unsent = self.transport.get_write_buffer_size() > 0
        return unsent and now_s - self._moved_s < READS_WITHIN_S

    def _kernel_bytes(self) -> int:
        """Return the bytes in the kernel's send queue that the client has not acknowledged."""
        found = bytearray(4)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, found)
        except (OSError, AttributeError):  # the socket is closed
            return 0
        return int.from_bytes(found, "little")

    def _sweep_body(self, now_s: float) -> None:
        limit_s, since_s = self.limits.body_s, self._body_since_s
        if self.flow.read_paused:  # the application does not read, the client may have sent
            self._heard_s, self._body_since_s = now_s, 0.0
        elif now_s - self._heard_s > limit_s:
            self.refuse(RequestTimeout(f"nothing of the body was received for {limit_s:g} s"))
        elif not since_s:
            self._body_since_s = now_s
        elif now_s - since_s > limit_s + self._body_bytes() / self.limits.body_bytes_per_s:
            self.refuse(RequestTimeout("the body came too slowly"))

    def _body_bytes(self) -> int:
        """Return the bytes received of the body, including chunk framing."""
        return self._chunk_bytes + (self._header_bytes - _BODY if self._header_bytes < 0 else 0)

    def _refuse_header(self) -> None:
        if not self._header_bytes:  # not a single byte came: there is no request to answer
            self.transport.close()
            return
        limit_s = self.limits.header_s
        self.refuse(RequestTimeout(f"the header was not complete within {limit_s:g} s"))

    # ---- refusing

    def send_400_response(self, msg: str) -> None:
        self.refuse(_no_http())

    def refuse(self, error: RequestError) -> None:
        """End the connection, with an error response if the client can match it to the request.

        Whole requests before it are answered first: their senders count bodies wrongly, perhaps.
        """
        tellable = self._tellable()
        self._header_bytes, self._heard_s = _REFUSED, self.loop.time()
        if self._body_comes:
            self._let_go()
            self.cycle.body = bytearray()  # frees memory while the connection lingers
        if not tellable:
            if self._answering() and not self._body_comes:
                self.cycle.keep_alive = False
            else:
                self.transport.close()
            return
        if self._body_comes:
            self._abandon(self.cycle)
        body = self.encode_refusal(error)
        origin = RequestContext(dict(self.headers or ()))  # the headers parsed so far
        own = (
            JSON,
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            origin.header,
            *error_headers(error),
        )
        lines = [b"%b: %b\r\n" % pair for pair in (*self.server_state.default_headers, *own)]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.transport.write_eof()

    def encode_refusal(self, error: RequestError) -> bytes:
        return envelope(error)

    def _tellable(self) -> bool:
        """Return whether the client would take a response now for that of the refused request."""
        if self.transport.is_closing() or self.pipeline:
            return False
        if not self._body_comes:
            return not self._answering()
        cycle: Any = self.cycle
        return not (cycle.response_started or cycle.response_complete)

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @staticmethod
    def _abandon(cycle: Any) -> None:
        cycle.disconnected = True
        cycle.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    # ---- half-closed connections

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True, which keeps the connection open, if the client may wait for a response."""
        cycle: Any = self.cycle
        if (
            self._body_comes
            or cycle is None
            or cycle.response_complete
            or self.scheme == "https"  # TLS cannot be half-closed
        ):
            self.transport.close()  # our transport flushes first
            return False
        self._half_closed = True
        cycle.keep_alive = False  # no further request can come
        if not self.pipeline and (probe := self._choose_probe(cycle)):
            self.transport.write(probe)
            self.loop.call_later(_RESET_WITHIN_S, self._look_for_reset)
        return True

    def _choose_probe(self, cycle: Any) -> bytes:
        """Return bytes that a client which still reads passes over; b"" if there are none."""
        if cycle.response_started:
            if cycle.chunked_encoding:
                return _LEADING_ZERO
            return _EVENT_COMMENT if getattr(cycle, "sends_events", False) else b""
        old = self.parser.get_http_version() == "1.0"  # HTTP/1.0 has no interim responses
        return b"" if old else _CONTINUE

    def _look_for_reset(self) -> bool:
        """Abort and return True if the client's kernel has reset the connection.

        Reading is over after EOF, so the event loop does not notice the reset by itself.
        """
        if self.transport.is_closing():
            return False
        error = self.transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        )
        if error:
            self.transport.abort()
        return bool(error)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.spares.pop(self, None)
        self._let_go()
        # uvicorn does not cancel its timer on a reset; until it fires, it would keep the body alive
        self._unset_keepalive_if_required()
        active, self._active = self._active, None
        if active is not None and not active.response_complete:
            self._abandon(active)  # uvicorn notifies only the last pipelined request


def _no_http() -> BadHttp:
    return BadHttp("the request is not valid HTTP/1.1")


def _without_chunks(cycle: Any, app: ASGIApp) -> ASGIApp:
    """Wrap `app` for an HTTP/1.0 client, which knows no chunks: EOF ends an unmeasured body."""

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        measured = False

        def sending(message: Any) -> Awaitable[None]:
            nonlocal measured
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                measured = b"content-length" in headers
                cycle.sends_events = headers.get(b"content-type", b"").startswith(_EVENTS)
                if not measured:
                    cycle.chunked_encoding = False
            elif not measured:
                cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        await app(scope, receive, sending)

    return unchunked


class Sweep:
    """Sweeps a server's connections, and renews the `date` of its responses, while it has any.

    uvicorn's own `main_loop`, which sets the date, wakes up ten times a second for ever.
    """

    def __init__(self, server: uvicorn.Server, limits: Limits, stir: Callable[[], None]) -> None:
        """Create the sweep; `stir` is called when it starts, and each time that it runs."""
        self._stir = stir
        self._state = server.server_state
        self._headers = server.config.encoded_headers
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tell_at_s = 0.0

    def start_timer(self) -> None:
        """Call it for each new connection."""
        if self._timer is None:
            self._set_timer()
            self._stir()

    def _set_timer(self) -> None:
        date = formatdate(time.time(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._headers]
        wait_s = next_tick_s(self._limits.sweep_every_s, self._loop.time())
        self._timer = self._loop.call_later(wait_s, self._run)

    def _run(self) -> None:
        self._timer = None
        self._stir()
        if self._state.connections:
            self._set_timer()
        now_s = self._loop.time()
        connections: tuple[Any, ...] = tuple(self._state.connections)
        most = self._limits.most_connections
        crowded = len(connections) > most
        if crowded and now_s >= self._tell_at_s:
            self._tell_at_s = now_s + _TELL_EVERY_S
            log.warning("too_many_connections", connections=len(connections), at_most=most)
        for connection in connections:
            connection.sweep(now_s)
            if crowded:
                connection.close_idle(now_s)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
