"""HTTP/1.1 to a server on this machine, as a transport of httpx: a third of the work a token.

Bytes of a body that arrive in one tick of the event loop are one piece. A connection is used again
once its answer has been read to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import httptools
import httpx

#: Bytes of a body that are read ahead of their reader.
_MOST_UNREAD_BYTES = 2**20


class LocalTransport(httpx.AsyncBaseTransport):
    """A pool of connections to one server."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while (idle := self._take_idle()) is not None:
            with contextlib.suppress(httpx.ReadError):  # the server has just closed it
                return await self._send(request, idle)
        return await self._send(request, await _connect(request))

    async def _send(self, request: httpx.Request, connection: _Connection) -> httpx.Response:
        try:
            await connection.send(request)
        except BaseException:
            connection.abort()
            raise
        body = _Body(connection, self._idle)
        return httpx.Response(connection.status, headers=connection.headers, stream=body)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            if not (connection := self._idle.pop()).lost:
                return connection
        return None

    async def aclose(self) -> None:
        while (connection := self._take_idle()) is not None:
            connection.abort()


async def _connect(request: httpx.Request) -> _Connection:
    limit_s = request.extensions["timeout"]["connect"]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            _, connection = await loop.create_connection(
                _Connection, request.url.host, request.url.port or 80
            )
    except TimeoutError:
        raise httpx.ConnectTimeout("") from None
    except OSError as error:
        raise httpx.ConnectError(error.strerror or "no connection") from None
    return connection


class _Body(httpx.AsyncByteStream):
    """The body of a response; its connection is idle once it has been read."""

    def __init__(self, connection: _Connection, idle: list[_Connection]) -> None:
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self._connection.read():
            yield piece

    async def aclose(self) -> None:
        if self._connection.reusable:
            self._idle.append(self._connection)
        else:
            self._connection.abort()


class _Connection(asyncio.Protocol):
    """A connection, with the callbacks of its parser."""

    def __init__(self) -> None:
        self.lost = False
        self._loop = asyncio.get_running_loop()
        self._begin()

    def _begin(self) -> None:
        """Prepare for the next response."""
        self.status = 0  # 0 until the head is complete
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._ended = self._keeps_alive = False
        self._error: httpx.TransportError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the transport

    async def send(self, request: httpx.Request) -> None:
        """Send a request, and wait for the head of its response. Raises httpx.TransportError."""
        self._begin()
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b" % header for header in request.headers.raw]
        self._transport.write(b"\r\n".join([*lines, b"", b""]) + request.content)
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return the next piece of the body; empty at its end. Raises httpx.TransportError."""
        while not self._pieces:
            if self._ended:
                return b""
            await self._wait()
        piece = b"".join(self._pieces)
        self._pieces.clear()
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._transport.resume_reading()
        self._unread_bytes = 0
        return piece

    @property
    def reusable(self) -> bool:
        # a body that was not read to its end may have stopped the reading
        return self._keeps_alive and not self.lost and not self._pieces

    def abort(self) -> None:
        self._transport.abort()

    async def _wait(self) -> None:
        """Wait for news."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = self._error or httpx.RemoteProtocolError(str(error))
            self._transport.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.status and not self._is_framed():
            self._ended = True  # its body lasts as long as the connection
        elif not self._ended:
            self._error = self._error or httpx.ReadError("the connection broke")
        self._wake()

    def _is_framed(self) -> bool:
        names = {name.lower() for name, _ in self.headers}
        return bool(names & {b"content-length", b"transfer-encoding"})

    # ---- of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        else:
            self.headers = []  # an interim response, such as 103

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._unread_bytes += len(body)
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._ended = self.status > 0
        self._keeps_alive = self._ended and self._parser.should_keep_alive()
