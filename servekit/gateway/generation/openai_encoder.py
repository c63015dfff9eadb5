"""Encoder of OpenAI's responses, whole and as server-sent events.

The templates of a response are encoded once per request; for a chunk only its text is encoded.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import msgspec

from servekit.protocol.messages import Delta

_encode = msgspec.json.Encoder().encode
#: Prefixes of HTTP chunks by size in bytes, for nearly all chunks that hold one token.
_SIZES = tuple(b"%x\r\n" % size for size in range(1024))
_random_bits = random.Random().getrandbits  # seeded by the system; ids need not be secret


@dataclass(frozen=True, slots=True)
class Shape:
    """The differences between the responses of the two endpoints."""

    prefix: bytes
    whole: bytes
    chunk: bytes
    text_head: bytes  # around the text of a chunk
    text_tail: bytes
    whole_head: bytes  # around the text of a whole answer
    whole_tail: bytes
    first: bytes  # choice of an extra first chunk; empty for none
    last: bytes  # before the last chunk's finish reason


CHAT = Shape(
    prefix=b"chatcmpl-",
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
    prefix=b"cmpl-",
    whole=b"text_completion",
    chunk=b"text_completion",
    text_head=b'"choices":[{"index":0,"text":',
    text_tail=b',"logprobs":null,"finish_reason":null}]',
    whole_head=b'"choices":[{"index":0,"text":',
    whole_tail=b',"logprobs":null,"finish_reason":',
    first=b"",
    last=b'"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":',
)


class OpenAIEncoder:
    """The encoded parts of one request's response."""

    __slots__ = (
        "_around_bytes",
        "_chunk_tail",
        "_event_head",
        "_event_tail",
        "_head",
        "_shape",
        "_started",
        "_text_head",
        "_text_tail",
        "_usage",
    )

    def __init__(self, shape: Shape, model: str, usage: bool, stream: bool = True) -> None:
        kind = shape.chunk if stream else shape.whole
        told = shape.prefix, _random_bits(96), kind, time.time(), _encode(model)
        head = b'{"id":"%b%024x","object":"%b","created":%d,"model":%b,' % told
        self._shape = shape
        self._head = head
        if not stream:
            return  # the rest is for events only
        self._usage = usage
        self._started = False
        self._event_head = b"data: " + head
        self._event_tail = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._text_head = self._event_head + shape.text_head
        self._text_tail = shape.text_tail + self._event_tail
        self._chunk_tail = self._text_tail + b"\r\n"
        self._around_bytes = len(self._text_head) + len(self._text_tail)

    def whole(self, text: str, last: Delta) -> bytes:
        """Return the body of a response that is not streamed."""
        shape = self._shape
        parts = self._head, shape.whole_head, _encode(text), shape.whole_tail
        return b'%b%b%b%b%b}],"usage":%b}' % (*parts, _reason(last), _usage(last))

    def events(self, text: str, last: Delta | None) -> bytes:
        """Return the server-sent events of one wake-up: its text as one event, and closing events.

        A client that keeps up gets an event for each token; tokens are joined into one event only
        when the client or the network is behind.
        """
        event = self._text_head + _encode(text) + self._text_tail if text else b""
        if self._started and last is None:
            return event
        opening = () if self._started else self._opening()
        closing = () if last is None else self._closing(last)
        return b"".join((*opening, event, *closing))

    def chunk(self, text: str) -> bytes:
        """Return the event of a text as an HTTP chunk; only once the stream has begun."""
        said = _encode(text)
        size_bytes = self._around_bytes + len(said)
        size = _SIZES[size_bytes] if size_bytes < len(_SIZES) else b"%x\r\n" % size_bytes
        return b"".join((size, self._text_head, said, self._chunk_tail))

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
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        prompt,
        completion,
        prompt + completion,
    )
    if not last.cached_tokens:
        return usage
    return b'%b,"prompt_tokens_details":{"cached_tokens":%d}}' % (usage[:-1], last.cached_tokens)
