"""A request on a hot route and its response, without ASGI, and a transport that joins writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from servekit.errors import ServekitError
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    JSON,
    envelope,
    error_headers,
    too_large,
)
from servekit.gateway.http.request_context import ORIGIN, WARNING, RequestContext

if TYPE_CHECKING:
    from servekit.gateway.http.protocol import Http

log: Any = structlog.get_logger("servekit.gateway")

Header = tuple[bytes, bytes]
Handler = Callable[["FastResponse"], None]

CLOSE = (b"connection", b"close")

#: Approximate upper limit for the writes of one event-loop tick that are joined.
JOIN_BYTES = 64 * 1024

_EVENT_STREAM = tuple(EVENT_STREAM)
_JSON = (JSON,)


class CoalescingTransport:
    """A transport that joins the writes of one event-loop tick into one write.

    uvicorn writes a response's head and body separately, and uvloop makes a system call of each.
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
        if self._size_bytes > JOIN_BYTES:  # so that the transport can apply back-pressure
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Send the unsent data and `data` at once, for the last write of a tick."""
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
        """Send the unsent data and close."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """Send the unsent data and close the sending side; the client may still send."""
        self._flush()
        # TLS has no half-closed connections; there the client has to close
        if not self._transport.is_closing() and self._transport.can_write_eof():
            self._transport.write_eof()

    # on a closed transport uvloop raises where asyncio does nothing

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _NullEvent:
    """A stand-in for the event of uvicorn's cycle, for which no application waits here."""

    def set(self) -> None:
        pass


class FastResponse:
    """A request on a hot route and its response, without a task or ASGI messages.

    It takes the place of uvicorn's request-response cycle, and has the attributes that uvicorn's
    protocol reads.
    """

    __slots__ = (
        "body",
        "disconnected",
        "extra",
        "flow",
        "handler",
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
    message_event = _NullEvent()

    def __init__(self, protocol: Http, handler: Handler) -> None:
        self.protocol = protocol
        self.joined = protocol.joined
        self.flow = protocol.flow
        self.handler = handler
        self.headers = protocol.headers
        self.origin = RequestContext(protocol.headers, protocol.client)
        self.path = protocol.url
        self.body: bytes | bytearray = b""
        self.response_started = False
        self.keep_alive = not protocol.leaving
        self.response_complete = False
        self.disconnected = False
        self.extra: tuple[Header, ...] = ()  # response headers that `AuthMiddleware` adds
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
            self.body = data  # nearly always the whole body
        elif isinstance(self.body, bytes):
            self.body = bytearray(self.body + data)
        else:
            self.body += data
        if len(self.body) > self.protocol.max_body_bytes:
            self.fail(too_large(self.protocol.max_body_bytes))

    def begin(self) -> None:
        self.begin_with(self.handler)

    def begin_with(self, handler: Handler) -> None:
        """Let `handler` answer; an exception of it becomes the response."""
        before = ORIGIN.set(self.origin)
        try:
            handler(self)
        except ServekitError as error:
            self.fail(error)
        except Exception:
            log.exception("unexpected_error", path=self.protocol.url.decode())
            self.fail(ServekitError("an internal error; see the logs"))
        finally:
            ORIGIN.reset(before)

    # ---- the answer

    @property
    def open(self) -> bool:
        """Return whether the response can be written to now.

        `on_writable` is called when a client that did not read reads again.
        """
        return not (self.response_complete or self.disconnected or self.flow.write_paused)

    def answer(self, body: bytes, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        """Send a JSON response in one write."""
        if self.response_complete:
            return
        head = self._head(status, (JSON, *headers) if headers else _JSON)
        self.joined.write_now(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()

    def fail(self, error: ServekitError) -> None:
        """Send OpenAI's error envelope; as the last event if the stream has begun."""
        self.body = b""  # the connection keeps this object until its next request
        if self.response_started:
            self.stream(b"data: " + envelope(error) + b"\n\n", last=True)
        else:
            self.answer(envelope(error), error.status, tuple(error_headers(error)))

    def stream(self, events: bytes, *, last: bool, now: bool = False) -> None:
        """Send server-sent events as one HTTP chunk, and with `last` end the stream.

        Empty `events` send no chunk, because an empty chunk would end the body. `now` writes at
        once, for the last write of a tick.
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
        """Send the head of a stream, before its first event."""
        self.response_started = True
        head = self._head(200, _EVENT_STREAM)
        self.protocol.transport.write(b"%btransfer-encoding: chunked\r\n\r\n" % head)

    def _head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        protocol = self.protocol
        protocol.answers[self.path, status] += 1
        head = protocol.head(status, headers if self.keep_alive else (*headers, CLOSE))
        # not part of the cached heads: these headers differ between responses
        if self.extra:
            head += b"".join(b"%b: %b\r\n" % pair for pair in self.extra)
        if self.origin.warning:
            head += b"%b: %b\r\n" % (WARNING, self.origin.warning)
        return b"%bx-request-id: %b\r\n" % (head, self.origin.id)

    def _complete(self) -> None:
        self.response_complete = True
        self.on_gone = self.on_writable = None
        if not self.keep_alive:
            self.protocol.transport.close()
        self.protocol.answered()
