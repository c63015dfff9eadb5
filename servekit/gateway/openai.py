"""OpenAI's chat completions and completions: the hot routes, from socket to queue and back.

Answers are made from templates that are encoded once per request; per chunk only the text itself
is. All that waits for a stream leaves in one write, each engine step as an event of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.call import Call, Deltas
from servekit.gateway.http import (
    EVENT_STREAM,
    ClientGone,
    Receive,
    Scope,
    Send,
    envelope,
    read_body,
    send_error,
    send_json,
)
from servekit.gateway.router import Router
from servekit.gateway.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    chat_messages,
    completion_sampling,
    decode,
    sampling,
)
from servekit.wire.messages import Delta

log: Any = structlog.get_logger("servekit.gateway")

#: A client that leaves within this time of its request is noticed only then: most requests on a
#: fast engine are over before a task that watches the connection would pay.
WATCH_AFTER_S = 0.01

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the two endpoints' answers differ."""

    prefix: str
    whole: bytes
    chunk: bytes
    text_head: bytes  # around the text of a chunk
    text_tail: bytes
    whole_head: bytes  # around the text of a whole answer
    whole_tail: bytes
    first: bytes  # the first chunk's choice, if there is one of its own
    last: bytes  # before the last chunk's finish reason


CHAT = Shape(
    prefix="chatcmpl-",
    whole=b"chat.completion",
    chunk=b"chat.completion.chunk",
    text_head=b'"choices":[{"index":0,"delta":{"content":',
    text_tail=b'},"logprobs":null,"finish_reason":null}]',
    whole_head=b'"choices":[{"index":0,"message":{"role":"assistant","content":',
    whole_tail=b',"refusal":null},"logprobs":null,"finish_reason":',
    first=b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},'
    b'"logprobs":null,"finish_reason":null}]',
    last=b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":',
)
COMPLETION = Shape(
    prefix="cmpl-",
    whole=b"text_completion",
    chunk=b"text_completion",
    text_head=b'"choices":[{"index":0,"text":',
    text_tail=b',"logprobs":null,"finish_reason":null}]',
    whole_head=b'"choices":[{"index":0,"text":',
    whole_tail=b',"logprobs":null,"finish_reason":',
    first=b"",
    last=b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":',
)


class Answer:
    """The encoded parts of one request's answer."""

    __slots__ = ("_event_head", "_event_tail", "_shape", "_started", "_usage", "_whole_head", "id")

    def __init__(self, shape: Shape, model: str, usage: bool) -> None:
        self.id = shape.prefix + secrets.token_hex(12)
        head = b'{"id":"%b","object":"%%b","created":%d,"model":%b,' % (
            self.id.encode(),
            int(time.time()),
            _encode(model).replace(b"%", b"%%"),
        )
        self._shape = shape
        self._usage = usage
        self._started = False
        self._whole_head = head % shape.whole + shape.whole_head
        self._event_head = b"data: " + head % shape.chunk
        self._event_tail = b',"usage":null}\n\n' if usage else b"}\n\n"

    def whole(self, text: str, last: Delta) -> bytes:
        """The body of an answer that is not streamed."""
        tail = self._shape.whole_tail
        end = b'%b}],"usage":%b}' % (_reason(last), _usage(last))
        return self._whole_head + _encode(text) + tail + end

    def events(self, deltas: Deltas) -> bytes:
        """Server-sent events for what one wake-up brought, the closing ones included."""
        shape, head, tail = self._shape, self._event_head, self._event_tail
        parts = [] if self._started else self._opening()
        for delta in deltas:
            if delta.text:
                parts += (head, shape.text_head, _encode(delta.text), shape.text_tail, tail)
        if deltas[-1].finish is not None:
            parts += self._closing(deltas[-1])
        return b"".join(parts)

    def _opening(self) -> list[bytes]:
        self._started = True
        first = self._shape.first
        return [self._event_head, first, self._event_tail] if first else []

    def _closing(self, last: Delta) -> list[bytes]:
        parts = [self._event_head, self._shape.last, _reason(last), b"}]", self._event_tail]
        if self._usage:
            parts += (self._event_head, b'"choices":[],"usage":', _usage(last), b"}\n\n")
        return [*parts, b"data: [DONE]\n\n"]


def _reason(last: Delta) -> bytes:
    return b'"length"' if last.finish == "length" else b'"stop"'


def _usage(last: Delta) -> bytes:
    prompt, completion = last.prompt_tokens, last.completion_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt,
        completion,
        prompt + completion,
    )


class OpenAI:
    """The two hot endpoints, as plain ASGI."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        self._max_body_bytes = max_body_bytes
        self.routes: dict[str, Callable[[Scope, Receive, Send], Any]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
        }

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send, self._chat)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send, self._completion)

    def _chat(self, body: bytes, key: str) -> tuple[Shape, Common, Call]:
        request = decode(ChatRequest, body)
        call = Call(
            request.model,
            sampling(request),
            messages=chat_messages(request),
            stream=bool(request.stream),
            key=key,
        )
        return CHAT, request, call

    def _completion(self, body: bytes, key: str) -> tuple[Shape, Common, Call]:
        request = decode(CompletionRequest, body)
        call = Call(
            request.model,
            completion_sampling(request),
            prompt=request.prompt,
            stream=bool(request.stream),
            key=key,
        )
        return COMPLETION, request, call

    async def _guard(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        parse: Callable[[bytes, str], tuple[Shape, Common, Call]],
    ) -> None:
        """Answer one request; what goes wrong before its first byte gets the envelope."""
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            shape, request, call = parse(body, _key(scope))
            self._router.open(call)
        except ClientGone:
            return
        except ServekitError as error:
            await send_error(send, error)
            return
        await self._answer(shape, request, call, receive, send)

    async def _answer(
        self, shape: Shape, request: Common, call: Call, receive: Receive, send: Send
    ) -> None:
        options = request.stream_options
        model = self._router.find(call.model).status.name
        answer = Answer(shape, model, bool(options and options.include_usage))
        watch = Watch(call, receive)
        try:
            await (stream if call.stream else whole)(answer, call, send)
        finally:
            watch.end()
            call.cancel()


async def whole(answer: Answer, call: Call, send: Send) -> None:
    """Answer in one body, once all is there."""
    try:
        deltas = await call.deltas()
    except RequestError as error:
        if not isinstance(error, ClientClosed):
            await send_error(send, error)
        return
    text = deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas])
    await send_json(send, answer.whole(text, deltas[-1]))


async def stream(answer: Answer, call: Call, send: Send) -> None:
    """Answer as server-sent events; an error after the first byte is an event of its own.

    `send` waits while the client does not read, and with it this request alone: what comes
    meanwhile leaves in one write when the client reads again.
    """
    started = False
    try:
        while True:
            deltas = await call.deltas()
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            more = deltas[-1].finish is None
            events = answer.events(deltas)
            await send({"type": "http.response.body", "body": events, "more_body": more})
            if not more:
                return
    except ClientClosed:
        return
    except RequestError as error:
        if not started:
            await send_error(send, error)
            return
        event = b"data: " + envelope(error) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


class Watch:
    """Cancels the call when its client goes away."""

    __slots__ = ("_call", "_receive", "_task", "_timer")

    def __init__(self, call: Call, receive: Receive) -> None:
        self._call = call
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._call.cancel()

    def end(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _key(scope: Scope) -> str:
    """What fairness goes by: the API key the client sends, as it is."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value, "latin-1")
    return ""
