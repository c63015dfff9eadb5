"""The channel between a gateway and its supervisor.

On the supervisor's own machine it is an `InheritedChannel`, a socket that the gateway was started
with. On another machine it is a `TcpChannel`, a port to which the supervisor connects and
reconnects (`transport.remote_server`); it also carries administration requests, because there is no
control socket.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from servekit.errors import WireError
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse, ToRemoteGateway
from servekit.protocol.messages import (
    FromGateway,
    FromSupervisor,
    Hello,
    Serving,
    ToGateway,
    ToSupervisor,
    Traffic,
)
from servekit.protocol.residency import ModelDemand
from servekit.protocol.transport.connection import Connection, SocketChannel
from servekit.protocol.transport.remote_server import ListenOptions, TcpServer
from servekit.protocol.transport.resumable_channel import Attached

OnMessage = Callable[[Any], None]
OnEnd = Callable[[Exception | None], None]


class Channel(Protocol):
    """The interface of a gateway's channel to its supervisor."""

    @property
    def has_supervisor(self) -> bool:
        """Return whether a supervisor is connected, as far as is known."""

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Receive the supervisor's messages from now on; `on_end` is called when it is gone."""

    def send(self, message: FromGateway) -> None:
        """Send a message to the supervisor."""

    async def close(self) -> None:
        """Send the remaining messages, and close."""


class InheritedChannel(SocketChannel):
    """The channel of a gateway whose supervisor is on this machine."""

    incoming = ToGateway
    # messages may be lost after EOF: no supervisor reconnects to this channel
    has_supervisor = True


class TcpChannel(TcpServer):
    """The channel of a gateway whose supervisor is on another machine."""

    role = "gateway"
    incoming = ToRemoteGateway

    def __init__(self, post: ListenOptions) -> None:
        super().__init__(post)
        self._serving: Serving | None = None
        self._traffic: Traffic | None = None
        self._uses: dict[str, ModelDemand] = {}
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[FromSupervisor]] = {}

    def send(self, message: msgspec.Struct) -> None:
        match message:
            case Serving():
                self._serving = message
            case Traffic():
                self._traffic = message
            case ModelDemand(model):
                self._uses[model] = message
        super().send(message)

    def replay_messages(self) -> list[Any]:
        said: list[msgspec.Struct | None] = [self._serving, self._traffic, *self._uses.values()]
        return [message for message in said if message is not None]

    def attached(self, resumed: bool, had: int) -> Attached:
        state = "empty" if self._serving is None else "ready"
        return Attached(resumed, had, os.getpid(), time.monotonic(), state)  # type: ignore[arg-type]

    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        raise WireError("only a supervisor may connect to a gateway here")

    # ---- requests of operators

    async def put(self, question: ToSupervisor, deadline_s: float) -> FromSupervisor:
        """Send an operator's request and return the answer; raises as `rpc.ask_supervisor`."""
        if not self.has_supervisor:
            raise ConnectionRefusedError("no supervisor is connected now")
        id, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        try:
            self.send(AdminRequest(id, question))
            async with asyncio.timeout(deadline_s):
                return await answer  # type: ignore[no-any-return]
        finally:
            del self._asked[id]

    def on_control_message(self, message: ToRemoteGateway) -> None:
        if not isinstance(message, AdminResponse):
            super().on_control_message(message)
        elif (asked := self._asked.get(message.id)) is not None and not asked.done():
            asked.set_result(message.answer)

    def detached(self, connection: Connection[Any], error: Exception | None) -> None:
        super().detached(connection, error)
        for asked in self._asked.values() if not self.has_supervisor else ():
            if not asked.done():
                asked.set_exception(EOFError("the supervisor closed the connection"))
