"""What a supervisor and a standby say to each other, and a connection for one that has no loop.

A standby is a process that will fork, so it has no threads and no event loop: it reads its control
channel, frames as everywhere, one after the other. Forks are ordered over a second socket, of
whole messages (SOCK_SEQPACKET), because descriptors travel with them.

    supervisor → standby   Load · Stop           Fork, with two descriptors
    standby → supervisor   Prepared · BootFailed
    worker → supervisor    Forked · NotForked    answers to Fork
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from servekit.errors import WireError
from servekit.protocol.base import Message
from servekit.protocol.messages import BootFailed, Load, Stop
from servekit.protocol.transport.connection import MAX_FRAME_BYTES

#: Longest order to fork, and longest answer.
MAX_ORDER_BYTES = 4096
#: Fixed: an order for a child writes its mark over its parent's.
MARK_CHARS = 16


class Prepared(Message, frozen=True):
    """All that takes long is done; it forks from now on."""


class Fork(Message, frozen=True):
    """Become a worker of this name. With it come its control channel and where its output goes."""

    name: str
    mark: str  # MARK_CHARS long; of the worker and all that it starts


class Forked(Message, frozen=True):
    """By the new worker, once it is in order: a child of the supervisor, with a session of its own,
    under its own mark.
    """

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
    """Raises msgspec.MsgspecError."""
    return _order.decode(data)


def decode_answer(data: bytes) -> Forked | NotForked:
    """Raises msgspec.MsgspecError."""
    return _answer.decode(data)


def receive(control: socket.socket) -> Load | Stop | None:
    """The next message, None at the end. Blocks; raises OSError, WireError, MsgspecError."""
    head = _exactly(control, 4)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is over the limit")
    body = _exactly(control, length)
    message: Load | Stop | None = None if body is None else _to_standby.decode(body)
    return message


def send(control: socket.socket, message: msgspec.Struct) -> None:
    """Blocks; raises OSError."""
    body = encode(message)
    control.sendall(len(body).to_bytes(4, "big") + body)


def _exactly(control: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        more = control.recv(count - len(data))
        if not more:
            return None
        data += more
    return data
