"""A server in the test's own loop that says exactly the bytes it is told to, cut as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from servekit.bench.client.client_protocol import Target

#: A pause between two pieces, so that they come in two reads.
_PIECE_S = 0.005

CLOSE = b""  # as a piece: close the connection here


@dataclass
class Server:
    """What was asked, and over how many connections."""

    answer: Callable[[dict[str, Any]], Iterable[bytes]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", self.port, "/v1")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        # a cancelled one is the test's end
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length:")
        )
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(size)))
        for piece in self.answer(self.bodies[-1]):
            if piece == CLOSE:
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(_PIECE_S)
        return True


@contextlib.asynccontextmanager
async def serving(answer: Callable[[dict[str, Any]], Iterable[bytes]]) -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


# ---------------------------------------------------------------- answers


def whole(body: object, status: str = "200 OK", *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"HTTP/1.1 {status}", "content-type: application/json", *headers)
    return ("\r\n".join(lines) + f"\r\ncontent-length: {len(data)}\r\n\r\n").encode() + data


def completion(text: str = "hi", tokens: int = 2) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": usage}


def delta(text: str | None, finish: str | None = None) -> bytes:
    said = {} if text is None else {"content": text}
    return _event({"choices": [{"index": 0, "delta": said, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return _event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    )


def _event(found: object) -> bytes:
    return b"data: " + json.dumps(found).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
EVENTS = (delta(""), delta("a"), delta("b"), delta("c", "length"), usage(7, 3), DONE)


def stream_head(*headers: str) -> bytes:
    lines = ("HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunked(events: Sequence[bytes]) -> bytes:
    """A whole stream in chunked encoding."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return stream_head("transfer-encoding: chunked") + body + b"0\r\n\r\n"
