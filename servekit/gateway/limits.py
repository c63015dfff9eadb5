"""What a client may make the server wait for, and keep: its header's size, its silence.

uvicorn bounds neither: its parser gathers a header line that never ends (each piece copied once
more), and its keep-alive timer covers only the time between requests. A count per segment and
one sweep a second for all connections bound both, next to free for a request that behaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from servekit.errors import RequestError
from servekit.gateway.http import JSON, envelope
from servekit.gateway.origin import Origin

#: Where the count of a header's bytes stands while a body comes, whose bytes do not count.
_BODY = -(1 << 62)
#: Where it stands after a refusal: all that comes is over the limit, and passed over.
_REFUSED = 1 << 62


class BadHttp(RequestError):
    code = "invalid_http"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


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
    sweep_every_s: float = 1.0


LIMITS = Limits()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within limits, with OpenAI's envelope for what is no HTTP."""

    limits: Limits

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self._max_header_bytes = limits.header_bytes
        self._header_bytes = 0  # of a message that has begun; see _BODY and _REFUSED
        self._body_comes = False
        self._body_since_s = 0.0  # as `_header_since_s`
        self._chunk_bytes = 0  # of the chunks of a body before this one
        self._heard_s = self.loop.time()
        # since when a header is waited for; 0 where none is, or no sweep has seen it yet
        self._header_since_s = self._heard_s
        self.upgrades = False  # the request that is being parsed asks for another protocol
        self._active: Any = None  # the cycle whose task runs; `cycle` may be a later one by now

    # ---- size

    def data_received(self, data: bytes) -> None:
        size = self._header_bytes + len(data)
        if size > self._max_header_bytes:
            self._take_slowly(data)
            return
        self._header_bytes = size
        self._heard_s = self.loop.time()
        self._parse(data)

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
        except httptools.HttpParserError:
            self.send_400_response("")

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
        super().on_headers_complete()

    def header_ends(self) -> None:
        self._header_bytes = _BODY
        self._body_comes = True

    def on_chunk_header(self) -> None:
        if self._header_bytes < 0:
            self._chunk_bytes += self._header_bytes - _BODY
        self._header_bytes = 0  # no body may follow, but trailers: a header again

    def body_goes_on(self) -> None:
        if self._header_bytes >= 0:
            self._header_bytes = _BODY

    def message_ends(self) -> None:
        self._header_bytes = 0
        self._header_since_s = self._body_since_s = 0.0
        self._chunk_bytes = 0
        self._body_comes = False

    # ---- time

    def sweep(self, now_s: float) -> None:
        """Refuse a client that has kept this connection waiting for too long."""
        if self._header_bytes >= _REFUSED:
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
        self.refuse(BadHttp("the request is not valid HTTP/1.1"))

    def refuse(self, error: RequestError) -> None:
        """Answer with the envelope if it can be told from other answers; end the connection."""
        tellable = self._tellable()
        self._header_bytes, self._heard_s = _REFUSED, self.loop.time()
        if not tellable:
            self.transport.close()
            return
        if self._body_comes:
            self._abandon(self.cycle)
        body = envelope(error)
        origin = Origin(self.headers or ())  # those that have come, of a request that has begun
        own = (
            JSON,
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            origin.header,
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
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn leaves its timer be where a client resets: for 75 s that holds us and the body
        self._unset_keepalive_if_required()
        active, self._active = self._active, None
        if active is not None and not active.response_complete:
            self._abandon(active)  # uvicorn tells only the last of pipelined requests


class Sweep:
    """One timer for all the connections of a server; it runs until `end`."""

    def __init__(self, connections: Iterable[Any], every_s: float) -> None:
        self._connections = connections
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(every_s, self._run)

    def _run(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._run)
        now_s = self._loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now_s)

    def end(self) -> None:
        self._timer.cancel()
