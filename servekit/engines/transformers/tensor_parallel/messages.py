"""Messages between rank 0 and the other ranks of a replica, one per packet.

rank 0 → rank    Begin · MakePages · DropPages · Run · FallAsleep · WakeUp
rank → rank 0    Done · Failed       in answer to all of them but Run
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec

from servekit.engines.model_files.model_kind import ModelKind
from servekit.engines.transformers.batching.kv_cache import CachePlan
from servekit.protocol.base import Message, Value
from servekit.protocol.messages import WorkerSpec

#: Maximum size of a message. The longest is a Run, with four numbers per request in a step.
MAX_BYTES = 2**20


class Begin(Message, frozen=True):
    """Command to load a rank's part of the model in `folder`; all ranks meet at `store`."""

    spec: WorkerSpec
    folder: str
    store: str
    threads: int
    kind: ModelKind


class MakePages(Message, frozen=True):
    """Command to create a KV cache for `attention`."""

    plan: CachePlan
    attention: str


class DropPages(Message, frozen=True):
    """Command to free the KV cache, if there is one."""


class TensorForm(Value, frozen=True):
    """A tensor in the broadcast; `dtype` is torch's name without `torch.`."""

    dtype: str
    shape: tuple[int, ...]


#: What a pass runs: the whole model, or one of the parts that a model with media has.
Runs = Literal["model", "embedding", "decoder", "head"]


class Run(Message, frozen=True):
    """Command to run the model or a part of it once, with `size_bytes` of tensors in a broadcast.

    `arguments` and `tensors` are those of `tensor_transfer`. `attention` is the library's name of
    an implementation, or empty where the part has none.
    """

    what: Runs
    attention: str
    arguments: Any
    tensors: tuple[TensorForm, ...]
    size_bytes: int


class FallAsleep(Message, frozen=True):
    """Command to keep the weights in host memory, and free the device's."""


class WakeUp(Message, frozen=True):
    """Command to move the weights back to the device."""


class Done(Message, frozen=True):
    """Success; `free_bytes` is the memory available on the rank's device."""

    free_bytes: int = 0


class Failed(Message, frozen=True):
    """Failure; the rank's state is unchanged."""

    message: str
    out_of_memory: bool = False
    permanent: bool = True


ToRank = Begin | MakePages | DropPages | Run | FallAsleep | WakeUp
FromRank = Done | Failed

_encode = msgspec.msgpack.Encoder().encode
_order: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
_answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)


def send_message(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; blocks, and raises OSError."""
    channel.send(_encode(message))


def receive_order(channel: socket.socket) -> ToRank | None:
    """Return the next command; None when rank 0 is gone."""
    data = channel.recv(MAX_BYTES)
    order: ToRank | None = _order.decode(data) if data else None
    return order


def receive_answer(channel: socket.socket) -> FromRank | None:
    """Return the next answer; None when the rank is gone."""
    data = channel.recv(MAX_BYTES)
    answer: FromRank | None = _answer.decode(data) if data else None
    return answer
