"""Writes a generation as an HTTP answer, whole or streamed, in the format of an API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.generation.generation import Choice, Generation, GenerationChunk
from servekit.gateway.http.asgi import (
    EVENT_STREAM,
    Receive,
    Send,
    envelope,
    send_error,
    send_json,
)
from servekit.gateway.http.fast_response import FastResponse

#: A disconnect within this time of the request is noticed only then: most requests on a fast engine
#: finish before a task that watches the connection would pay off.
WATCH_AFTER_S = 0.01


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class ResponseEncoder:
    """The answer format of an API. This base class has OpenAI's errors and server-sent events."""

    headers: Sequence[tuple[bytes, bytes]] = EVENT_STREAM

    def whole(self, turn: Generation, choices: list[Choice]) -> bytes:
        """Return the JSON body of an answer that is not streamed."""
        raise NotImplementedError

    def opening(self, turn: Generation) -> bytes:
        """Return the bytes that open a stream, sent with its first events."""
        return b""

    def events(self, turn: Generation, pieces: list[GenerationChunk]) -> bytes:
        """Return the stream's bytes for some chunks, final chunks included."""
        raise NotImplementedError

    def closing(self, turn: Generation) -> bytes:
        """Return the bytes that end a successful stream."""
        return b""

    async def refuse(self, send: Send, error: ServekitError) -> None:
        """Answer with an error, before anything else was sent."""
        await send_error(send, error)

    def late_error(self, error: ServekitError) -> bytes:
        """Return the bytes that end a failed stream."""
        return b"data: " + envelope(error) + b"\n\n"


async def respond(turn: Generation, form: ResponseEncoder, receive: Receive, send: Send) -> None:
    """Write the answer of `turn` in the format `form`; cancel it when the client disconnects."""
    watch = DisconnectWatcher(turn, receive)
    try:
        if turn.ask.stream:
            await _stream(turn, form, send)
        else:
            await _whole(turn, form, send)
    finally:
        watch.end()
        turn.cancel()


async def _whole(turn: Generation, form: ResponseEncoder, send: Send) -> None:
    try:
        choices = await turn.whole()
    except RequestError as error:
        if not isinstance(error, ClientClosed):
            await form.refuse(send, error)
        return
    await send_json(send, form.whole(turn, choices))


async def _stream(turn: Generation, form: ResponseEncoder, send: Send) -> None:
    """Write a stream. An error after the first byte becomes an event of the stream.

    `send` blocks while the client does not read, and delays this request alone.
    """
    out = Stream(form, send)
    try:
        async for pieces in turn:
            if pieces:
                await out.write(out.opening(turn) + form.events(turn, pieces))
            elif turn.place is not None:
                await out.write(b": queue position %d\n\n" % turn.place)
        await out.write(out.opening(turn) + form.closing(turn), more=False)
    except ClientClosed:
        return
    except RequestError as error:
        if not out.started:
            await form.refuse(send, error)
            return
        await out.write(form.late_error(error), more=False)


class Stream:
    """The body of a streamed answer; the response head goes before its first part."""

    def __init__(self, form: ResponseEncoder, send: Send) -> None:
        self._form = form
        self._send = send
        self._opened = False
        self.started = False

    def opening(self, turn: Generation) -> bytes:
        """Return the format's opening on the first call, nothing afterwards."""
        opened, self._opened = self._opened, True
        return b"" if opened else self._form.opening(turn)

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not self.started:
            self.started = True
            head = {"type": "http.response.start", "status": 200, "headers": self._form.headers}
            await self._send(head)
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


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

    def end(self) -> None:
        self._timer.cancel()
        task, self._task = self._task, None  # which holds a reference to this watcher
        if task is not None:
            task.cancel()


class FastResponseAsgi:
    """ASGI's `receive` and `send` on top of a FastResponse, for answers that the fast path lacks.

    The request's body has already been read.
    """

    def __init__(self, exchange: FastResponse) -> None:
        self._exchange = exchange
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._status = 200
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        exchange.on_gone = self._on_gone
        exchange.on_writable = self._writable.set

    def _on_gone(self) -> None:
        self._gone.set()
        self._writable.set()

    async def receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        exchange = self._exchange
        if message["type"] == "http.response.start":
            self._status, headers = message["status"], tuple(message["headers"])
            self._headers = tuple(
                pair for pair in headers if pair[0] not in (b"content-type", b"content-length")
            )
            self._streams = any(value == EVENT_STREAM[0][1] for _, value in headers)
            return
        while exchange.protocol.flow.write_paused and not exchange.disconnected:
            self._writable.clear()
            await self._writable.wait()
        if self._streams:
            exchange.stream(message["body"], last=not message.get("more_body"))
        elif not exchange.disconnected:
            exchange.answer(message["body"], self._status, self._headers)
