"""The control channel of a process on another machine, which outlives its connections.

    supervisor → process    Hello · Attach · and the messages to any worker or gateway
    process → supervisor    Hello · Attached · SupervisorReplaced · and those of any of them

A connection may break while both ends live. Each end keeps its sent messages. After a reconnect
each end reports how many messages it has received and gets the rest: all arrive once, in order.
Messages about the moment (`FLEETING`) are neither counted nor repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from servekit.protocol.adapters import AdapterSpec, TopologyApplied
from servekit.protocol.base import Message
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse, CertificateUpdate
from servekit.protocol.messages import Loading, Ping, Pong, Topology, WorkerSpec

#: Messages that are not repeated after a reconnect: newer ones replace them.
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
#: Maximum messages kept for a peer that has not confirmed them.
MOST_KEPT = 1024


class Attach(Message, frozen=True):
    """Use this connection as the control channel, in place of any other."""

    session: str  # the same for all connections of one supervisor's hold on this worker
    have: int = 0  # messages received from the process in this session


class Attached(Message, frozen=True):
    """The answer to Attach; the messages that the supervisor lacks follow."""

    resumed: bool  # False: the session is new here, and a summary follows
    have: int  # messages received from the supervisor in this session
    pid: int
    now_s: float  # by its monotonic clock
    state: Literal["empty", "loading", "ready", "failed"]
    spec: WorkerSpec | None = None  # the worker's Load
    added: tuple[AdapterSpec, ...] = ()  # adapters that operators have added to its model


class SupervisorReplaced(Message, frozen=True):
    """The control channel belongs to another supervisor now."""


class ReplayBuffer:
    """The messages that one end has sent in one session and the other end may lack."""

    def __init__(self) -> None:
        self._messages: deque[msgspec.Struct] = deque(maxlen=MOST_KEPT)
        self._sent = 0

    def add(self, message: msgspec.Struct) -> None:
        """Record a message that is being sent."""
        if not isinstance(message, FLEETING):
            self._messages.append(message)
            self._sent += 1

    def extend(self, messages: Iterable[msgspec.Struct]) -> None:
        for message in messages:
            self.add(message)

    def after(self, have: int) -> list[msgspec.Struct] | None:
        """Return the messages after the first `have`, and forget those; None if they are lost."""
        missing = self._sent - have
        if not 0 <= missing <= len(self._messages):
            return None
        while len(self._messages) > missing:
            self._messages.popleft()
        return list(self._messages)
