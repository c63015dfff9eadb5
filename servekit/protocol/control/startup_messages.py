"""Phases of a process's start, as it reports them and the supervisor keeps them.

worker → supervisor    PhaseReport · GatewayConnected
supervisor → operator  Starts, in Status; Start, in the record of a death before it was ready

Times on the wire are those of CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

from typing import Literal

from servekit.protocol.base import Message, Value

#: The cause of a start: start of the instance, reload of the file, a request, an operator, restart
#: after an exit, start of a fork server ("standby"), or one more replica because of the load.
Cause = Literal["up", "reload", "request", "operator", "restart", "standby", "scale"]

#: The phase in which a worker has imported its engine, and waits for its GPUs' turn and memory.
GATE = "gate"


class Phase(Value, frozen=True):
    """A part of a start. Phases may overlap, and one may be `within` another."""

    name: str
    began_s: float
    ended_s: float | None = None  # None: it goes on, or its process died in it
    within: str = ""  # the name of another
    failed: bool = False  # an error ended it
    why: str = ""  # it failed, or what it looked for is not here
    file: str = ""  # that it reads, which may be what its process dies of


class PhaseReport(Message, frozen=True):
    """A phase has begun, or the same phase has ended."""

    phase: Phase


class GatewayConnected(Message, frozen=True):
    """A gateway has connected, and sends requests from now on."""

    gateway: str
    at_s: float


class Start(Value, frozen=True):
    """A start of a process. Seconds count from what it was started for."""

    cause: Cause
    at: float  # Unix time of that, s
    state: Literal["starting", "up", "died"]
    phases: tuple[Phase, ...]  # as they began
    total_s: float  # until requests reach it; else until it died, or until now
    first_token_s: float | None = None  # until its first token came back; None: none has


class Starts(Value, frozen=True):
    """The start of a process, and the one before, the newest last."""

    name: str
    starts: tuple[Start, ...]
