"""Messages between the supervisor and a fork server, and blocking I/O for a process without a loop.

A fork server has no threads and no event loop, since it will fork: it reads its control channel
one frame at a time. Fork orders go over a second socket of whole messages (SOCK_SEQPACKET), because
file descriptors travel with them.

    supervisor → fork server   Load · Stop           Fork, with two descriptors
    fork server → supervisor   Prepared · BootFailed
    worker → supervisor        Forked · NotForked    answers to Fork
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from servekit.errors import WireError
from servekit.protocol.base import Message
from servekit.protocol.messages import BootFailed, Load, Stop
from servekit.protocol.transport.connection import MAX_FRAME_BYTES

#: Maximum length of a fork order, and of its answer.
MAX_ORDER_BYTES = 4096
#: Length of a mark. Fixed, because a child overwrites its parent's mark in place.
MARK_CHARS = 16


class Prepared(Message, frozen=True):
    """Slow imports are done; the fork server can fork from now on."""


class Fork(Message, frozen=True):
    """Become the worker of this name. Carries its control channel and output as descriptors."""

    name: str
    mark: str  # MARK_CHARS long; of the worker and its descendants


class Forked(Message, frozen=True):
    """The new worker is set up: a child of the supervisor, in its own session, with its mark."""

    pid: int


class NotForked(Message, frozen=True):
    message: str


ToStandby = Load | Stop
FromStandby = Prepared | BootFailed

encode = msgspec.msgpack.Encoder().encode
_order = msgspec.msgpack.Decoder(Fork)
_answer: msgspec.msgpack.Decoder[Forked | NotForked] = msgspec.msgpack.Decoder(Forked | NotForked)
_to_standby: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToStandby)


def decode_order(data: bytes) -> Fork:
    """Decode a fork order. Raises msgspec.MsgspecError."""
    return _order.decode(data)


def decode_answer(data: bytes) -> Forked | NotForked:
    """Decode the answer to a fork order. Raises msgspec.MsgspecError."""
    return _answer.decode(data)


def receive_message(control: socket.socket) -> Load | Stop | None:
    """Return the next message, or None at EOF. Blocks; raises OSError, WireError, MsgspecError."""
    head = _read_exactly(control, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is over the limit")
    body = _read_exactly(control, length)
    message: Load | Stop | None = None if body is None else _to_standby.decode(body)
    return message


def send_message(control: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Blocks; raises OSError."""
    body = encode(message)
    control.sendall(len(body).to_bytes(4, "big") + body)


def _read_exactly(control: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            return None
        data += more
    return data
