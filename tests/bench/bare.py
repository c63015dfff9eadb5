"""What the gateway is measured against: bare ASGI applications under uvicorn, no work, no hop.

    python -m tests.bench.bare '{"choices": …}'

Prints the port it got. One process, uvloop and httptools, set up as the gateway sets up its own.

    POST /whole     reads the body and answers the given bytes
    POST /stream    reads `max_tokens` and writes that many chunks, each encoded and sent alone
    POST /turns     the same, and lets the event loop turn after each, as anything must that
                    waits for the next token: without it a thousand chunks leave in one write
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: None
    finish_reason: str | None


class Chunk(msgspec.Struct):
    """A chunk of OpenAI's text completions."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]


class Ask(msgspec.Struct):
    max_tokens: int


_encode = msgspec.json.Encoder().encode


class Bare:
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        length = str(len(answer)).encode()
        self._head = [(b"content-type", b"application/json"), (b"content-length", length)]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if scope["path"] == "/whole":
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            await send({"type": "http.response.body", "body": self._answer})
        else:
            await _stream(send, msgspec.json.decode(body, type=Ask), scope["path"] == "/turns")


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _stream(send: Send, ask: Ask, turns: bool) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(ask.max_tokens):
        choice = Choice(0, "~", None, None)
        chunk = Chunk(
            "cmpl-0123456789abcdef01234567", "text_completion", 1_800_000_000, "echo", [choice]
        )
        event = b"data: " + _encode(chunk) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})
        if turns:
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        Bare(sys.argv[1].encode()),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        backlog=2048,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
