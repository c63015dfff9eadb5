"""What a client may make the server wait for, and keep: its header's size, its silence.

uvicorn bounds neither: its parser gathers a header line that never ends (each piece copied once
more), and its keep-alive timer covers only the time between requests. A count per segment and
one sweep a second for all connections bound both, next to free for a request that behaves.

Bodies that are still coming are bounded together: over the bound the slowest of the large ones
is refused, so that many half-sent ones keep nobody else out.

The same sweep ends the connection of a client that does not read its answer. A client that closes
its sending side alone after a request (`nc -N`) gets its answer, though that looks like one that
has left: an interim response tells them apart, for to a closed socket the kernel answers a reset.
"""

from __future__ import annotations

import asyncio
import fcntl
import resource
import socket
import struct
import termios
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

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

log: Any = structlog.get_logger("servekit.gateway")

#: Where the count of a header's bytes stands while a body comes, whose bytes do not count.
_BODY = -(1 << 62)
#: Where it stands after a refusal: all that comes is over the limit, and passed over.
_REFUSED = 1 << 62
#: Bytes around the chunks of a body for each byte in them: one of a single byte has five.
_FRAMING = 8
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: How soon after an interim response its reset is looked for; then with each sweep.
_RESET_WITHIN_S = 0.02
#: To close with a reset: l_onoff and l_linger of `struct linger`.
_RESET = struct.pack("ii", 1, 0)
#: What is answered however many are connected: who asks this would restart the service.
VITAL = (b"/livez", b"/readyz", b"/health", b"/v1/health", b"/ping")
_TELL_EVERY_S = 10.0
#: Pages of the browser: nobody else asks for them, and browsers close both sides.
_PAGES = (b"/ui/", b"/ui?")


class BadHttp(RequestError):
    code = "invalid_http"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class TooManyConnections(RequestError):
    status = 503
    code = "too_many_connections"


class TooManyBodies(RequestError):
    status = 503
    code = "too_many_bodies"


class HeaderTooLarge(RequestError):
    status = 431
    code = "header_too_large"


@dataclass(frozen=True, slots=True)
class Limits:
    """`header_s` is for a whole header; `body_s` for silence within a body.

    A body may take `body_s` in all, and as much longer as it takes at `body_bytes_per_s`.
    """

    header_bytes: int = 64 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    #: What a refused client may take, and send, until it reads why: closing at once may reset it.
    linger_s: float = 2.0
    linger_bytes: int = 1024 * 1024
    #: What may come of a body that is not read, since its request has been answered already.
    unread_bytes: int = 64 * 1024 * 1024
    sweep_every_s: float = 1.0


LIMITS = Limits()

#: File descriptors for workers, logs and pages, which are not for clients; of few, an eighth.
_KEPT_FILES = 256


