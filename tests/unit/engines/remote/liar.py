"""An endpoint that answers as a test tells it to: well, late, wrongly, or not at all.

async with lying() as liar:
    liar.answers += [status(503), said("Hello")]     # the next two; then it answers well again
    ... liar.url ...
    assert [asked.path for asked in liar.asked] == [...]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

#: What each greeting says, so that a test need not count them.
HELLO = "Say hello."


@dataclass(slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Script = Callable[[asyncio.StreamWriter, Asked], Awaitable[None]]


@dataclass(slots=True)
class Liar:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)  # greetings and lists of models apart
    greetings: list[Asked] = field(default_factory=list)
    looks: int = 0  # GET /models
    answers: deque[Script] = field(default_factory=deque)
    greets: deque[Script] = field(default_factory=deque)
    models: Script | None = None
    gone: int = 0  # connections that were closed from the other side in the middle of an answer
    open: int = 0  # of what was `asked`, under way by now
    connections: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, true: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while (asked := await _read(reader)) is not None:
                await self._answer(reader, writer, asked)
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: Asked
    ) -> None:
        answering = asyncio.ensure_future(self._script(asked)(writer, asked))
        leaving = asyncio.ensure_future(_left(reader))
        # The other side reads the last byte before this task ends: greetings do not count, or the
        # last of them would be taken for the first request.
        counts = asked in self.asked
        self.open += counts
        self.changed.set()
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.gone += 1
                raise ConnectionResetError
            await answering
        finally:
            self.open -= counts
            self.changed.set()
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _script(self, asked: Asked) -> Script:
        if asked.method == "GET":
            self.looks += 1
            return self.models or listing()
        is_greeting = HELLO in json.dumps(asked.body)
        (self.greetings if is_greeting else self.asked).append(asked)
        scripts = self.greets if is_greeting else self.answers
        return scripts.popleft() if scripts else said("Hello", "!")


async def _left(reader: asyncio.StreamReader) -> None:
    """Return when the other side closes; it sends nothing while it waits for an answer."""
    while not (reader.at_eof() or reader.exception()):  # noqa: ASYNC110 - it calls nobody
        await asyncio.sleep(0.002)  # between two looks


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, json.loads(body) if body else None)


@contextlib.asynccontextmanager
async def lying(port: int = 0) -> AsyncIterator[Liar]:
    liar = Liar()
    server = await asyncio.start_server(liar.serve, "127.0.0.1", port)
    liar.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield liar
    finally:
        server.close()


# ---------------------------------------------------------------- what it may do


def head(status: int = 200, **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} It is so",
        *(f"{n.replace('_', '-')}: {v}" for n, v in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def whole(body: bytes, kind: str = "application/json", code: int = 200, **headers: str) -> Script:
    async def script(writer: asyncio.StreamWriter, asked: Asked) -> None:
        size = str(len(body))
        writer.write(head(code, content_type=kind, content_length=size, **headers) + body)
        await writer.drain()

    return script


def status(code: int, told: Any = None, **headers: str) -> Script:
    """An error, in OpenAI's envelope where `told` is text."""
    body = {"error": {"message": told}} if isinstance(told, str) else told
    return whole(b"" if told is None else json.dumps(body).encode(), code=code, **headers)


def listing(*models: dict[str, Any]) -> Script:
    return whole(json.dumps({"object": "list", "data": list(models)}).encode())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def stream(*pieces: bytes, ends: bool = True, hold: asyncio.Event | None = None) -> Script:
    """A stream of these pieces. `hold`: then it waits for that; without `ends` it breaks off."""

    async def script(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(head(content_type="text/event-stream", transfer_encoding="chunked"))
        for piece in pieces:
            writer.write(chunk(piece))
            await writer.drain()
        if hold is not None:
            await hold.wait()
        if not ends:
            raise ConnectionResetError
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return script


def delta(said: Any = None, finish: str | None = None, **more: Any) -> bytes:
    """One chunk of a chat: a text, or any other delta."""
    inner = {"content": said} if isinstance(said, str) else said or {}
    return event({"choices": [{"index": 0, "delta": inner, "finish_reason": finish, **more}]})


def usage(prompt: Any = 7, completion: Any = 3, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def said(*texts: Any, finish: str = "stop") -> Script:
    """A proper answer."""
    return stream(*map(delta, texts), delta(None, finish), usage(), DONE)


def dropped() -> Script:
    """It hangs up without a word."""

    async def script(writer: asyncio.StreamWriter, asked: Asked) -> None:
        raise ConnectionResetError

    return script


def silent() -> Script:
    """It never answers."""

    async def script(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.Event().wait()

    return script
