"""How a worker is reached: by its supervisor, and by the gateways.

On its supervisor's own machine that is `Inherited`: the control channel is a socket that it was
started with, and its lifeline; gateways come to a Unix socket. On another it is `remote.Remote`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from servekit.wire.connection import Connection, Factory, adopt, dial, listen
from servekit.wire.messages import FromWorker, ToWorker, WorkerSpec

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

OnMessage = Callable[[ToWorker], None]
OnEnd = Callable[[Exception | None], None]


class Line(Protocol):
    """Both ways into a worker."""

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Hear the supervisor from now on. `on_end` is called when it is gone for good."""

    def send(self, message: FromWorker) -> None:
        """Tell the supervisor."""

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        """Let gateways in. Raises OSError."""

    async def dial(self, factory: Factory) -> Connection[object]:
        """Reach itself as gateways do. Raises OSError."""

    async def close(self) -> None:
        """Send what is left, and close."""


class Inherited:
    """The line of a worker whose supervisor is on this machine."""

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._connection: Connection[ToWorker] | None = None
        self._server: asyncio.Server | None = None
        self._path = ""

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        self._connection = connection = Connection[ToWorker](ToWorker, on_message, on_end)
        await adopt(self._socket, lambda: connection)

    def send(self, message: FromWorker) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        self._path = spec.socket
        # Kept: the server lives as long as its reference.
        self._server = await listen(spec.socket, runner.connect)

    async def dial(self, factory: Factory) -> Connection[object]:
        return await dial(self._path, factory)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
