"""The channels of a worker to its supervisor and to the gateways.

On the supervisor's machine this is an `InheritedChannel`: a socket that the worker was started
with, whose end is also the worker's end; gateways connect to a Unix socket. On another machine it
is `remote.TcpChannel`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from servekit.protocol.messages import FromWorker, Ping, ToWorker, WorkerSpec
from servekit.protocol.transport.connection import (
    Connection,
    Factory,
    SocketChannel,
    dial_address,
    listen_at,
)

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

log: Any = structlog.get_logger("servekit.worker")

OnMessage = Callable[[ToWorker], None]
OnEnd = Callable[[Exception | None], None]


class Channel(Protocol):
    """Interface of a worker's channels.

    `is_remote`: workers of the same model may be on other machines.
    """

    is_remote: bool

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Connect to the supervisor; `on_end` is called when it is gone for good."""

    def send(self, message: FromWorker) -> None:
        """Send a message to the supervisor."""

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        """Accept gateways. Raises OSError."""

    def stop_serving(self) -> None:
        """Stop accepting gateways."""

    async def dial(self, factory: Factory) -> Connection[object]:
        """Connect to this worker as gateways do. Raises OSError."""

    async def close(self) -> None:
        """Send everything queued, then close."""


class InheritedChannel(SocketChannel):
    """The channel of a worker on the supervisor's machine."""

    incoming = ToWorker
    is_remote = False

    def __init__(self, control: socket.socket) -> None:
        super().__init__(control)
        self._server: asyncio.Server | None = None
        self._path = ""
        self._runner: Runner | None = None  # once it serves
        self._restoring: asyncio.Task[None] | None = None

    async def open(self, on_message: OnMessage, on_end: OnEnd) -> None:
        def receive(message: ToWorker) -> None:
            on_message(message)
            if isinstance(message, Ping):  # no timer of its own: each wake-up costs power
                self._check_socket()

        await super().open(receive, on_end)

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        self._path = spec.socket
        # The server lives only as long as a reference to it.
        self._server = await listen_at(spec.socket, runner.connect)
        self._runner = runner

    def _check_socket(self) -> None:
        """Create the socket again if its file was removed, for gateways that connect later."""
        if self._runner is None or os.path.exists(self._path):  # noqa: PTH110 - one quick call
            return
        if self._restoring is None or self._restoring.done():
            restoring = self._restore_socket(self._runner)
            self._restoring = asyncio.get_running_loop().create_task(restoring)

    async def _restore_socket(self, runner: Runner) -> None:
        if self._server is not None:
            self._server.close()  # first, as some event loops remove the path on close
        with contextlib.suppress(OSError):  # the supervisor recreates the directory
            self._server = await listen_at(self._path, runner.connect)
            log.warning("worker_socket_restored", path=self._path)

    def stop_serving(self) -> None:
        self._runner = None
        if self._server is not None:
            self._server.close()

    async def dial(self, factory: Factory) -> Connection[object]:
        self._check_socket()
        if self._restoring is not None:
            await asyncio.wait((self._restoring,))
        return await dial_address(self._path, factory)

    async def close(self) -> None:
        if self._restoring is not None:
            self._restoring.cancel()
        await super().close()