def most_connections() -> int:
    """How many clients may be connected at once, by this process's limit on open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files - min(_KEPT_FILES, files // 8)


class Bodies:
    """The bodies that clients are sending, of all connections of this process together."""

    def __init__(self) -> None:
        self.limit_bytes = 256 * 2**20
        self.size_bytes = 0
        self.senders: set[LimitedProtocol] = set()
        self._tell_at_s = 0.0

    def make_room(self, now_s: float) -> None:
        """Refuse the slowest of those who have sent half an average body, until the rest fits.

        Smaller ones free next to nothing; the larger ones hold at least half of all. One that is
        alone has its own bound.
        """
        while self.size_bytes > self.limit_bytes and len(self.senders) > 1:
            if now_s >= self._tell_at_s:
                self._tell_at_s = now_s + _TELL_EVERY_S
                log.warning("too many bodies at once", bodies=len(self.senders))
            large_bytes = self.size_bytes / len(self.senders) / 2
            large = [one for one in self.senders if one.held_bytes >= large_bytes]
            slowest = min(large, key=lambda one: one.body_bytes_per_s(now_s))
            said = f"bodies that are being sent hold {self.limit_bytes // 2**20} MiB already"
            slowest.refuse(TooManyBodies(f"{said}; try later", retry_after_s=1.0))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within limits, with OpenAI's envelope for what is no HTTP."""

    limits: Limits
    #: How long none of an answer may leave for its client before the connection ends, s.
    write_timeout_s: ClassVar[float] = 60.0
    #: With more than these connected only `VITAL` is answered, and idle ones are closed.
    most_connections: ClassVar[int] = most_connections()
    bodies: ClassVar[Bodies] = Bodies()

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._max_header_bytes = limits.header_bytes
        self._header_bytes = 0  # of a message that has begun; see _BODY and _REFUSED
        self._body_comes = False
        self._body_since_s = 0.0  # as `_header_since_s`
        self._chunk_bytes = 0  # of the chunks of a body before this one
        self._heard_s = self.loop.time()
        self._content_bytes = 0  # of a body, without what is around its chunks
        self._unread_bytes = 0  # of a body whose request is answered
        self.held_bytes = 0  # of a body, as counted in `bodies`
        self._held_since_s = 0.0
        self._unsent = 0, 0  # bytes that wait here, and in the kernel, at the last sweep
        self._moved_s = self._heard_s  # when these were less than before
        self._spare = False  # it came when there were too many
        self._half_closed = False  # the client sends no more, and waits for the answer
        # since when a header is waited for; 0 where none is, or no sweep has seen it yet
        self._header_since_s = self._heard_s
        self.upgrades = False  # the request that is being parsed asks for another protocol
        self._active: Any = None  # the cycle whose task runs; `cycle` may be a later one by now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._spare = len(self.connections) > self.most_connections

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
        """Bound what comes of a body and is no use: around its chunks, and after the answer."""
        content_bytes = self._content_bytes
        around_bytes = self._body_bytes() - content_bytes
        if around_bytes > self._max_header_bytes + _FRAMING * content_bytes:
            self.refuse(BadHttp("there is too much around the chunks of the body"))
        elif self.cycle is not None and self.cycle.response_complete:
            self._unread_bytes += size_bytes
            self._let_go()
            if self._unread_bytes > self.limits.unread_bytes:
                self.transport.abort()
        elif content_bytes and self._header_bytes < _REFUSED:
            self._hold(content_bytes)

    def _hold(self, size_bytes: int) -> None:
        """Count so much of a body, which has not come to its end with what was just parsed."""
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
        """Pass on no more than a header may have; it ends there, or the client is refused."""
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
        """As uvicorn's `data_received`, but for requests to upgrade, which is not done here."""
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
        """Parse the request as if it did not ask: the parser takes its body for the other protocol.

        Java's own client asks for h2c with every POST that is not encrypted.
        """
        self.upgrades = False
        parser, self.parser = self.parser, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
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
        except (httptools.HttpParserError, ValueError):  # of a URL; there is no cycle for it
            self._body_comes = False
            raise

    def header_ends(self) -> None:
        """Raise BadHttp for a host that is not said once: proxies may go by another one than we.

        And TooManyConnections.
        """
        hosts = [name for name, _ in self.headers].count(b"host")
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            raise BadHttp(f"the Host header must come once, and came {hosts} times")
        if self._spare and self.url.partition(b"?")[0] not in VITAL:
            raise TooManyConnections("too many clients are connected; try later", retry_after_s=1.0)
        self._header_bytes = _BODY
        self._body_comes = True

    def on_chunk_header(self) -> None:
        if self._header_bytes < 0:
            self._chunk_bytes += self._header_bytes - _BODY
        self._header_bytes = 0  # no body may follow, but trailers: a header again

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
        """Refuse a client that has kept this connection waiting for too long."""
        if self._stalls(now_s):
            log.warning("client does not read", address=self.client, unsent_bytes=self._unsent[0])
            # or the kernel keeps what it has of the answer for minutes
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET
            )
            self.transport.abort()
        elif self._half_closed and self._look_for_reset():
            return
        elif self._header_bytes >= _REFUSED:
            if now_s - self._heard_s > self.limits.linger_s:
                self.transport.abort()
        elif self.transport.is_closing():
            return
        elif self._body_comes:
            self._sweep_body(now_s)
        elif self._answering():
            self._header_since_s = 0.0  # a pipelined request is not waited for yet
        elif self._header_bytes and not self._header_since_s:
            self._header_since_s = now_s
        elif self._header_since_s and now_s - self._header_since_s > self.limits.header_s:
            self._refuse_header()

    def close_idle(self, now_s: float) -> None:
        """Make room for others, if nothing is under way here for a while."""
        waits = self._header_bytes or self._body_comes or self._answering()
        if not waits and now_s - self._heard_s > self.limits.sweep_every_s:
            self.transport.close()

    def _stalls(self, now_s: float) -> bool:
        """Whether an answer waits to be sent, and none of it has left for `write_timeout_s`.

        The kernel takes more only once a good part of its own buffer is free again, and that may
        be megabytes: a client that reads slowly is known by what is left there.
        """
        waiting_bytes = self.transport.get_write_buffer_size()
        if not waiting_bytes:
            self._moved_s = now_s
            return False
        before, self._unsent = self._unsent, (waiting_bytes, self._kernel_bytes())
        if waiting_bytes < before[0] or self._unsent[1] != before[1]:
            self._moved_s = now_s
        return now_s - self._moved_s > self.write_timeout_s

    def _kernel_bytes(self) -> int:
        """What the kernel has of our answers that the client's has not acknowledged."""
        found = bytearray(4)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, found)
        except (OSError, AttributeError):  # it is closed
            return 0
        return int.from_bytes(found, "little")

    def _sweep_body(self, now_s: float) -> None:
        limit_s, since_s = self.limits.body_s, self._body_since_s
        if self.flow.read_paused:  # it is the application that does not read
            self._heard_s, self._body_since_s = now_s, 0.0
        elif now_s - self._heard_s > limit_s:
            self.refuse(RequestTimeout(f"nothing of the body came for {limit_s:g} s"))
        elif not since_s:
            self._body_since_s = now_s
        elif now_s - since_s > limit_s + self._body_bytes() / self.limits.body_bytes_per_s:
            self.refuse(RequestTimeout("the body came too slowly"))

    def _body_bytes(self) -> int:
        """How much of it has come."""
        return self._chunk_bytes + (self._header_bytes - _BODY if self._header_bytes < 0 else 0)

    def _refuse_header(self) -> None:
        if not self._header_bytes:  # not a single byte: there is no request to answer
            self.transport.close()
            return
        limit_s = self.limits.header_s
        self.refuse(RequestTimeout(f"the header was not whole within {limit_s:g} s"))

    # ---- refusing

    def send_400_response(self, msg: str) -> None:
        self.refuse(_no_http())

    def refuse(self, error: RequestError) -> None:
        """Answer with the envelope if it can be told from other answers; end the connection."""
        tellable = self._tellable()
        self._header_bytes, self._heard_s = _REFUSED, self.loop.time()
        if self._body_comes:
            self._let_go()
            self.cycle.body = bytearray()  # the connection keeps this while it lingers
        if not tellable:
            self.transport.close()
            return
        if self._body_comes:
            self._abandon(self.cycle)
        body = envelope(error)
        origin = RequestContext(
            self.headers or ()
        )  # those that have come, of a request that has begun
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

    def _tellable(self) -> bool:
        """Whether what is written now would be taken for the answer to the request at fault."""
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

    # ---- a client that sends no more

    def eof_received(self) -> bool:  # type: ignore[override]
        """Stay open, as far as the client can be told from one that has left, for its answer."""
        cycle: Any = self.cycle
        if (
            self._body_comes
            or cycle is None
            or cycle.response_complete
            or self.scheme == "https"  # it has no such half
            or self.url.startswith(_PAGES)
        ):
            self.transport.close()  # ours sends what was written in this turn
            return False
        self._half_closed = True
        cycle.keep_alive = False  # it is the last one
        old = self.parser.get_http_version() == "1.0"  # knows of no interim responses
        if not (old or self.pipeline or cycle.response_started):
            self.transport.write(_CONTINUE)
            self.loop.call_later(_RESET_WITHIN_S, self._look_for_reset)
        return True

    def _look_for_reset(self) -> bool:
        """Whether the client is gone, as its kernel has said; nobody reads what it says."""
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
        self._let_go()
        # uvicorn leaves its timer be where a client resets: for 75 s that holds us and the body
        self._unset_keepalive_if_required()
        active, self._active = self._active, None
        if active is not None and not active.response_complete:
            self._abandon(active)  # uvicorn tells only the last of pipelined requests


