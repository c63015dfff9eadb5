"""Requests to the server's other endpoints, and their responses: bytes, passed on as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from servekit.engines.remote.client import Reply
from servekit.engines.remote.request_builder import EndpointCall
from servekit.engines.remote.schemas import valid_count
from servekit.errors import RequestError
from servekit.protocol.forwarding import WINDOW_BYTES, HttpPart, HttpRequest
from servekit.protocol.messages import Generate

#: Where OpenAI's API is for clients; the server may have it elsewhere.
BASE = "/v1"
#: Response headers that are about the body. Others are about the connection, the server's own
#: clients or its keys.
_HEADERS = {"content-type", "content-length", "content-encoding", "content-language"} | {
    *("content-disposition", "cache-control", "retry-after"),
}
#: Longest response whose tokens are counted.
_MOST_READ_BYTES = 2**20
#: Client errors that are about servekit's own key, or pass: see `errors`.
_NOT_FORWARDED = {401, 402, 403, 407, 408, 409, 425, 429}
#: llama-server says so of endpoints that its model cannot serve.
_NOT_IMPLEMENTED = 501


@dataclass(frozen=True, slots=True)
class ForwardCall(EndpointCall):
    """A forwarded request. Its `path` includes the query."""

    @property
    def headers(self) -> dict[str, str]:
        http = self.request.http
        given = () if http is None else http.headers
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}
        return headers | ({"traceparent": self.request.trace} if self.request.trace else {})

    @property
    def prompt_tokens(self) -> int:
        """Nothing is known of the tokens."""
        return 0

    def accepts(self, status: int) -> bool:
        """Return whether a response of this status is the client's, whatever it says."""
        refused = 400 <= status < 500 and status not in _NOT_FORWARDED
        return 200 <= status < 300 or refused or status == _NOT_IMPLEMENTED


def build_forward_call(request: Generate, model: str) -> ForwardCall:
    """Build the request, with the server's name of the model."""
    http = request.http
    if http is None:
        raise RequestError("the request to forward is missing")
    below = http.path.removeprefix(BASE) if http.path.startswith(f"{BASE}/") else ""
    path = f"{below or http.path}?{http.query}" if http.query else below or http.path
    return ForwardCall(path, _insert_model(http, request.body, model), request, not below)


def _insert_model(http: HttpRequest, body: bytes, model: str) -> bytes:
    if http.model_at is None:
        return body
    name = msgspec.json.encode(model) if http.model_is_json else model.encode()
    return b"".join((body[: http.model_at], name, body[http.model_at :]))


class Window:
    """The bytes of a response that may still be sent to its client."""

    def __init__(self) -> None:
        self.blocks = False  # the client does not read
        self._left_bytes = WINDOW_BYTES
        self._extended = asyncio.Event()

    def extend(self, size_bytes: int) -> None:
        self._left_bytes += size_bytes
        self._extended.set()

    async def wait_open(self, size_bytes: int) -> None:
        """Wait until the window is open; the last piece may exceed it."""
        while self._left_bytes <= 0:
            self.blocks = True
            self._extended.clear()
            await self._extended.wait()
        self.blocks = False
        self._left_bytes -= size_bytes


async def read_parts(reply: Reply, window: Window) -> AsyncIterator[HttpPart]:
    """Yield the parts of a response as fast as the client reads. Raises EndpointFailed."""
    headers = tuple(
        (name.lower(), value)
        for name, value in reply.headers
        if name.decode("latin-1").lower() in _HEADERS
    )
    part = HttpPart(await reply.read_next(), reply.status, headers)
    yield part
    while part.data:
        await window.wait_open(len(part.data))
        part = HttpPart(await reply.read_next())
        if part.data:
            yield part


class UsageReader:
    """Reads the tokens from a JSON response of moderate size; other responses count none."""

    def __init__(self, kind: str) -> None:
        self._body = bytearray()
        self._reads = kind == "application/json"

    def note_piece(self, data: bytes) -> None:
        self._reads = self._reads and len(self._body) + len(data) <= _MOST_READ_BYTES
        if self._reads:
            self._body += data

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of prompt and completion; some servers state their sum alone."""
        try:
            usage = msgspec.json.decode(self._body, type=_Counted).usage if self._reads else None
        except (msgspec.DecodeError, RecursionError):
            return 0, 0
        if usage is None:
            return 0, 0
        prompt, completion = (
            valid_count(first) or valid_count(second) or 0
            for first, second in (
                (usage.prompt_tokens, usage.input_tokens),
                (usage.completion_tokens, usage.output_tokens),
            )
        )
        return prompt or max(0, (valid_count(usage.total_tokens) or 0) - completion), completion


class _Usage(msgspec.Struct):
    prompt_tokens: object = None
    completion_tokens: object = None
    input_tokens: object = None
    output_tokens: object = None
    total_tokens: object = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None
