"""Requests and their responses: on the socket without ASGI, or over ASGI.

A handler gets a `Response`, which also holds the request, and writes to it at once or later. It
need not know which of the two it has. The fast one joins the writes of an event-loop tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from servekit.errors import ServekitError
from servekit.gateway.http.asgi import (
    JSON,
    ClientGone,
    Envelope,
    Header,
    Receive,
    Scope,
    Send,
    encode_error,
    error_headers,
    read_body,
    too_large,
)
from servekit.gateway.http.request_context import ORIGIN, WARNING, RequestContext
from servekit.gateway.telemetry.request_recorder import RECORDER

if TYPE_CHECKING:
    from servekit.gateway.http.protocol import Http

log: Any = structlog.get_logger("servekit.gateway")

Endpoint = Callable[[Scope, Receive, Send], Any]
Handler = Callable[["Response"], None]
FastHandler = Callable[["FastResponse"], None]

CLOSE = (b"connection", b"close")

#: Approximate upper limit for the writes of one event-loop tick that are joined.
JOIN_BYTES = 64 * 1024
#: A disconnect within this time of the request is noticed only then: most requests on a fast engine
#: finish before a task that watches the connection would pay off.
WATCH_AFTER_S = 0.01

_JSON = (JSON,)
#: Prefixes of HTTP chunks by size in bytes, for nearly all chunks that hold one token.
_SIZES = tuple(b"%x\r\n" % size for size in range(1024))


class Response(Protocol):
    """A request whose body has been read, and the response that a handler writes to it.

    `on_gone` is called when the client disconnects, `on_writable` when a client that did not read
    reads again. Both are dropped when the response is complete.
    """

    body: bytes | bytearray
    disconnected: bool
    response_started: bool
    on_gone: Callable[[], None] | None
    on_writable: Callable[[], None] | None

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Return the request's headers by lower-case name, the last of those that come twice."""

    @property
    def is_writable(self) -> bool:
        """Return whether the response can be written to now."""

    def send_json(self, body: bytes) -> None:
        """Send a JSON response."""

    def send_error(self, error: ServekitError) -> None:
        """Send an error response, in the format of the path's API."""

    def begin_stream(self, headers: tuple[Header, ...]) -> None:
        """Send the head of a stream."""

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream that has begun, and with `last` end the stream."""

    def abort_stream(self) -> None:
        """Disconnect within a stream, so that the client sees that it is incomplete."""


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

    def is_closing(self) -> bool:
        return self._transport.is_closing()

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
        "handler",
        "headers",
        "is_writable",
        "joined",
        "keep_alive",
        "on_gone",
        "on_writable",
        "origin",
        "path",
        "protocol",
        "response_complete",
        "response_started",
        "status",
    )
    message_event = _NullEvent()
    chunked_encoding = True  # of a stream

    def __init__(self, protocol: Http, handler: FastHandler) -> None:
        self.protocol = protocol
        self.joined = protocol.joined
        self.handler = handler
        self.headers = headers = protocol.headers_by_name
        self.origin = RequestContext(headers, protocol.client)
        self.path = protocol.url
        self.body: bytes | bytearray = b""
        self.response_started = False
        self.keep_alive = not protocol.leaving
        self.response_complete = False
        self.status = 0
        self.disconnected = False
        self.is_writable = True  # both fast paths begin only where the client reads
        self.extra: tuple[Header, ...] = ()  # response headers that `AuthMiddleware` adds
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    # ---- the request

    def receive(self, data: bytes) -> None:
        if not self.body:
            self.body = data  # nearly always the whole body
        elif isinstance(self.body, bytes):
            self.body = bytearray(self.body + data)
        else:
            self.body += data
        if len(self.body) > self.protocol.max_body_bytes:
            self.send_error(too_large(self.protocol.max_body_bytes))

    def begin(self) -> None:
        self.begin_with(self.handler)

    def begin_with(self, handler: FastHandler) -> None:
        """Let `handler` answer; an exception of it becomes the response."""
        before = ORIGIN.set(self.origin)
        try:
            handler(self)
        except ServekitError as error:
            self.send_error(error)
        except Exception:
            log.exception("unexpected_error", path=self.protocol.url.decode())
            self.send_error(ServekitError("an internal error; see the logs"))
        finally:
            ORIGIN.reset(before)

    # ---- the answer

    def send_json(self, body: bytes, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        """Send a JSON response in one write."""
        if self.response_complete:
            return
        head = self._head(status, (JSON, *headers) if headers else _JSON)
        self.joined.write_now(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()

    def send_error(self, error: ServekitError) -> None:
        """Send an error response in the format of the path's API; cut a stream that has begun."""
        self.body = b""  # the connection keeps this object until its next request
        if self.response_started:
            self.abort_stream()
            return
        encode = self.protocol.envelopes.get(self.path.decode("latin-1"), encode_error)
        status, body = encode(error)
        self.send_json(body, status, tuple(error_headers(error)))

    def begin_stream(self, headers: tuple[Header, ...]) -> None:
        self.response_started = True
        head = self._head(200, headers)
        self.protocol.transport.write(b"%btransfer-encoding: chunked\r\n\r\n" % head)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream as one HTTP chunk, at once: it is the last write of its tick.

        Empty `data` sends no chunk, because an empty chunk would end the body.
        """
        if last:
            self._write_last(data)
        elif data and not self.response_complete:
            size = len(data)
            prefix = _SIZES[size] if size < 1024 else b"%x\r\n" % size
            self.joined.write_now(b"".join((prefix, data, b"\r\n")))

    def _write_last(self, data: bytes) -> None:
        if not self.response_complete:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self.joined.write_now(chunk + b"0\r\n\r\n")
            self._complete()

    def abort_stream(self) -> None:
        if not self.response_complete:
            self.keep_alive = False
            self._complete()

    def _head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        protocol = self.protocol
        protocol.answers[self.path, status] += 1
        self.status = status
        head = protocol.head(status, headers if self.keep_alive else (*headers, CLOSE))
        # not part of the cached heads: these headers differ between responses
        if self.extra:
            head += b"".join(b"%b: %b\r\n" % pair for pair in self.extra)
        if self.origin.warning:
            head += b"%b: %b\r\n" % (WARNING, self.origin.warning)
        return b"%bx-request-id: %b\r\n" % (head, self.origin.id)

    def _complete(self) -> None:
        self.response_complete, self.is_writable = True, False
        self.on_gone = self.on_writable = None
        RECORDER.note_request(self.path, self.status, self.origin)
        if not self.keep_alive:
            self.protocol.transport.close()
        self.protocol.answered()


class AsgiResponse:
    """A request and its response over ASGI, for requests that the fast path does not take.

    While `send` waits for a slow client, the response is not writable, so that later output stays
    with its producer.
    """

    def __init__(self, scope: Scope, encode: Envelope) -> None:
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.body: bytes | bytearray = b""
        self.disconnected = False
        self.response_started = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._encode = encode
        self._complete = False
        self._unsent: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    @property
    def is_writable(self) -> bool:
        return not (self._complete or self._unsent)

    def send_json(self, body: bytes, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        length = (b"content-length", b"%d" % len(body))
        self._start(status, (JSON, length, *headers))
        self.write(body, last=True)

    def send_error(self, error: ServekitError) -> None:
        if self.response_started:
            self.abort_stream()
            return
        status, body = self._encode(error)
        self.send_json(body, status, tuple(error_headers(error)))

    def begin_stream(self, headers: tuple[Header, ...]) -> None:
        self._start(200, headers)

    def _start(self, status: int, headers: tuple[Header, ...]) -> None:
        self.response_started = True
        self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    def write(self, data: bytes, *, last: bool = False) -> None:
        if data or last:
            self._send({"type": "http.response.body", "body": data, "more_body": not last})
        if last:
            self._end()

    def _send(self, message: dict[str, Any]) -> None:
        if not self._complete:
            self._unsent.append(message)
            self._news.set()

    def abort_stream(self) -> None:
        self._end()  # the server disconnects when the application returns before the last part

    def cancel(self) -> None:
        """Tell the handler that the client is gone."""
        self.disconnected = True
        self._unsent.clear()
        gone = self.on_gone
        self._end()
        if gone is not None:
            gone()

    def _end(self) -> None:
        self._complete = True
        self.on_gone = self.on_writable = None
        self._news.set()

    async def relay(self, receive: Receive, send: Send) -> None:
        """Send what the handler writes, until the response is complete or the client is gone."""
        watch = DisconnectWatcher(self, receive)
        try:
            while self._unsent or not self._complete:
                await self._news.wait()
                self._news.clear()
                while self._unsent:
                    await send(self._unsent[0])
                    del self._unsent[:1]  # empty after a disconnect
                if self.on_writable is not None:
                    self.on_writable()
        finally:
            watch.stop_watching()
            if not self._complete:
                self.cancel()


def asgi_endpoint(handler: Handler, max_body_bytes: int, encode: Envelope) -> Endpoint:
    """Return an ASGI endpoint that lets `handler` answer; `encode` is its API's error format."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        response = AsgiResponse(scope, encode)
        try:
            response.body = await read_body(scope, receive, max_body_bytes)
            handler(response)
        except ClientGone:
            return
        except ServekitError as error:
            response.send_error(error)
        await response.relay(receive, send)

    return endpoint


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class DisconnectWatcher:
    """Cancels a request when its client disconnects."""

    __slots__ = ("_receive", "_request", "_task", "_timer")

    def __init__(self, request: Cancellable, receive: Receive) -> None:
        self._request = request
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._request.cancel()

    def stop_watching(self) -> None:
        self._timer.cancel()
        task, self._task = self._task, None  # which holds a reference to this watcher
        if task is not None:
            task.cancel()
