"""One worker, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from servekit.config.schema import ModelConfig
from servekit.supervisor import environment
from servekit.supervisor.attestation import group_of, held_bytes, stray_memory
from servekit.supervisor.child import Command
from servekit.supervisor.circuit import Circuit
from servekit.supervisor.gpus import Gpu, Holdings, gpu_memory_by_pid
from servekit.supervisor.life import Host, Life
from servekit.supervisor.offspring import Forked
from servekit.supervisor.placement import Assignment
from servekit.supervisor.stall import Pulse, Timeouts
from servekit.wire.messages import (
    BootFailed,
    FromWorker,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    ReplicaStatus,
    WorkerSpec,
)

#: Has a worker forked from a standby, if there is one: environment, mark, and two descriptors.
Fork = Callable[[Mapping[str, str], str, int, int], Awaitable[Forked | None]]

log: Any = structlog.get_logger("servekit.supervisor")

#: Pings go out this often, or four times within the shortest time that a stall may take.
_PING_EVERY_S = 1.0


class Replica(Life[FromWorker]):
    """Runs one worker at its place."""

    incoming = FromWorker
    notice_s = 0.1  # gateways send it nothing more before it is told to finish

    def __init__(
        self,
        model: ModelConfig,
        place: Assignment,
        gpus: Sequence[Gpu],
        host: Host,
        circuit: Circuit | None = None,
        fork: Fork | None = None,
    ) -> None:
        super().__init__(place.name, host, circuit)
        self.model = model  # a reload may change what does not concern the worker
        self.place = place
        self.info: ModelInfo | None = None
        self._gpus = gpus
        self._fork = fork
        self._socket: Path | None = None
        self._progress: Progress | None = None
        self._timings_s: dict[str, float] = {}
        self._pulse = Pulse(time.monotonic())
        self._pings = 0
        self._killing: asyncio.Task[None] | None = None
        self._attesting: asyncio.Task[None] | None = None
        self._gpu_bytes = 0
        self.pids: set[int] = set()  # of all its incarnations

    def command(self) -> Command:
        self._pulse = Pulse(time.monotonic())
        self._socket = self.host.run_dir.new_socket()
        host = self.host
        env = environment.for_worker(host.environ, self.place, self.model.env, host.mark)
        return Command(
            name=self.name,
            module="servekit.worker",
            args=("--name", self.name),
            env=env,
            log_path=host.run_dir.log_path(self.name),
            forked=None if self._fork is None else functools.partial(self._fork, env),
        )

    def greet(self) -> None:
        assert self.child is not None
        self.pids.add(self.child.pid)
        self.child.send(Load(worker_spec(self.model, self.place, str(self._socket))))

    def receive(self, message: FromWorker) -> None:
        match message:
            case Loading() | Ready() if self.state in ("stalled", "draining"):
                pass  # too late
            case Loading(progress):
                self._progress = progress
                self.set("loading", self.reason)
            case Ready(info, timings_s):
                self._on_ready(info, timings_s)
            case BootFailed(reason, permanent):
                self.fail(reason, permanent=permanent)
            case Pong():
                self._pulse.answered(message)
                self.host.changed()

    def buried(self) -> None:
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        self._socket, self._progress = None, None
        self._pulse = Pulse(time.monotonic())
        self._gpu_bytes = 0

    def _on_ready(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        if not self._gpus:
            self._is_ready(info, timings_s)
        else:
            self._attesting = self._loop.create_task(self._attest(info, timings_s))

    async def _attest(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        """Let it serve only if it holds memory where it may."""
        child = self.child
        holdings = await asyncio.to_thread(gpu_memory_by_pid)
        stray = stray_memory(group_of(self.pid), self._own_gpus, holdings, self._gpus)
        if child is None or child is not self.child or self.ending:
            return  # it has died meanwhile, or is told to end
        if stray:
            message = f"worker {self.name} {stray}"
            self.fail(message, permanent=True)
            child.kill(message)
            return
        self._is_ready(info, timings_s)

    def _is_ready(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        self.info, self._timings_s, self._progress = info, timings_s, None
        took_s = round(time.monotonic() - self._began_at, 2)
        log.info("ready", child=self.name, device=self.place.device, after_s=took_s)
        self._pulse = Pulse(time.monotonic())  # what was said of the load is over
        self.came_up()
        self._ping()

    @property
    def _own_gpus(self) -> set[str]:
        return {self.place.gpu.uuid} if self.place.gpu is not None else set()

    def look(self) -> None:
        """Called often: ask how it is, and end it if it makes no progress."""
        super().look()
        if self.child is None or self.state == "stalled":
            return
        now, timeouts = time.monotonic(), self._timeouts()
        if self._pulse.due(now, min(_PING_EVERY_S, timeouts.stall_s / 4, timeouts.load_s / 4)):
            self._ping()
        cause = "" if self.ending else self._pulse.verdict(self.state, timeouts, now)
        if cause:
            log.error("stalled", child=self.name, pid=self.pid, reason=cause)
            self._progress = None
            self.set("stalled", cause)
            self._killing = self._loop.create_task(self.child.dump_and_kill(cause))

    def slept(self) -> None:
        """The supervisor has not run for a while: nobody could answer it."""
        self._pulse.slept(time.monotonic())

    def _ping(self) -> None:
        assert self.child is not None
        self._pings += 1
        self._pulse.asked(time.monotonic())
        self.child.send(Ping(self._pings))

    def _timeouts(self) -> Timeouts:
        return Timeouts(self.model.stall_timeout_s, self.model.load_timeout_s)

    def load(self) -> tuple[int, int]:
        return self._pulse.last.served, self._pulse.last.running

    @property
    def gpu_bytes(self) -> int:
        return self._gpu_bytes

    def measure_gpus(self, holdings: Holdings) -> None:
        """Take its share of what NVML tells."""
        if self.child is not None:
            self._gpu_bytes = held_bytes(group_of(self.pid), holdings)

    def status(self) -> ReplicaStatus:
        gpu = self.place.gpu
        return ReplicaStatus(
            name=self.name,
            state=self.state,
            socket=str(self._socket or ""),
            pid=self.pid,
            device=self.place.device,
            gpus=(gpu.uuid,) if gpu is not None else (),
            progress=self._progress,
            reason=self.reason,
            restarts=self.restarts,
            running=self._pulse.last.running,
            waiting=self._pulse.last.waiting,
            rss_bytes=self.rss_bytes,
            gpu_bytes=self._gpu_bytes,
            timings_s=self._timings_s,
        )


def worker_spec(model: ModelConfig, place: Assignment, socket: str) -> WorkerSpec:
    """What the worker is told to load."""
    return WorkerSpec(
        name=place.name,
        model=model.name,
        engine=model.engine,
        path=model.path,
        revision=model.revision,
        device="cpu" if place.gpu is None else "cuda",
        dtype=model.dtype,
        max_context=model.max_context,
        trust_remote_code=model.trust_remote_code,
        sampling=model.sampling.model_dump(exclude_none=True),
        options=model.engine_options().model_dump(exclude_none=True),
        socket=socket,
        tool_parser="" if model.tool_parser == "auto" else model.tool_parser,
        reasoning_parser="" if model.reasoning_parser == "auto" else model.reasoning_parser,
    )
