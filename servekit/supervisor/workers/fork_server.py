"""Fork servers, which start workers in a third of the time.

A fresh interpreter takes seconds of a core to import torch and its engine's library, while a model
lacks a worker. A fork server of the same environment, GPU pin included, has done so already, and
its forks are our own children in every respect; see `worker.fork_server`. If it is not ready or
cannot fork, a fresh interpreter is started instead: nothing depends on it.

There is one for each environment of a model's workers: one on the CPU, and one for each GPU or set
of GPUs that a replica has. They start when all workers have come up: they take nothing from those,
and the model's files have been fetched. They end when the model is unloaded, unless that only makes
room for another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.protocol.control import fork_server
from servekit.protocol.control.fork_server import Fork, FromStandby, NotForked, Prepared
from servekit.protocol.messages import BootFailed, Load, ReplicaStatus, Stop
from servekit.supervisor.deployments.config_diff import same_worker
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.process import environment
from servekit.supervisor.process.child_process import Command
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.supervisor.workers.worker_spec import make_worker_spec
from servekit.system import cgroup, subreaper
from servekit.system.gpu.gpus import Slot
from servekit.system.orphan_cleanup import kill_marked
from servekit.system.parent_death import CHILD_MARK
from servekit.system.subreaper import Forked

log: Any = structlog.get_logger("servekit.supervisor")

#: A fork takes tens of milliseconds; the wait for it ends after this time.
FORK_S = 5.0
_STOP_GRACE_S = 1.0
#: With `standby: auto`, the available memory below which none is started.
ROOM_BYTES = 4 * 2**30


class ForkServer(ManagedProcess[FromStandby]):
    """The fork server for the workers of one model at one place."""

    incoming = FromStandby
    begins_with = "preparation"

    def __init__(self, model: ModelConfig, place: Assignment, host: SupervisorContext) -> None:
        where = "-".join(["standby", *(str(gpu.index) for gpu in place.gpus)])
        super().__init__(f"{model.name}/{where}", host)
        self.starting.occasion = StartReason.from_now("standby")
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
        model = self.model
        self._env = environment.for_worker_of(
            model, host.environ, self.place, model.env, host.mark, host.run_dir.path
        )
        fd = self._theirs.fileno()
        return Command(
            name=self.name,
            module="servekit.worker",
            args=("--name", self.name, "--orders-fd", str(fd)),
            env=self._env,
            log_path=host.run_dir.log_path(self.name),
            pass_fds=(fd,),
            python=model.python or "",
        )

    def send_greeting(self) -> None:
        assert self.child is not None
        if self._theirs is not None:
            self._theirs.close()  # so that the connection ends with the fork server
        self.child.send(Load(make_worker_spec(self.model, self.place, "")))

    def receive(self, message: FromStandby) -> None:
        match message:
            case Prepared():
                log.info("standby_ready", child=self.name)
                self.mark_ready()
            case BootFailed(reason, permanent):
                self.fail_boot(reason, permanent=permanent)

    def load(self) -> tuple[int, int]:
        return self.forks, 0

    def forget_child(self) -> None:
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
            async with self._turn, asyncio.timeout(FORK_S):
                return self._on_answer(await self._send_order(order, [control_fd, output_fd]))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("fork_failed", child=name, reason=f"{type(error).__name__}: {error}")
            if self.child is not None:
                self.child.kill("did not fork when it was asked to")
            await self._end_late_fork(mark)
            return None

    async def _end_late_fork(self, mark: str) -> None:
        """End a worker whose answer came too late: another is to have its control channel.

        One that cannot answer any more ends by itself.
        """
        self._close()
        with contextlib.suppress(OSError):  # no files left to read /proc with
            await asyncio.to_thread(kill_marked, CHILD_MARK, mark)

    async def _send_order(self, order: bytes, fds: list[int]) -> bytes:
        if self._orders is None:
            raise ConnectionError("the standby is gone")
        socket.send_fds(self._orders, [order], fds)
        answer = await self._loop.sock_recv(self._orders, fork_server.MAX_ORDER_BYTES)
        if not answer:
            raise ConnectionError("the standby is gone")
        return answer

    def _on_answer(self, answer: bytes) -> Forked | None:
        match fork_server.decode_answer(answer):
            case NotForked(message):
                log.warning("fork_refused", reason=message)
                self.explain_state(message)
                self.end_child(Stop(), _STOP_GRACE_S)  # the next fork would fail the same way
                return None
            case forked:
                self.forks += 1
                return subreaper.register_fork(forked.pid)

    def replica_status(self) -> ReplicaStatus:
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


class ForkServerPool:
    """The fork servers of one model; empty until `converge`. `run` runs a fork server's task."""

    def __init__(self, host: SupervisorContext, run: Callable[[ForkServer], None]) -> None:
        self._host = host
        self._run = run
        self._closed = False
        self.lacks_memory = False  # one is wanted, and not started for lack of memory
        self._at: dict[Slot, ForkServer] = {}
        self.standbys: list[ForkServer] = []  # ending ones included

    def converge(
        self, model: ModelConfig, workers: Sequence[WorkerProcess], *, away: bool = False
    ) -> None:
        """Start the fork servers that are wanted, and end the others. Called often.

        `away`: the model is unloaded, and its memory is for other models.
        """
        wanted = _wants_fork_server(model) and not away and self._host.launcher is None
        workers = [one for one in workers if same_worker(one.model, model)]
        self.lacks_memory = False
        at_rest = all(one.state in ("ready", "asleep", "failed", "stopped") for one in workers)
        for slot, standby in list(self._at.items()):
            if not wanted or not same_worker(standby.model, model):
                self._end(slot)
        for worker in workers if at_rest and wanted and not self._closed else ():
            if worker.state == "ready" and worker.place.gpus not in self._at:
                self._start(model, worker.place)

    def close(self) -> None:
        """End all fork servers for good."""
        self._closed = True
        for slot in list(self._at):
            self._end(slot)

    def forget_fork_server(self, standby: ForkServer) -> None:
        """Forget a fork server that has ended."""
        self.standbys.remove(standby)

    async def fork(
        self,
        model: ModelConfig,
        place: Assignment,
        env: Mapping[str, str],
        mark: str,
        control_fd: int,
        output_fd: int,
    ) -> Forked | None:
        """Fork a worker of `model` for that place; None if a fresh interpreter must be used."""
        standby = self._at.get(place.gpus)
        if standby is None or not same_worker(standby.model, model):
            return None
        return await standby.fork(place.name, env, mark, control_fd, output_fd)

    def _start(self, model: ModelConfig, place: Assignment) -> None:
        if model.standby == "auto" and cgroup.available_memory_bytes() < ROOM_BYTES:
            self.lacks_memory = True
            return
        standby = ForkServer(model, place, self._host)
        self._at[place.gpus] = standby
        self.standbys.append(standby)
        self._run(standby)

    def _end(self, slot: Slot) -> None:
        self._at.pop(slot).end_child(Stop(), _STOP_GRACE_S)


def _wants_fork_server(model: ModelConfig) -> bool:
    return KINDS[model.engine].standby if model.standby == "auto" else model.standby
