"""Requests to endpoints that servekit does not know, forwarded to the server behind a model.

gateway → worker    Body · WindowUpdate, beside Generate with an HttpRequest
worker → gateway    HttpPart, in a Delta

A long body follows its Generate in pieces, so that other messages come between. The response comes
back in pieces too: the worker is at most a window ahead of the client.
"""

from __future__ import annotations

from collections.abc import Iterable

from servekit.protocol.base import Message, Value

#: Longest piece of a request's body in one message.
PIECE_BYTES = 256 * 2**10
#: Bytes of a response that a worker may send before the client has read any.
WINDOW_BYTES = 2**20

RawHeaders = tuple[tuple[bytes, bytes], ...]


class HttpRequest(Value, frozen=True):
    """A request for the server. Without a `path` it is for the server's health page.

    The body leaves out the name of the model, which the worker inserts: the server has a name of
    its own for it.
    """

    path: str
    query: str = ""
    headers: RawHeaders = ()
    size_bytes: int = 0  # of the body
    digest: bytes = b""  # SHA-256 of the body
    model_at: int | None = None  # position of the model's name in the body; None: nowhere
    model_is_json: bool = False  # whether the name is a JSON string there


class HttpPart(Value, frozen=True):
    """A part of a response; the first one has the status and the headers."""

    data: bytes
    status: int = 0
    headers: RawHeaders = ()


class Body(Message, frozen=True):
    """The next piece of a request's body."""

    id: int
    data: bytes


class WindowUpdate(Message, frozen=True):
    """Allow the worker to send so many more bytes of a response."""

    id: int
    size_bytes: int


def find_pattern(path: str, patterns: Iterable[str]) -> str:
    """Return the first pattern that covers a path, "" if none; `/v1/*` covers all below /v1/."""
    for pattern in patterns:
        if path == pattern or (pattern.endswith("/*") and path.startswith(pattern[:-1])):
            return pattern
    return ""
