"""Messages about models that come and go: asleep, awake, loaded by need.

supervisor → worker    Sleep · Wake
worker → supervisor    Asleep · Awake · NotDone
gateway → supervisor   Wanted · KeepAlive
operator → supervisor  Reside
"""

from __future__ import annotations

from typing import Literal

from servekit.wire.value import Message

#: Where a model's weights are: on its device, in the host's memory, or on disk only. "coming":
#: they are being loaded, or woken.
Residency = Literal["resident", "asleep", "stopped", "coming"]


class Sleep(Message, frozen=True):
    """Give the device's memory back. Sent when nothing runs; answered by Asleep, or NotDone."""


class Wake(Message, frozen=True):
    """Take it again. Answered by Awake, or NotDone."""


class Asleep(Message, frozen=True):
    took_s: float


class Awake(Message, frozen=True):
    took_s: float


class NotDone(Message, frozen=True):
    """The worker is as it was; why it could not sleep or wake."""

    message: str


class Wanted(Message, frozen=True):
    """Of one gateway: how many requests wait for a model that is not resident.

    Sent when the first one comes, when that changes, at most ten times a second, and with 0 when
    there are none left.
    """

    model: str
    waiting: int


class KeepAlive(Message, frozen=True):
    """A client says how long a model is to stay after its request, as Ollama's `keep_alive`."""

    model: str
    stay_s: float  # 0: unload it when idle; infinity: never


class Reside(Message, frozen=True):
    """Load, unload, put to sleep or wake a model. Answered by Accepted when done, or Refused."""

    model: str
    want: Literal["load", "unload", "sleep", "wake"]
