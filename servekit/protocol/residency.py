"""Messages about models that come and go: asleep, awake, loaded by need.

supervisor → worker    Sleep · Wake
worker → supervisor    Asleep · Awake · NotDone
supervisor → gateway   Residence, of each model that comes and goes
gateway → supervisor   Wanted · KeepAlive
operator → supervisor  Reside
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value

#: When a model is loaded: at the start, by the first request for it, by an operator only.
LoadMode = Literal["on_start", "on_demand", "manual"]
#: Where a model's weights are: on its device, in the host's memory, or on disk only. "coming":
#: they are being loaded, or woken; "leaving": it finishes what runs, and is then put to sleep or
#: stopped; "failed": it could not be loaded.
Residency = Literal["resident", "asleep", "stopped", "coming", "leaving", "failed"]

Want = Literal["load", "unload", "sleep", "wake"]


class ResidencyStatus(Value, frozen=True):
    """How a model that comes and goes stands. The last three are for operators only."""

    load: LoadMode
    tier: Residency
    reason: str = ""  # why it is where it is, in a sentence
    stays_s: float | None = None  # so long after its last request; None: until others need memory
    idle_s: float = 0.0
    leaves_in_s: float | None = None
    waiting: int = 0  # requests


class Sleep(Message, frozen=True):
    """Take no more requests, finish what runs, and give the device's memory back.

    Sent once the gateways send nothing more; answered by Asleep, or NotDone.
    """


class Wake(Message, frozen=True):
    """Take it again. Answered by Awake once a token has come back, or NotDone."""


class Asleep(Message, frozen=True):
    took_s: float


class Awake(Message, frozen=True):
    took_s: float


class SleepFailed(Message, frozen=True):
    """The worker is as it was; why it could not sleep or wake."""

    message: str


class ModelDemand(Message, frozen=True):
    """Of one gateway: how much a model that comes and goes is in use there.

    Sent when the first request has to wait, and else on change, at most ten times a second.
    """

    model: str
    waiting: int  # requests in its queue
    running: int
    idle_s: float = 0.0  # since it last had a request


class KeepAlive(Message, frozen=True):
    """A client says how long a model is to stay after its requests, as Ollama's `keep_alive`."""

    model: str
    stay_s: float | None  # 0: unload it when idle; infinity: it stays; None: as the file has it
    loads: bool = False  # and it is to be loaded now, without a request


class SetResidency(Message, frozen=True):
    """Load, unload, put to sleep or wake a model.

    Answered by Accepted when done (or, with `wait` unset, begun), or Refused.
    """

    model: str
    want: Want
    wait: bool = True
