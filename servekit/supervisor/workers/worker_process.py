"""A worker process, as the supervisor manages it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AdapterSpec,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.messages import (
    BootFailed,
    EngineDied,
    FromWorker,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    ReplicaHistory,
    ReplicaStatus,
)
from servekit.protocol.residency import Asleep, Awake, SleepFailed
from servekit.protocol.startup_messages import GatewayConnected, PhaseReport
from servekit.supervisor.adapters.pending_requests import Order, PendingRequests
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.adapters.state import Outcome, Refusal
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.circuit_breaker import CircuitBreaker, policy_of
from servekit.supervisor.lifecycle.liveness import Liveness, Timeouts
from servekit.supervisor.lifecycle.managed_process import (
    AnyChild,
    ManagedProcess,
    SupervisorContext,
)
from servekit.supervisor.process import environment
from servekit.supervisor.process.child_process import Command
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.scheduling.remote_gpus import RemoteGpus
from servekit.supervisor.workers.gpu_memory import Entry, WorkerGpuMemory
from servekit.supervisor.workers.remote_placement import RemotePlacement
from servekit.supervisor.workers.sleep_control import SleepControl
from servekit.supervisor.workers.worker_spec import edition, worker_spec
from servekit.supervisor.workers.worker_status import status_of, story_of
from servekit.system.gpus import Gpu, Holdings
from servekit.system.subreaper import Fork

log: Any = structlog.get_logger("servekit.supervisor")

#: The interval of pings; shorter where a quarter of the shortest timeout is.
_PING_EVERY_S = 1.0


class WorkerProcess(ManagedProcess[FromWorker]):
    """A worker process at its place."""

    incoming = FromWorker
    notice_s = 0.1  # gateways stop sending to it before it is told to finish

    def __init__(
        self,
        model: ModelConfig,
        place: Assignment,
        gpus: Sequence[Gpu],
        host: SupervisorContext,
        circuit: CircuitBreaker | None,
        adapters: Adapters,
        fork: Fork | None = None,
        entry: Entry | None = None,
    ) -> None:
        super().__init__(place.name, host, circuit)
        self.policy = policy_of(model)
        self.adapters = adapters
        self.model = model  # a reload may change keys that do not concern the worker
        self.place = place
        self.info: ModelInfo | None = None
        self._edition = edition(model)
        self._fork = fork
        self._socket: Path | None = None  # of a worker on this machine
        self.progress: Progress | None = None
        self.timings_s: dict[str, float] = {}
        self.pulse = Liveness(time.monotonic())
        self._pings = 0
        self._killing: asyncio.Task[None] | None = None
        self._coming_up: asyncio.Task[None] | None = None
        self._held: dict[str, AdapterInfo] = {}
        self._errands = PendingRequests()
        self.slumber = SleepControl(self)
        self._wary = False  # died before ready: the next starts without adapters
        self.seat = RemotePlacement(self.name, host)
        self.vram = WorkerGpuMemory(place, gpus, entry, self.told_to_wait)

    async def enter(self) -> str:
        async with self.slumber.entering:
            refusal = await self.vram.enter()
        refusal = refusal or await self.seat.enter(self)
        if self.place.gpus or self.seat.is_remote:
            self.starting.spent("gate", self._began_at, time.monotonic())
        return refusal

    def leave(self) -> None:
        self.vram.leave()

    async def run(self) -> None:
        await super().run()
        await self.seat.release()

    def told_to_wait(self, what: str) -> None:
        """Show what it waits for before it is admitted."""
        self.progress = Progress(what) if what else None
        self.host.changed()

    async def spawn(self) -> AnyChild[FromWorker]:
        return await self.seat.spawn(self, self.receive, self._on_line) or await super().spawn()

    def command(self) -> Command:
        self._socket = self.host.run_dir.new_socket()
        host = self.host
        extra = {**host.keys_of(self.model), **self.model.env}
        kind = KINDS[self.model.engine]
        env = environment.for_worker(host.environ, self.place, extra, host.mark, kind)
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
        self.pulse = Liveness(time.monotonic())
        self.vram.begin(self.child.pid)
        if self.seat.adopts(self.child, self.adapters):
            return  # it reports what it serves
        adapters = () if self._wary else self.adapters.expected()
        self.child.send(Load(worker_spec(self.model, self.place, str(self._socket), adapters)))

    def receive(self, message: FromWorker) -> None:
        match message:
            case Loading() | Ready() if self.state in ("stalled", "draining"):
                pass  # too late
            case Loading(progress):
                self.progress = progress
                self.vram.loads(progress.phase)
                self.host.noticed() if self.state == "loading" else self.set("loading", self.reason)
            case Ready(info, timings_s):
                self._on_ready(info, timings_s)
            case PhaseReport() | GatewayConnected():
                self.starting.heard(message)
            case BootFailed(reason, permanent):
                self.fail(reason, permanent=permanent)
            case EngineDied(cause):
                self.engine_died(cause)
            case Pong():
                self.pulse.answered(message)
                self.host.noticed()
            case AdapterLoaded() | AdapterUnloaded() | AdapterRefused():
                self._errands.answered(message)
            case Asleep() | Awake() | SleepFailed():
                self.slumber.answered(message)

    def buried(self) -> None:
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
        self._socket, self.progress = None, None
        self.pulse = Liveness(time.monotonic())
        self.vram.forget()
        self._wary = self._ready_at is None
        self._held = {}
        if self._coming_up is not None and not self._errands.open:
            self._coming_up.cancel()  # else the open order returns, and ends the task
        self._errands.died(self.name, "" if self.ending else self._died_of)
        self._errands = PendingRequests()
        self.slumber.died()

    def _on_ready(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        self._held = {adapter.name: adapter for adapter in info.adapters}
        self._coming_up = self._loop.create_task(self._come_up(info, timings_s))

    async def _come_up(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        """Let it serve only with GPU memory where it is allowed, and with all its adapters."""
        self.starting.awaits("admission", time.monotonic())
        child = self.child
        strays = await (self.seat if self.seat.is_remote else self.vram).strays()
        reason = f"worker {self.name} {strays}" if strays else ""
        permanent = bool(reason)
        if not reason:
            admit = functools.partial(self._is_ready, child, info, timings_s)
            reason = await self.adapters.join(self, info.refused_adapters, admit)
        if reason and child is not None and child is self.child and not self.ending:
            self.fail(reason, permanent=permanent)
            child.kill(reason)

    def _is_ready(
        self, child: AnyChild[FromWorker] | None, info: ModelInfo, timings_s: dict[str, float]
    ) -> None:
        if self.child is not child or child is None or self.ending or self.state == "stalled":
            return  # too late
        self.info, self.timings_s, self.progress = info, timings_s, None
        took_s = round(time.monotonic() - self._began_at, 2)
        log.info("worker_ready", child=self.name, device=self.device, after_s=took_s)
        self.pulse = Liveness(time.monotonic())  # forgets the figures of the load
        self.vram.loaded()
        self.came_up()
        self._ping()

    def look(self) -> None:
        """Ping it, and end it if it makes no progress. Called at each tick."""
        super().look()
        if self.child is None or self.state == "stalled":
            return
        now, timeouts = time.monotonic(), self._timeouts()
        if self.pulse.due(now, min(_PING_EVERY_S, timeouts.stall_s / 4, timeouts.load_s / 4)):
            self._ping()
        cause = "" if self.ending else self.pulse.verdict(self.state, timeouts, now)
        if cause:
            self.give_up(cause)

    def give_up(self, cause: str) -> None:
        """Kill a worker that has stalled, after a stack dump."""
        if self.child is None or self.ending:
            return
        log.error("process_stalled", child=self.name, pid=self.pid, reason=cause)
        journal.tell("stalled", cause, worker=self.name, pid=self.pid)
        self.progress = None
        self.stalls += 1
        self.set("stalled", cause)
        self._killing = self._loop.create_task(self.child.dump_and_kill(cause))

    def slept(self) -> None:
        """Restart its timers: the supervisor was suspended and could read no answer."""
        self.pulse.slept(time.monotonic())

    def pardon(self) -> None:
        """Restart its timers after work that we had ordered."""
        self.pulse.pardon(time.monotonic())

    def _ping(self) -> None:
        assert self.child is not None
        self._pings += 1
        self.pulse.asked(time.monotonic())
        self.child.send(Ping(self._pings))

    def _timeouts(self) -> Timeouts:
        """Return its timeouts; while it loads an adapter, the longer one holds."""
        stall_s, load_s = self.model.stall_timeout_s, self.model.load_timeout_s
        return Timeouts(max(stall_s, load_s) if self._errands.loading else stall_s, load_s)

    # ---- adapters

    @property
    def serves(self) -> bool:
        return self.state == "ready" and self.child is not None and not self.ending

    @property
    def generation(self) -> str:
        """The generation that it has loaded; only its first part while it does not serve."""
        known = self.info.generation if self.info is not None and self.serves else ""
        return known or self._edition

    @property
    def holds(self) -> Mapping[str, AdapterInfo]:
        """The adapters that it has, as it reports."""
        return self._held

    async def load_adapter(self, adapter: AdapterSpec) -> Outcome:
        """Have it load an adapter; end it if that takes longer than a model's load may."""
        name, limit_s = adapter.name, self.model.load_timeout_s
        make = functools.partial(LoadAdapter, adapter=adapter)
        answer = await self._order(make, f"loaded the adapter {name!r}", limit_s)
        self.pardon()
        if isinstance(answer, AdapterLoaded):
            self._held[name] = answer.info
            return answer.info
        return answer if isinstance(answer, Refusal) else Refusal("it has answered amiss")

    async def unload_adapter(self, name: str) -> bool:
        """Have it unload an adapter; end it if it fails to, so that the adapter is gone."""
        limit_s = self.model.timeout_s + self.model.load_timeout_s
        make = functools.partial(UnloadAdapter, name=name)
        answer = await self._order(make, f"unloaded the adapter {name!r}", limit_s)
        self._held.pop(name, None)
        if not isinstance(answer, Refusal):
            return True
        if not answer.died and self.child is not None:
            self.child.kill(f"it could not unload the adapter {name!r}: {answer.message}")
        return False

    async def _order(
        self, make: Callable[[int], Order], what: str, limit_s: float
    ) -> AdapterLoaded | AdapterUnloaded | Refusal:
        child = self.child
        if child is None or self.state == "stalled":
            return Refusal(f"worker {self.name} died before it {what}", died=True, left=True)
        late = functools.partial(self.give_up, f"stalled: it had not {what} after {limit_s:g} s")
        return await self._errands.send(make, child.send, what, late, limit_s)

    @property
    def trouble(self) -> str:
        """The reason why it cannot serve although it is ready, as it reports; "" if it can."""
        return self.pulse.last.trouble if self.serves else ""

    def story(self) -> ReplicaHistory:
        """Return its history, with its present trouble or what it waits for."""
        return story_of(self, super().story())

    def load(self) -> tuple[int, int]:
        return self.pulse.last.finished, self.pulse.last.running

    def use(self) -> int:
        return self.pulse.last.served

    @property
    def gpu_bytes(self) -> int:
        return self.vram.held_bytes

    def measure_gpus(self, told: Holdings | RemoteGpus) -> None:
        """Take its share of NVML's figures, and check that it is on its own GPUs."""
        known = bool(self.vram.stray)
        self.vram.measure(told)
        if self.vram.stray and self.serves:
            self._on_stray(self.vram.stray, known)

    def _on_stray(self, stray: str, known: bool) -> None:
        if not known:
            self.vram.complain("gpu_memory_stray", stray)
        if self.model.stray_memory == "fail" and self.child is not None:
            self.child.kill(f"it {stray}")

    @property
    def address(self) -> str:
        """The address for gateways; "" if there is none."""
        return self.seat.address(self.child) or str(self._socket or "")

    @property
    def device(self) -> str:
        """The node and device it runs on, in words."""
        return self.seat.where() or self.place.device

    @property
    def alert(self) -> str:
        return self.vram.alert

    def status(self) -> ReplicaStatus:
        return status_of(self)
