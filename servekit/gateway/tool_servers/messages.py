"""What a gateway and the host process of an MCP server say to each other, and its bounds.

Messages are msgpack after their length, in four bytes. They are small: the host cuts what a server
says, so that the gateway's event loop never reads much at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 8 * 2**20
MAX_TOOLS = 128
MAX_RESULT_CHARS = 64 * 1024
LENGTH_BYTES = 4


class Tool(msgspec.Struct, frozen=True):
    """A tool as its server describes it. All of it is untrusted text."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The server is connected, and has these tools."""

    tools: tuple[Tool, ...]
    left_out: tuple[str, ...] = ()  # a sentence for each tool that cannot be offered


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The server cannot be used; the host ends."""

    reason: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """The result of a call, or why there is none. Untrusted text."""

    id: int
    text: str
    is_error: bool = False
    lost: bool = False  # the server knows the connection no longer, and has not run the call


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a tool."""

    id: int
    tool: str
    arguments: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Give up a call; no result follows."""

    id: int


FromHost = Ready | Failed | Result
ToHost = Call | Cancel


def pack(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
