"""HTTP/1.1 by uvicorn, with a short way for the hot routes and one write where it makes two."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from servekit.errors import ServekitError
from servekit.gateway.http import EVENT_STREAM, JSON, envelope, error_headers, too_large
from servekit.gateway.limits import LimitedProtocol
from servekit.gateway.origin import ORIGIN, Origin

log: Any = structlog.get_logger("servekit.gateway")

Header = tuple[bytes, bytes]
Handler = Callable[["Exchange"], None]

CLOSE = (b"connection", b"close")

#: What is written within one turn of the event loop is joined up to about so much.
JOIN_BYTES = 64 * 1024


_EVENT_STREAM = tuple(EVENT_STREAM)


class Joined:
    """A transport that joins what is written within one turn of the event loop into one write.

    uvicorn writes an answer's head and its body apart, and uvloop makes a system call of each at
    once: a tenth of a short request's time.
    """

    __slots__ = ("_loop", "_size_bytes", "_transport", "_unsent")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > JOIN_BYTES:  # let the transport say when it is too much
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Send what is left and this: nothing more comes in this turn."""
        if self._unsent:
            self.write(data)
            self._flush()
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        unsent, self._unsent, self._size_bytes = self._unsent, [], 0
        if unsent and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def close(self) -> None:
        """Send what is left and close."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """Send what is left and say that it was all; the client may still send."""
        self._flush()
        # TLS has no half-closed connections; there the client is left to close it
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    # a client may be gone before its requests are done: uvloop raises, asyncio does not

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Nobody:
    """Stands where uvicorn's cycle has an event that its application waits for."""

    def set(self) -> None:
        pass


