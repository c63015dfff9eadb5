"""Requests of operators to the supervisor, and its answers.

Imported by way of `servekit.protocol.messages`, which has the unions.

operator → supervisor  GetStatus · Shutdown · GetWhy · Reload · SetProfile · Restart · CreateLink,
                       and those of adapters and residency
gateway → supervisor   RedeemLink, as an operator
supervisor → operator  Status · Accepted · Refused · Why · Adapters · Link
"""

from __future__ import annotations

from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.base import Message, Value
from servekit.protocol.control.startup_messages import Starts
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import (
    GatewayStatus,
    GpuStatus,
    ModelStatus,
    ReplicaHistory,
    ScaleStatus,
)


class GetStatus(Message, frozen=True):
    pass


class Shutdown(Message, frozen=True):
    now: bool = False  # do not drain


class GetWhy(Message, frozen=True):
    """Ask for the reason for the state of a model or replica. Answered by Why, or Refused."""

    name: str


class Reload(Message, frozen=True):
    """Read the configuration again. Answered by Accepted, or Refused with the errors found."""


class SetProfile(Message, frozen=True):
    """Serve the models of a profile of the file alone; answered as Reload, which it also does."""

    name: str  # or "all"


class Restart(Message, frozen=True):
    """Replace the workers of a model, or one of them; answered by Accepted when done, or Refused.

    Without `wait` it is answered when begun.
    """

    name: str  # a model, an alias, or a worker such as MODEL/0
    wait: bool = True


class CreateLink(Message, frozen=True):
    """Make a one-time link for the owner's browser. Answered by Link, or Refused."""


class RedeemLink(Message, frozen=True):
    """Use the token of a link up. Answered by Accepted if it was valid, else by Refused."""

    token: str


class Link(Message, frozen=True):
    """The answer to CreateLink. The first browser that opens it administers the instance."""

    url: str
    life_s: float  # how long it may be opened


class Why(Message, frozen=True):
    """The answer to GetWhy."""

    model: str
    breaker: str  # "closed", or a sentence that says since when and until when it is open
    replicas: tuple[ReplicaHistory, ...]
    adapters: tuple[AdapterStatus, ...] = ()
    residence: ResidencyStatus | None = None
    scale: ScaleStatus | None = None


class ModelTraffic(Value, frozen=True):
    """The traffic of a model at all gateways, at most a second ago."""

    model: str
    queued: int  # requests that wait at the gateways
    tokens: int  # given out since the supervisor began; the rate is its difference over time


class Status(Message, frozen=True):
    """Answer to GetStatus."""

    version: str  # servekit's
    pid: int  # the supervisor's
    url: str  # where it listens
    config: str  # path of the configuration file
    started_at: float  # Unix time, s
    rss_bytes: int  # resident memory of the supervisor
    models: tuple[ModelStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    draining: bool  # it is shutting down
    starts: tuple[Starts, ...] = ()  # how workers, gateways and standbys came up
    gpus: tuple[GpuStatus, ...] = ()  # GPUs that servekit may use, as last read
    traffic: tuple[ModelTraffic, ...] = ()
    profile: str = ""  # in force; "": all models are served
    profiles: dict[str, tuple[str, ...]] = {}  # those of the file, with their models


class Accepted(Message, frozen=True):
    message: str = ""  # what will be done


class Refused(Message, frozen=True):
    message: str
    invalid: bool = False  # the request itself is wrong; a retry would fail, too
    retry_after_s: float = 0.0  # over 0: not possible now; retry later
