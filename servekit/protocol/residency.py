"""Messages about models that come and go: asleep, awake, loaded on demand.

supervisor → worker    Sleep · Wake
worker → supervisor    Asleep · Awake · SleepFailed
supervisor → gateway   ResidencyStatus, of each such model, in its ModelStatus
gateway → supervisor   ModelDemand · KeepAlive
operator → supervisor  SetResidency
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from servekit.protocol.base import Message, Value

#: When a model is loaded: at the start, by its first request, by an operator only.
LoadMode = Literal["on_start", "on_demand", "manual"]
#: Where a model's weights are: on its device, in the host's memory, or on disk only. "coming":
#: loading or waking; "leaving": finishing its requests before it sleeps or stops; "failed": it
#: could not be loaded.
Residency = Literal["resident", "asleep", "stopped", "coming", "leaving", "failed"]

#: The tiers as texts for people name them, where the word is another.
TIER_TEXT: Mapping[str, str] = {"resident": "loaded", "coming": "loading", "leaving": "unloading"}

Want = Literal["load", "unload", "sleep", "wake"]


def tier_text(tier: str) -> str:
    return TIER_TEXT.get(tier, tier)


class ResidencyStatus(Value, frozen=True):
    """The residence of a model that comes and goes. The last three are for operators only."""

    load: LoadMode
    tier: Residency
    reason: str = ""  # why it is where it is, in a sentence
    stays_s: float | None = None  # so long after its last request; None: until others need memory
    idle_s: float = 0.0
    leaves_in_s: float | None = None
    waiting: int = 0  # requests


class Sleep(Message, frozen=True):
    """Finish the running requests and release the device's memory.

    Sent once the gateways send no more requests; answered by Asleep, or SleepFailed.
    """


class Wake(Message, frozen=True):
    """Take the device's memory again. Answered by Awake after a first token, or SleepFailed."""


class Asleep(Message, frozen=True):
    took_s: float


class Awake(Message, frozen=True):
    took_s: float


class SleepFailed(Message, frozen=True):
    """The worker could not sleep or wake, and is as it was; `message` is the reason."""

    message: str


class ModelDemand(Message, frozen=True):
    """The use of one model that comes and goes, at one gateway.

    Sent when the first request has to wait, and on changes, at most ten times a second.
    """

    model: str
    waiting: int  # requests in its queue
    running: int
    idle_s: float = 0.0  # since it last had a request


class KeepAlive(Message, frozen=True):
    """A client's request for how long a model stays after its requests (Ollama's `keep_alive`)."""

    model: str
    stay_s: float | None  # 0: unload it when idle; infinity: it stays; None: as the file has it
    loads: bool = False  # also load it now, without a request


class SetResidency(Message, frozen=True):
    """Load, unload, put to sleep or wake a model.

    Answered by Accepted when done (or, without `wait`, when begun), or Refused.
    """

    model: str
    want: Want
    wait: bool = True