def _no_http() -> BadHttp:
    return BadHttp("the request is not valid HTTP/1.1")


def _without_chunks(cycle: Any, app: ASGIApp) -> ASGIApp:
    """`app` for a client of HTTP/1.0, which knows of no chunks: the connection's end is the end."""

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        measured = False

        def sending(message: Any) -> Awaitable[None]:
            nonlocal measured
            if message["type"] == "http.response.start":
                measured = any(name == b"content-length" for name, _ in message.get("headers", ()))
                if not measured:
                    cycle.chunked_encoding = False
            elif not measured:
                cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        await app(scope, receive, sending)

    return unchunked


class Sweep:
    """One timer for all the connections of a server; it runs until `end`."""

    def __init__(self, connections: Iterable[Any], every_s: float) -> None:
        self._connections = connections
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(every_s, self._run)
        self._tell_at_s = 0.0

    def _run(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._run)
        now_s = self._loop.time()
        connections = tuple(self._connections)
        crowded = len(connections) > LimitedProtocol.most_connections
        if crowded and now_s >= self._tell_at_s:
            self._tell_at_s = now_s + _TELL_EVERY_S
            most = LimitedProtocol.most_connections
            log.warning("too many connections", connections=len(connections), at_most=most)
        for connection in connections:
            connection.sweep(now_s)
            if crowded:
                connection.close_idle(now_s)

    def end(self) -> None:
        self._timer.cancel()
