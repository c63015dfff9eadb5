"""A worker process, as the supervisor manages it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.config.schema import ModelConfig
from servekit.errors import describe_error
from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AdapterSpec,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.control.startup_messages import GATE, GatewayConnected, PhaseReport
from servekit.protocol.messages import (
    BootFailed,
    EngineDied,
    FromWorker,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Proceed,
    Progress,
    Ready,
    ReplicaHistory,
    ReplicaStatus,
)
from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.adapters.state import Outcome, Refusal
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.liveness import Liveness, Timeouts
from servekit.supervisor.lifecycle.managed_process import (
    AnyChild,
    ManagedProcess,
    MemoryFreed,
    SupervisorContext,
    run_unless,
)
from servekit.supervisor.lifecycle.remote_process import RemoteChild
from servekit.supervisor.lifecycle.restart_policy import CircuitBreaker, make_restart_policy
from servekit.supervisor.process import environment
from servekit.supervisor.process.child_process import Command
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.gpu_memory import Entry, GpuMemory, RemoteGpus
from servekit.supervisor.workers.pending_requests import Answer, PendingRequests
from servekit.supervisor.workers.worker_spec import digest_settings, make_worker_spec
from servekit.system.gpu.gpus import Gpu, Holdings
from servekit.system.rlimits import is_shortage
from servekit.system.subreaper import Fork

log: Any = structlog.get_logger("servekit.supervisor")

#: The interval of pings; shorter where a quarter of the shortest timeout is.
_PING_EVERY_S = 1.0
#: The answer to a request to sleep or wake whose worker died.
_DIED = "its worker died"


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
        self.policy = make_restart_policy(model)
        self.adapters = adapters
        self.model = model  # a reload may change keys that do not concern the worker
        self.place = place
        self.info: ModelInfo | None = None
        self._edition = digest_settings(model)
        self._fork = fork
        self._socket: Path | None = None  # of a worker on this machine
        self._waits_for = ""  # for the launcher's place, or for the GPUs' turn and memory
        self._loads: Progress | None = None  # as its process reports
        self.timings_s: dict[str, float] = {}
        self.liveness = Liveness(time.monotonic())
        self._pings = 0
        self._given_up = False
        self._killing: asyncio.Task[None] | None = None
        self._coming_up: asyncio.Task[None] | None = None
        self._admission: asyncio.Task[None] | None = None
        self._held: dict[str, AdapterInfo] = {}
        self.admin = PendingRequests()
        #: Held during admission: if the worker dies while it waits, its next life waits.
        self._entering = asyncio.Lock()
        self._wary = False  # died before ready: the next starts without adapters
        self._launcher = host.launcher
        self.gpu = GpuMemory(place, gpus, entry, self.show_wait)

    async def acquire_resources(self) -> str:
        if self._launcher is None:
            return ""
        refusal = await self._launcher.enter(self)
        self.starting.spent(GATE, self._began_at, time.monotonic())
        return refusal

    def release_resources(self) -> None:
        self.gpu.end_admission()

    async def supervise(self) -> None:
        await super().supervise()
        if self._launcher is not None:
            await self._launcher.release_place(self.name)

    def show_wait(self, what: str) -> None:
        """Show what it waits for before it is admitted."""
        self._waits_for = what
        self.host.publish_change()

    @property
    def progress(self) -> Progress | None:
        """The progress of its load, or what it waits for."""
        if self._waits_for and (self._loads is None or self._loads.phase == GATE):
            return Progress(self._waits_for)
        return self._loads

    async def spawn(self) -> AnyChild[FromWorker]:
        if self._launcher is None:
            return await super().spawn()
        return await self._launcher.start_worker(self, self.incoming, self.receive, self._on_line)

    def command(self) -> Command:
        self._socket = self.host.run_dir.new_socket()
        host = self.host
        model = self.model
        extra = {**host.keys_of(model), **model.env}
        env = environment.for_worker_of(
            model, host.environ, self.place, extra, host.mark, host.run_dir.path
        )
        return Command(
            name=self.name,
            module="servekit.worker",
            args=("--name", self.name),
            env=env,
            log_path=host.run_dir.log_path(self.name),
            python=model.python or "",
            forked=None if self._fork is None else functools.partial(self._fork, env),
        )

    def send_greeting(self) -> None:
        assert self.child is not None
        self.liveness = Liveness(time.monotonic())
        if isinstance(self.child, RemoteChild):
            self.adapters.adopt_added(self.child.added)
            self.remember_adapters()
            if self.child.state != "empty":
                self.gpu.set_pid(self.child.pid)
                return  # it existed before us, and reports what it serves
        adapters = () if self._wary else self.adapters.expected()
        spec = make_worker_spec(self.model, self.place, str(self._socket), adapters)
        self.child.send(Load(spec, waits=bool(self.place.gpus)))
        if self.place.gpus:
            self._admission = self._start_step(self.child, self._admit(self.child))
        else:
            self.gpu.set_pid(self.child.pid)

    async def _admit(self, child: AnyChild[FromWorker]) -> None:
        """Let it load when its GPUs are its own, while it imports its engine; end it if not."""
        refusal = await self._enter_gate(child)
        if refusal is None or self.ending:
            return
        if refusal:
            self._refuse_start(child, refusal)
            return
        self.gpu.set_pid(child.pid)
        if self._loads is not None:
            self.gpu.track_load(self._loads.phase)
        child.send(Proceed())

    async def _enter_gate(self, child: AnyChild[FromWorker]) -> str | None:
        """Wait until it may load; return why it may not, or None if it died meanwhile."""
        async with self._entering:
            refusal = await run_unless(child.exited, self.gpu.await_admission())
            if self.child is not child:
                self.gpu.end_admission()  # it may have been admitted after its death
                return None
        return refusal

    def receive(self, message: FromWorker) -> None:
        match message:
            case Loading(progress):
                self._on_progress(progress)
            case Ready(info, timings_s) if self.accepts("serve"):  # else it comes too late
                self._on_ready(info, timings_s)
            case PhaseReport() | GatewayConnected():
                self.starting.add_report(message)
            case BootFailed(reason, permanent):
                self.fail_boot(reason, permanent=permanent)
            case EngineDied(cause):
                self.mark_engine_dead(cause)
            case Pong():
                if self.liveness.answered(message):
                    self.host.publish_later()
            case AdapterLoaded() | AdapterUnloaded() | AdapterRefused():
                self.admin.take_answer(message)
            case Asleep() | Awake() | SleepFailed():
                self.admin.take_answer(message)

    def forget_child(self) -> None:
        if self._socket is not None:
            self.host.run_dir.remove_socket(self._socket)
        self._socket, self._loads, self._given_up = None, None, False
        self.liveness = Liveness(time.monotonic())
        self.gpu.reset_figures()
        self._wary = self._ready_at is None
        self._held = {}
        if self._coming_up is not None and not self.admin.is_open:
            self._coming_up.cancel()  # else the open order returns, and ends the task
        self._coming_up = None
        self.admin.answer_death(self.name, "" if self.ending else self._died_of)
        self.admin = PendingRequests()

    def _on_progress(self, progress: Progress) -> None:
        if self.state == "loading":
            self.host.publish_later()
        elif not self.change_state("load", self.reason):
            return  # too late
        self._loads = progress
        self.gpu.track_load(progress.phase)

    def _on_ready(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        self._held = {adapter.name: adapter for adapter in info.adapters}
        self._coming_up = self._start_step(self.child, self._come_up(info, timings_s))

    async def _come_up(self, info: ModelInfo, timings_s: dict[str, float]) -> None:
        """Let it serve only with GPU memory where it is allowed, and with all its adapters."""
        self.starting.begin_phase("admission", time.monotonic())
        child = self.child
        launcher = self._launcher
        strays = await (self.gpu.find_strays() if launcher is None else launcher.strays(self.name))
        reason = f"worker {self.name} {strays}" if strays else ""
        permanent = bool(reason)
        if not reason:
            admit = functools.partial(self._is_ready, child, info, timings_s)
            reason = await self.adapters.join(self, info.refused_adapters, admit)
        if reason:
            self._refuse_start(child, reason, permanent=permanent)

    def _start_step(
        self, child: AnyChild[FromWorker] | None, step: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Run a step of the child's start, which ends the child if it raises."""
        task = self._loop.create_task(step)
        task.add_done_callback(functools.partial(self._check_step, child))
        return task

    def _check_step(self, child: AnyChild[FromWorker] | None, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not is_shortage(error):
            log.error("worker_start_failed", child=self.name, exc_info=error)
        self._refuse_start(child, describe_error(error))

    def _refuse_start(
        self, child: AnyChild[FromWorker] | None, reason: str, *, permanent: bool = False
    ) -> None:
        """End the child, which cannot start, unless it has ended or is ending."""
        if child is not None and child is self.child and not self.ending:
            self.fail_boot(reason, permanent=permanent)
            child.kill(reason)

    def _is_ready(
        self, child: AnyChild[FromWorker] | None, info: ModelInfo, timings_s: dict[str, float]
    ) -> None:
        if self.child is not child or child is None or self.ending or not self.accepts("serve"):
            return  # too late
        self.info, self.timings_s, self._loads = info, timings_s, None
        took_s = round(time.monotonic() - self._began_at, 2)
        log.info("worker_ready", child=self.name, device=self.device, after_s=took_s)
        self.liveness = Liveness(time.monotonic())  # forgets the figures of the load
        self.gpu.loaded()
        self.mark_ready()
        self._ping()

    def check_health(self) -> None:
        """Ping it, and end it if it makes no progress. Called at each tick."""
        super().check_health()
        if self.child is None or self.state == "stalled" or self._given_up:
            return
        now, timeouts = time.monotonic(), self._timeouts()
        if self.liveness.due(now, min(_PING_EVERY_S, timeouts.stall_s / 4, timeouts.load_s / 4)):
            self._ping()
        cause = self.liveness.verdict(self.state, timeouts, now)
        if cause and self.state == "draining":  # others can finish its requests
            self._kill_stalled(self.child, cause)
        elif cause:
            self.give_up(cause)

    def give_up(self, cause: str) -> None:
        """Kill a worker that has stalled, unless it is to end anyway."""
        if self.child is not None and not self.ending and self.change_state("stall", cause):
            self._kill_stalled(self.child, cause)

    def _kill_stalled(self, child: AnyChild[FromWorker], cause: str) -> None:
        """Kill the worker after a stack dump."""
        self._given_up = True
        log.error("process_stalled", child=self.name, pid=self.pid, reason=cause)
        journal.record_event("stalled", cause, worker=self.name, pid=self.pid)
        self._loads = None
        self.stalls += 1
        self._killing = self._loop.create_task(child.dump_and_kill(cause))

    def forgive_suspension(self) -> None:
        """Restart its timers: the supervisor was suspended and could read no answer."""
        self.liveness.restart_timers(time.monotonic())

    def reset_deadline(self) -> None:
        """Restart its timers after work that we had ordered."""
        self.liveness.reset_deadline(time.monotonic())

    def _ping(self) -> None:
        assert self.child is not None
        self._pings += 1
        self.liveness.asked(time.monotonic())
        self.child.send(Ping(self._pings))

    def _timeouts(self) -> Timeouts:
        stall_s, load_s = self.model.stall_timeout_s, self.model.load_timeout_s
        return Timeouts(stall_s, load_s, self.admin.loads_adapter)

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
    def held_adapters(self) -> Mapping[str, AdapterInfo]:
        """The adapters that it has, as it reports."""
        return self._held

    async def ask_to_load(self, adapter: AdapterSpec) -> Outcome:
        """Have it load an adapter; end it if that takes longer than a model's load may."""
        name, limit_s = adapter.name, self.model.load_timeout_s
        request = LoadAdapter(self.admin.next_number(), adapter)
        answer = await self._ask_adapter(request, f"loaded the adapter {name!r}", limit_s)
        self.reset_deadline()
        if isinstance(answer, AdapterLoaded):
            self._held[name] = answer.info
            return answer.info
        return answer if isinstance(answer, Refusal) else Refusal("it has answered amiss")

    async def ask_to_unload(self, name: str) -> bool:
        """Have it unload an adapter; end it if it fails to, so that the adapter is gone."""
        limit_s = self.model.timeout_s + self.model.load_timeout_s
        request = UnloadAdapter(self.admin.next_number(), name)
        answer = await self._ask_adapter(request, f"unloaded the adapter {name!r}", limit_s)
        self._held.pop(name, None)
        if not isinstance(answer, Refusal):
            return True
        if not answer.died and self.child is not None:
            self.child.kill(f"it could not unload the adapter {name!r}: {answer.message}")
        return False

    async def _ask_adapter(
        self, request: LoadAdapter | UnloadAdapter, what: str, limit_s: float
    ) -> Answer:
        child = self.child
        # one that has not loaded its model takes no order yet: it is brought up to date then
        if child is None or self._coming_up is None or self.state == "stalled":
            return Refusal(f"worker {self.name} died before it {what}", died=True, left=True)
        late = functools.partial(self.give_up, f"stalled: it had not {what} after {limit_s:g} s")
        return await self.admin.send(request, child.send, what, late, limit_s)

    def remember_adapters(self) -> None:
        """Have a worker that may outlive us remember the adapters that operators added."""
        if isinstance(self.child, RemoteChild):
            self.child.remember(self.adapters.added)

    # ---- sleep

    async def sleep(self, told: Callable[[], Awaitable[None]]) -> str:
        """Put it to sleep once its requests are done; return why that failed, or "".

        `told` returns when the gateways know that it takes no more requests. While asleep, it
        claims the GPU memory that it still holds.
        """
        child = self.child
        if child is None or not self.change_state("sleep"):
            return f"worker {self.name} is {self.state}"
        await told()
        limit_s = self.model.timeout_s + self.model.load_timeout_s
        answer = await self._ask_sleep(Sleep(), "sleep", limit_s, child)
        if isinstance(answer, Asleep) and self.child is child:
            await self.gpu.fell_asleep()
            self.emit(MemoryFreed(self))
        if self.child is not child:
            return _DIED  # and its next incarnation is awake
        if isinstance(answer, Refusal):
            if not self.ending:
                said = f"it could not be put to sleep: {answer.message}"
                self.change_state("wake", said)
            return answer.message
        log.info("worker_asleep", child=self.name, after_s=answer.took_s)
        return ""

    async def wake(self) -> str:
        """Wake it, and let it serve; return why that failed, or "".

        It is admitted as a starting worker is.
        """
        child = self.child
        if child is None:
            return f"worker {self.name} is {self.state}"
        reason = await self._enter_gate(child)
        if reason is None or self.child is not child:
            return _DIED
        if reason:
            return reason
        try:
            answer = await self._ask_sleep(Wake(), "wake", self.model.load_timeout_s, child)
        finally:
            if self.child is child:
                self.gpu.loaded()
        if isinstance(answer, Refusal):
            return answer.message
        log.info("worker_awake", child=self.name, after_s=answer.took_s)
        return await self.adapters.join(self, {}, functools.partial(self._mark_awake, child))

    def _mark_awake(self, child: AnyChild[FromWorker]) -> None:
        if self.child is child and not self.ending and self.change_state("wake"):
            self.reset_deadline()

    async def _ask_sleep(
        self, request: Sleep | Wake, what: str, limit_s: float, child: AnyChild[FromWorker]
    ) -> Asleep | Awake | Refusal:
        """Return its answer; end a worker that takes longer than `limit_s`."""
        if self.child is not child:
            return Refusal(_DIED)
        if self.state != "asleep" or self.ending:
            return Refusal(f"worker {self.name} is {self.state}")
        late = functools.partial(self.give_up, f"stalled: it did not {what} within {limit_s:g} s")
        answer = await self.admin.send(request, child.send, what, late, limit_s)
        if isinstance(answer, Refusal) and answer.died:
            return Refusal(_DIED)
        assert isinstance(answer, Asleep | Awake | Refusal)
        return answer

    # ---- status

    @property
    def trouble(self) -> str:
        """The reason why it cannot serve although it is ready, as it reports; "" if it can."""
        return self.liveness.last.trouble if self.serves else ""

    def make_history(self) -> ReplicaHistory:
        """Return its history, with its present trouble or what it waits for."""
        story = super().make_history()
        reason = self.trouble or "; ".join(filter(None, (story.reason, self._waits_for)))
        return replace(story, reason=reason)

    def load(self) -> tuple[int, int]:
        return self.liveness.last.finished, self.liveness.last.running

    def use(self) -> int:
        return self.liveness.last.served

    @property
    def gpu_bytes(self) -> int:
        return self.gpu.held_bytes

    def measure_gpus(self, told: Holdings | RemoteGpus) -> None:
        """Take its share of NVML's figures, and check that it is on its own GPUs."""
        known = bool(self.gpu.stray)
        self.gpu.update_figures(told)
        if self.gpu.stray and self.serves:
            self._on_stray(self.gpu.stray, known)

    def _on_stray(self, stray: str, known: bool) -> None:
        if not known:
            self.gpu.report_stray("gpu_memory_stray", stray)
        if self.model.stray_memory == "fail" and self.child is not None:
            self.child.kill(f"it {stray}")

    @property
    def address(self) -> str:
        """The address for gateways; "" if there is none."""
        if isinstance(self.child, RemoteChild):
            return self.child.address
        return str(self._socket or "")

    @property
    def device(self) -> str:
        """The node and device it runs on, in words."""
        where = "" if self._launcher is None else self._launcher.describe_place(self.name)
        return where or self.place.device

    @property
    def silent_s(self) -> float:
        return self.liveness.silent_s(time.monotonic())

    @property
    def alert(self) -> str:
        return self.gpu.alert

    def replica_status(self) -> ReplicaStatus:
        """Return the status for gateways, which use state and address, and for operators."""
        last, gpu = self.liveness.last, self.gpu
        return ReplicaStatus(
            name=self.name,
            state=self.state,
            socket=self.address,
            pid=self.pid,
            device=self.device,
            gpus=tuple(one.uuid for one in gpu.own),
            progress=self.progress,
            reason=self.reason,
            restarts=self.restarts,
            running=last.running,
            waiting=last.waiting,
            rss_bytes=self.rss_bytes,
            gpu_bytes=gpu.held_bytes,
            timings_s=self.timings_s,
            stray=gpu.stray,
            claim_bytes=sum(self.place.claims),
            excess=gpu.excess,
            kv_used=self.liveness.kv_used,
            trouble=self.trouble,
            held_bytes=tuple(gpu.by_gpu.get(one.uuid, 0) for one in gpu.own),
            generation=self.generation,
        )
