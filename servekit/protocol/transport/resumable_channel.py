"""The control channel of a process on another machine, which outlives its connections.

    supervisor → process    Hello · Attach · and what any worker or gateway is told
    process → supervisor    Hello · Attached · Superseded · and what any of them tells

A connection may break where both ends live on. Each end keeps what it has sent; when the
supervisor has dialled again, each says how many messages it has had, and is sent the others: all
arrive once, in order. What is only about the moment (`FLEETING`) is neither counted nor repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from servekit.protocol.adapters import AdapterSpec, TopologyApplied
from servekit.protocol.base import Message
from servekit.protocol.messages import Loading, Ping, Pong, Topology, WorkerSpec
from servekit.protocol.remote_gateway import AdminRequest, AdminResponse, CertificateUpdate

#: Messages that are sent again by being sent anew.
FLEETING = (
    Ping,
    Pong,
    Loading,
    Topology,
    TopologyApplied,
    CertificateUpdate,
    AdminRequest,
    AdminResponse,
)
#: Messages kept for a peer that has not said that it has them.
MOST_KEPT = 1024


class Attach(Message, frozen=True):
    """Take this connection for your control channel, instead of any other."""

    session: str  # the same for all connections of one supervisor's hold on this worker
    have: int = 0  # messages of that process that were had in this session


class Attached(Message, frozen=True):
    """Answer to Attach; what the supervisor has not had follows."""

    resumed: bool  # False: the session is new here, and a summary follows
    have: int  # messages of the supervisor that were had in this session
    pid: int
    now_s: float  # by its monotonic clock
    state: Literal["empty", "loading", "ready", "failed"]
    spec: WorkerSpec | None = None  # what a worker was told to load
    added: tuple[AdapterSpec, ...] = ()  # what operators have added to its model, as it was told


class SupervisorReplaced(Message, frozen=True):
    """Another supervisor has attached: this one has nothing more to say here."""


class ReplayBuffer:
    """What one end has sent in one session, as far as the other end may not have it."""

    def __init__(self) -> None:
        self._messages: deque[msgspec.Struct] = deque(maxlen=MOST_KEPT)
        self._sent = 0

    def add(self, message: msgspec.Struct) -> None:
        """It is being sent."""
        if not isinstance(message, FLEETING):
            self._messages.append(message)
            self._sent += 1

    def extend(self, messages: Iterable[msgspec.Struct]) -> None:
        for message in messages:
            self.add(message)

    def after(self, have: int) -> list[msgspec.Struct] | None:
        """What the peer that has had so many is to be sent; None where it is not known any more."""
        missing = self._sent - have
        if not 0 <= missing <= len(self._messages):
            return None
        while len(self._messages) > missing:
            self._messages.popleft()
        return list(self._messages)
