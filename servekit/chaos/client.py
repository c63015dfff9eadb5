"""A measuring client: raw asyncio, one connection per request, little work per chunk.

Its CPU use is low, so that the measurement is that of the service.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
import msgspec

from servekit.sse import EventStream

#: Timeout of a request.
PATIENCE_S = 120.0
#: The variable with the API key, for an instance that wants one, and the key for all others.
KEY_VARIABLE, NO_KEY = "SERVEKIT_API_KEY", "chaos"


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Problem(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Body(msgspec.Struct):
    """The fields that are read of an event, a whole answer or an error."""

    id: str = ""
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: _Problem | None = None


_decode = msgspec.json.Decoder(_Body).decode


@dataclass(frozen=True, slots=True)
class Question:
    """A greedy chat request."""

    model: str
    text: str
    max_tokens: int

    def body(self, *, stream: bool) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields)


@dataclass(slots=True)
class ChatAnswer:
    """The answer to a request. Times are `time.monotonic`; `status` 0: no response head arrived."""

    began_s: float
    stream: bool = False
    status: int = 0
    text: str = ""
    finishes: list[str] = field(default_factory=list)
    usages: list[TokenUsage] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    dones: int = 0  # number of closing events of the stream
    chunks: int = 0  # events with text
    first_s: float | None = None
    ended_s: float = 0.0
    retry_after_s: float | None = None
    error: str = ""
    port: int = 0  # the local port of the connection

    @property
    def failure(self) -> str:
        """Return why the answer is incomplete or malformed, or ""."""
        if self.error:
            return self.error
        if self.status != 200:
            return f"status {self.status}" if self.status else "the connection was closed"
        if len(self.finishes) != 1:
            return f"{len(self.finishes)} finish reasons"
        if self.stream and self.dones != 1:
            return f"{self.dones} closing events"
        return f"{len(self.ids)} ids" if len(self.ids) != 1 else ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


class ChatExchange(asyncio.Protocol):
    """A request and its answer. `next_text` is called once, at the next chunk, with its time."""

    def __init__(self, request: bytes, *, stream: bool) -> None:
        self.answer = ChatAnswer(time.monotonic(), stream)
        self.next_text: list[Callable[[ChatExchange, float], None]] = []
        self.last_s = self.answer.began_s  # time of the last chunk
        self.over: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""  # of an answer that is no stream
        self._events = EventStream()
        self._whole = False
        self._texts: list[str] = []
        self._transport: asyncio.Transport | None = None

    def abort(self) -> None:
        """Disconnect as a crashed client does: unread data make the kernel send a reset."""
        if self._transport is not None:
            self._transport.abort()

    def end_with_error(self, why: str) -> None:
        self.answer.error = self.answer.error or why
        self._end()
        self.abort()

    def _end(self) -> None:
        if not self.over.done():
            self.answer.ended_s = time.monotonic()
            self.answer.text = "".join(self._texts)
            self.over.set_result(self.answer)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.answer.port = transport.get_extra_info("sockname")[1]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.end_with_error(f"not an answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._whole and not self.over.done():
            self.answer.error = self.answer.error or f"the connection was lost: {exc or 'EOF'}"
        self._end()

    # ---- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.answer.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self.answer.stream or self.answer.status != 200:
            self._body += body
            return
        for event in self._events.read_events(body):
            if event == b"[DONE]":
                self.answer.dones += 1
            else:
                self._take(event)

    def on_message_complete(self) -> None:
        self._whole = True
        if body := self._body or self._events.unread:
            self._take(body)
        if self._transport is not None:
            self._transport.close()
        self._end()

    # ---- events

    def _take(self, body: bytes) -> None:
        found, answer = _decode(body), self.answer
        if found.error is not None:
            answer.error = f"{found.error.code}: {found.error.message}"
        if found.id:
            answer.ids.add(found.id)
        if found.usage is not None:
            answer.usages.append(found.usage)
        for choice in found.choices:
            if (part := choice.delta or choice.message) and part.content:
                self._on_text(part.content)
            if choice.finish_reason:
                answer.finishes.append(choice.finish_reason)

    def _on_text(self, text: str) -> None:
        now, answer = time.monotonic(), self.answer
        answer.chunks += 1
        answer.first_s = answer.first_s or now
        self._texts.append(text)
        if self.next_text:
            told, self.next_text = self.next_text, []
            for tell in told:
                tell(self, now)
        self.last_s = now


class Client:
    """A client of one server; each request has its own connection."""

    def __init__(self, url: str, key: str = NO_KEY) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.key = key

    def with_key(self, key: str) -> Client:
        """Return a client of the same server with another key, hence another share in fairness."""
        return Client(f"http://{self.host}:{self.port}", key)

    def build_request(self, question: Question, *, stream: bool) -> bytes:
        body = question.body(stream=stream)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def send_request(self, question: Question, *, stream: bool) -> ChatExchange:
        """Send a request; the answer is `await exchange.over`."""
        return await self._send(self.build_request(question, stream=stream), stream=stream)

    async def await_answer(
        self, question: Question, *, stream: bool, patience_s: float = PATIENCE_S
    ) -> ChatAnswer:
        """Send a request and wait for its answer, which also holds errors: none is raised."""
        return await await_answer(await self.send_request(question, stream=stream), patience_s)

    async def get(self, path: str, patience_s: float = 5.0) -> ChatAnswer:
        """Send a GET, of which only the status is read."""
        head = f"GET {path} HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n\r\n"
        return await await_answer(await self._send(head.encode(), stream=False), patience_s)

    async def _send(self, request: bytes, *, stream: bool) -> ChatExchange:
        exchange = ChatExchange(request, stream=stream)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: exchange, self.host, self.port
            )
        except OSError as error:
            exchange.end_with_error(f"cannot connect: {error}")
        return exchange

    def connect_slowly(self, question: Question) -> socket.socket:
        """Request a stream on a bare socket with a small buffer, for a slow reader."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect((self.host, self.port))
        sock.sendall(self.build_request(question, stream=True))
        sock.setblocking(False)
        return sock


async def await_answer(exchange: ChatExchange, patience_s: float) -> ChatAnswer:
    """Return the answer; an exchange that exceeds `patience_s` fails, and is abandoned."""
    await asyncio.wait((exchange.over,), timeout=patience_s)
    if not exchange.over.done():
        exchange.end_with_error(f"not answered within {patience_s:g} s")
    return await exchange.over