class Exchange:
    """One request on a hot route and its answer: no task, no ASGI messages.

    It stands where uvicorn keeps its request-response cycle, and has the attributes that
    uvicorn's protocol looks at.
    """

    __slots__ = (
        "body",
        "disconnected",
        "extra",
        "handler",
        "flow",
        "headers",
        "joined",
        "keep_alive",
        "on_gone",
        "on_writable",
        "origin",
        "path",
        "protocol",
        "response_complete",
        "response_started",
    )
    message_event = _Nobody()

    def __init__(self, protocol: Http, handler: Handler) -> None:
        self.protocol = protocol
        self.joined = protocol.joined
        self.flow = protocol.flow
        self.handler = handler
        self.headers = protocol.headers
        self.origin = Origin(protocol.headers)
        self.path = protocol.url
        self.body: bytes | bytearray = b""
        self.response_started = False
        self.keep_alive = not protocol.leaving
        self.response_complete = False
        self.disconnected = False
        self.extra: tuple[Header, ...] = ()  # more headers of the answer, the gate's
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def header(self, wanted: bytes) -> bytes:
        for name, value in self.headers:
            if name == wanted:
                return value
        return b""

    # ---- the request

    def receive(self, data: bytes) -> None:
        if not self.body:
            self.body = data  # nearly always all of it
        elif isinstance(self.body, bytes):
            self.body = bytearray(self.body + data)
        else:
            self.body += data
        if len(self.body) > self.protocol.max_body_bytes:
            self.fail(too_large(self.protocol.max_body_bytes))

    def begin(self) -> None:
        self.begin_with(self.handler)

    def begin_with(self, handler: Handler) -> None:
        """Have `handler` answer; what goes wrong there is the answer."""
        before = ORIGIN.set(self.origin)
        try:
            handler(self)
        except ServekitError as error:
            self.fail(error)
        except Exception:
            log.exception("unexpected error", path=self.protocol.url.decode())
            self.fail(ServekitError("an internal error; see the logs"))
        finally:
            ORIGIN.reset(before)

    # ---- the answer

    @property
    def open(self) -> bool:
        """Something can be written now; if not as the client does not read, see `on_writable`."""
        return not (self.response_complete or self.disconnected or self.flow.write_paused)

    def answer(self, body: bytes, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        """A JSON body, in one write."""
        if self.response_complete:
            return
        head = self._head(status, (JSON, *headers))
        self.joined.write_now(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()

    def fail(self, error: ServekitError) -> None:
        """OpenAI's error envelope; an event of its own once a stream has begun."""
        if self.response_started:
            self.stream(b"data: " + envelope(error) + b"\n\n", last=True)
        else:
            self.answer(envelope(error), error.status, tuple(error_headers(error)))

    def stream(self, events: bytes, *, last: bool, now: bool = False) -> None:
        """Some server-sent events, as one chunk; none at all is no chunk, for that would end it.

        `now`: nothing more comes in this turn.
        """
        if self.response_complete:
            return
        if not self.response_started:
            self.begin_stream()
        data = b"%x\r\n%b\r\n" % (len(events), events) if events else b""
        if last:
            data += b"0\r\n\r\n"
        if not data:
            return
        if now:
            self.joined.write_now(data)
        else:
            self.protocol.transport.write(data)
        if last:
            self._complete()

    def begin_stream(self) -> None:
        """Send the head of a stream, before there is anything else to send."""
        self.response_started = True
        head = self._head(200, _EVENT_STREAM)
        self.protocol.transport.write(b"%btransfer-encoding: chunked\r\n\r\n" % head)

    def _head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        self.protocol.answers[self.path, status] += 1
        head = self.protocol.head(status, headers if self.keep_alive else (*headers, CLOSE))
        # not among the heads that are kept: these differ from answer to answer
        if self.extra:
            head += b"".join(b"%b: %b\r\n" % pair for pair in self.extra)
        return b"%bx-request-id: %b\r\n" % (head, self.origin.id)

    def _complete(self) -> None:
        self.response_complete = True
        self.on_gone = self.on_writable = None
        if not self.keep_alive:
            self.protocol.transport.close()
        self.protocol.on_response_complete()


class Http(LimitedProtocol):
    """uvicorn's protocol; a plain POST to a path in `hot` becomes an Exchange instead."""

    leaving: ClassVar[bool] = False  # every connection of this process ends with its next answer

    def __init__(
        self,
        *args: Any,
        hot: Mapping[bytes, Handler],
        max_body_bytes: int,
        answers: defaultdict[Any, int] | None = None,
        **kwargs: Any,
    ) -> None:
        """`answers` counts those of hot routes, by path and status."""
        super().__init__(*args, **kwargs)
        self.answers = defaultdict(int) if answers is None else answers
        self.max_body_bytes = max_body_bytes
        self._hot = hot
        # the last one; `cycle` may be another by now, which came while this one is being answered
        self._exchange: Exchange | None = None
        self._heads: dict[Any, bytes] = {}
        self._heads_of: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.joined = Joined(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, self.joined))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnected = True
            if isinstance(cast(Any, self.cycle), Exchange):
                # they hold each other, and would wait for the collector, which comes rarely
                self.cycle = cast(Any, None)
            gone = exchange.on_gone
            exchange.on_gone = exchange.on_writable = None  # so do they
            if gone is not None:
                gone()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None and self._exchange.on_writable is not None:
            self._exchange.on_writable()

    def head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        """Status line and headers, the server's own (the date) included; kept while they last."""
        defaults = self.server_state.default_headers
        if defaults is not self._heads_of:
            self._heads, self._heads_of = {}, defaults
        key = (status, headers)
        head = self._heads.get(key)
        if head is None:
            lines = b"".join(b"%b: %b\r\n" % pair for pair in (*defaults, *headers))
            head = self._heads[key] = STATUS_LINE[status] + lines
        return head

    # ---- parser callbacks

    def on_headers_complete(self) -> None:
        handler = self._hot.get(self.url)
        if handler is None or not self._is_plain():
            super().on_headers_complete()
            return
        self.header_ends()
        self._exchange = exchange = Exchange(self, handler)
        self.cycle = cast(Any, exchange)
        declared = exchange.header(b"content-length")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            exchange.fail(too_large(self.max_body_bytes))

    def _is_plain(self) -> bool:
        parser = self.parser
        return (
            parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused  # ASGI waits with the answer to a client that is slow
        )

    def on_body(self, body: bytes) -> None:
        self.body_goes_on()
        exchange: Any = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_body(body)
        elif not exchange.response_complete:
            exchange.receive(body)

    def on_message_complete(self) -> None:
        if self.upgrades:  # it will be parsed anew
            return
        self.message_ends()
        exchange: Any = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_message_complete()
        elif not exchange.response_complete:
            exchange.begin()
