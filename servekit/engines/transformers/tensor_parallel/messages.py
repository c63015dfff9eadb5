"""What rank 0 and the other ranks of a replica say to each other: one message, one packet.

rank 0 → rank    Begin · MakePages · DropPages · Run · FallAsleep · WakeUp
rank → rank 0    Done · Failed       in answer to all of them but Run
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from servekit.protocol.base import Message, Value
from servekit.protocol.messages import WorkerSpec

#: Longest message. The longest is a Run: four numbers for each of the requests in a step.
MAX_BYTES = 2**20


class Begin(Message, frozen=True):
    """Load your part of the model in `folder`; `store` is where all ranks meet."""

    spec: WorkerSpec
    folder: str
    store: str
    threads: int
    for_embeddings: bool


class MakePages(Message, frozen=True):
    """Make a KV cache for `attention`; the numbers are those of `kv_cache.Plan`."""

    blocks: int
    block_size: int
    batch_tokens: int
    slots: int
    token_bytes: int
    attention: str


class DropPages(Message, frozen=True):
    """Free the KV cache, if there is one."""


class TensorForm(Value, frozen=True):
    """A tensor in the broadcast: `dtype` as torch names it, without `torch.`."""

    dtype: str
    shape: tuple[int, ...]


class Run(Message, frozen=True):
    """Run the model once. `arguments` and `tensors` are `packing`'s; `size_bytes` are broadcast."""

    attention: str
    arguments: Any
    tensors: tuple[TensorForm, ...]
    size_bytes: int


class FallAsleep(Message, frozen=True):
    """Keep the weights in the host's memory, and give the device's back."""


class WakeUp(Message, frozen=True):
    """Take it again."""


class Done(Message, frozen=True):
    """`free_bytes` are what could be had on its device."""

    free_bytes: int = 0


class Failed(Message, frozen=True):
    """It is as it was before."""

    message: str
    out_of_memory: bool = False
    permanent: bool = True


ToRank = Begin | MakePages | DropPages | Run | FallAsleep | WakeUp
FromRank = Done | Failed

_encode = msgspec.msgpack.Encoder().encode
_order: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
_answer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    """Blocks; raises OSError."""
    channel.send(_encode(message))


def receive_order(channel: socket.socket) -> ToRank | None:
    """The next one; None when rank 0 is gone."""
    data = channel.recv(MAX_BYTES)
    order: ToRank | None = _order.decode(data) if data else None
    return order


def receive_answer(channel: socket.socket) -> FromRank | None:
    """The next one; None when the rank is gone."""
    data = channel.recv(MAX_BYTES)
    answer: FromRank | None = _answer.decode(data) if data else None
    return answer
