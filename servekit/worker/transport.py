"""The channels of a worker to its supervisor and to the gateways.

On its supervisor's own machine it is an `InheritedChannel`: a socket that the worker was started
with, whose end is the worker's end; gateways connect to a Unix socket. On another machine it is
`remote.TcpChannel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from servekit.protocol.messages import FromWorker, ToWorker, WorkerSpec
from servekit.protocol.transport.connection import Connection, Factory, adopt, dial, listen

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

#: For the last words to reach the supervisor.
_CLOSE_S = 1.0

log: Any = structlog.get_logger("servekit.worker")

#: How often a worker looks whether its socket is still there.
_LOOK_EVERY_S = 1.0
OnMessage = Callable[[ToWorker], None]
OnEnd = Callable[[Exception | None], None]


class Channel(Protocol):
    """Both ways into a worker. `is_remote`: its like may be on other machines."""

    is_remote: bool

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Hear the supervisor from now on. `on_end` is called when it is gone for good."""

    def send(self, message: FromWorker) -> None:
        """Tell the supervisor."""

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        """Let gateways in. Raises OSError."""

    def stop_serving(self) -> None:
        """Let no more gateways in."""

    async def dial(self, factory: Factory) -> Connection[object]:
        """Reach itself as gateways do. Raises OSError."""

    async def close(self) -> None:
        """Send what is left, and close."""


class InheritedChannel:
    """The line of a worker whose supervisor is on this machine."""

    is_remote = False

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._connection: Connection[ToWorker] | None = None
        self._server: asyncio.Server | None = None
        self._path = ""
        self._keeping: asyncio.Task[None] | None = None

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
        self._keeping = asyncio.get_running_loop().create_task(self._keep(runner))

    async def _keep(self, runner: Runner) -> None:
        """Make the socket anew when somebody has removed it: gateways that come later need it."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if os.path.exists(self._path):  # noqa: ASYNC240, PTH110 - one quick call
                continue
            if self._server is not None:
                self._server.close()  # first, for some event loops remove the path as they close
            with contextlib.suppress(OSError):  # the supervisor makes the directory anew
                self._server = await listen(self._path, runner.connect)
                log.warning("the socket was removed, and is made anew", path=self._path)

    def stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()

    async def dial(self, factory: Factory) -> Connection[object]:
        return await dial(self._path, factory)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait((self._connection.closed,), timeout=_CLOSE_S)
