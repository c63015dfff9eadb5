"""A fork server, which starts workers in a third of the time.

A fresh interpreter takes seconds of a core to import torch and transformers, while a model lacks a
worker. A fork server of the same environment, GPU pin included, has done so already, and its forks
are our own children in every respect; see `worker.fork_server`. If it is not ready or cannot fork,
a fresh interpreter is started instead: nothing depends on it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.protocol import fork_server
from servekit.protocol.fork_server import Fork, FromStandby, NotForked, Prepared
from servekit.protocol.messages import BootFailed, Load, ReplicaStatus, Stop
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.lifecycle.startup_timing import StartReason
from servekit.supervisor.process import environment
from servekit.supervisor.process.child_process import Command
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.workers.worker_spec import worker_spec
from servekit.system import subreaper
from servekit.system.subreaper import Forked

log: Any = structlog.get_logger("servekit.supervisor")

#: A fork takes tens of milliseconds; the wait for it ends after this time.
_FORK_S = 5.0
_STOP_GRACE_S = 1.0


class ForkServer(ManagedProcess[FromStandby]):
    """The fork server for the workers of one model at one place."""

    incoming = FromStandby
    begins_with = "preparation"

    def __init__(self, model: ModelConfig, place: Assignment, host: SupervisorContext) -> None:
        where = "-".join(["standby", *(str(gpu.index) for gpu in place.gpus)])
        super().__init__(f"{model.name}/{where}", host)
        self.starting.occasion = StartReason.now("standby")
        self.model = model
        self.place = place
        self.forks = 0
        self._env: Mapping[str, str] = {}
        self._orders: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._turn = asyncio.Lock()

    def command(self) -> Command:
        self._close()
        self._orders, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        host = self.host
        self._env = environment.for_worker(
            host.environ, self.place, self.model.env, host.mark, KINDS[self.model.engine]
        )
        fd = self._theirs.fileno()
        return Command(
            name=self.name,
            module="servekit.worker",
            args=("--name", self.name, "--orders-fd", str(fd)),
            env=self._env,
            log_path=host.run_dir.log_path(self.name),
            pass_fds=(fd,),
        )

    def greet(self) -> None:
        assert self.child is not None
        if self._theirs is not None:
            self._theirs.close()  # so that the connection ends with the fork server
        self.child.send(Load(worker_spec(self.model, self.place, "")))

    def receive(self, message: FromStandby) -> None:
        match message:
            case Prepared():
                log.info("standby_ready", child=self.name)
                self.came_up()
            case BootFailed(reason, permanent):
                self.fail(reason, permanent=permanent)

    def load(self) -> tuple[int, int]:
        return self.forks, 0

    def buried(self) -> None:
        self._close()

    def _close(self) -> None:
        for sock in (self._orders, self._theirs):
            if sock is not None:
                sock.close()
        self._orders = self._theirs = None

    async def fork(
        self, name: str, env: Mapping[str, str], mark: str, control_fd: int, output_fd: int
    ) -> Forked | None:
        """Fork a worker of that name; return None if a fresh interpreter must be used.

        The caller keeps `control_fd` and `output_fd`; the worker has copies.
        """
        if self.state != "ready" or self.ending or env != self._env:
            return None
        order = fork_server.encode(Fork(name, mark))
        try:
            async with self._turn, asyncio.timeout(_FORK_S):
                return self._taken(await self._ask(order, [control_fd, output_fd]))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            # A worker that is forked too late has no connection, and ends by itself.
            log.warning("fork_failed", child=name, reason=f"{type(error).__name__}: {error}")
            if self.child is not None:
                self.child.kill("did not fork when it was asked to")
            return None

    async def _ask(self, order: bytes, fds: list[int]) -> bytes:
        if self._orders is None:
            raise ConnectionError("the standby is gone")
        socket.send_fds(self._orders, [order], fds)
        answer = await self._loop.sock_recv(self._orders, fork_server.MAX_ORDER_BYTES)
        if not answer:
            raise ConnectionError("the standby is gone")
        return answer

    def _taken(self, answer: bytes) -> Forked | None:
        match fork_server.decode_answer(answer):
            case NotForked(message):
                log.warning("fork_refused", reason=message)
                self.reason = message
                self.end(Stop(), _STOP_GRACE_S)  # the next fork would fail the same way
                return None
            case forked:
                self.forks += 1
                return subreaper.take(forked.pid)

    def status(self) -> ReplicaStatus:
        """Return its status as a replica's, without a socket or requests."""
        return ReplicaStatus(
            name=self.name,
            state=self.state,
            socket="",
            pid=self.pid,
            device=self.place.device,
            reason=self.reason,
            restarts=self.restarts,
            rss_bytes=self.rss_bytes,
        )
