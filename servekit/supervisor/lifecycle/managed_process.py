"""A supervised process across restarts: its states, and the task that runs its lives.

starting ──▶ loading ──▶ ready ◀──▶ asleep
    ▲           │ ╲       ╱ │
    │           │  stalled  │          draining ──▶ stopped
    └─ backoff ◀┴─────┴─────┘              ▲           ▲
          └▶ failed                        └───────────┘ `end_child`, from any state

`TRANSITIONS` is the whole table. `ManagedProcess.change_state` is the only writer of a state: it
refuses an event that the table lacks in the present state, and emits `StateChanged`. When a child
that died is started again, and whether at all, is decided by `restart_policy`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import msgspec
import structlog

from servekit.config.schema import ModelConfig
from servekit.errors import describe_error
from servekit.protocol.messages import (
    BootFailed,
    Drain,
    Quarantined,
    ReplicaHistory,
    Stop,
    WorkerState,
)
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.exit_history import (
    ExitHistory,
    LastSeen,
    StartReason,
    StartupTiming,
    report_death,
)
from servekit.supervisor.lifecycle.remote_process import AnyChild as AnyChild
from servekit.supervisor.lifecycle.restart_policy import CircuitBreaker, RestartPolicy
from servekit.supervisor.process.child_process import GOODBYE_S, ChildProcess, Command, Exit
from servekit.supervisor.process.run_dir import RunDir
from servekit.system.python.installation import UPGRADED, was_upgraded
from servekit.system.shared_memory import Segment

if TYPE_CHECKING:
    from servekit.ray.launcher import RayLauncher

log: Any = structlog.get_logger("servekit.supervisor")
Incoming = TypeVar("Incoming")
T = TypeVar("T")
Tasks = set[asyncio.Task[None]]

#: From "stop now" to SIGKILL.
_NOW_S = 1.0
#: From a child's report that its engine has died to SIGKILL: a broken device may block its exit.
_DEAD_S = 3.0

#: An event in the life of a process, by which its state may change.
Event = Literal[
    "start",  # its next life begins
    "load",  # the child reports the progress of its load
    "serve",  # the child serves
    "sleep",  # it is to sleep: it takes no more requests
    "wake",  # it serves again, or could not be put to sleep
    "stall",  # it makes no progress, or does not answer
    "lose engine",  # the child reports that its engine has died
    "drain",  # it was told to end, and has a child
    "back off",  # it waits for its next life
    "fail",  # it waits for an operator, or for its model's circuit breaker
    "retry",  # an operator wants its next life now
    "stop",  # it has ended, for good
]

_COMING: tuple[WorkerState, ...] = ("starting", "loading")
_UP: tuple[WorkerState, ...] = ("ready", "asleep")
_WITH_CHILD: tuple[WorkerState, ...] = (*_COMING, *_UP, "stalled")
_WAITING: tuple[WorkerState, ...] = ("backoff", "failed")

#: The states that each event may meet, and the state that follows.
_TABLE: Mapping[Event, tuple[tuple[WorkerState, ...], WorkerState]] = {
    "start": (("starting", *_WAITING), "starting"),
    "load": (("starting",), "loading"),
    "serve": (_COMING, "ready"),
    "sleep": (("ready",), "asleep"),
    "wake": (("asleep",), "ready"),
    "stall": ((*_COMING, *_UP), "stalled"),
    "lose engine": (_WITH_CHILD, "stalled"),
    "drain": (_WITH_CHILD, "draining"),
    "back off": ((*_WITH_CHILD, *_WAITING), "backoff"),
    "fail": ((*_WITH_CHILD, *_WAITING), "failed"),
    "retry": (_WAITING, "starting"),
    "stop": ((*_WITH_CHILD, "draining", *_WAITING), "stopped"),
}
TRANSITIONS: Mapping[tuple[WorkerState, Event], WorkerState] = {
    (before, event): after for event, (states, after) in _TABLE.items() for before in states
}


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A change of the state of a process."""

    process: ManagedProcess[Any]
    before: WorkerState
    after: WorkerState


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """A process that fell asleep claims less GPU memory now."""

    process: ManagedProcess[Any]


#: The events that the listeners of a process hear of.
ProcessEvent: TypeAlias = StateChanged | MemoryFreed


class SupervisorContext(Protocol):
    """The supervisor, as its managed processes see it."""

    run_dir: RunDir
    mark: str

    @property
    def launcher(self) -> RayLauncher | None:
        """The launcher that starts workers; None if they are children of the supervisor."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment from which a child's environment is built."""

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        """Return the variables for this model's workers only: the key to its endpoint."""

    def publish_change(self) -> None:
        """Publish a change that others can see."""

    def publish_later(self) -> None:
        """Publish changed figures with the next tick; nobody waits for them."""

    def children_changed(self) -> None:
        """Record that a process was started or reaped."""

    def on_line(self, name: str, text: str) -> None:
        """Pass on a line that a child wrote."""

    def quarantine(self, request: Quarantined) -> None:
        """Quarantine a request that kills workers, on all gateways."""

    def is_unused(self, adapter: str) -> bool:
        """Return whether no gateway has a request left for a withdrawn adapter."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The way a process is to end: the message for its child, and the grace time."""

    ask: msgspec.Struct
    grace_s: float


class ManagedProcess(ABC, Generic[Incoming]):
    """A process that is restarted by policy until told to end.

    Starts a child, handles its messages, and starts it again. `circuit` is the circuit breaker that
    it shares with others, if any.
    """

    incoming: ClassVar[Any]  # the union of messages it may send
    notice_s: ClassVar[float] = 0.0  # from announcing the drain to asking the child to drain
    begins_with: ClassVar[str] = "interpreter"  # the phase from its start to its first report

    def __init__(
        self, name: str, host: SupervisorContext, circuit: CircuitBreaker | None = None
    ) -> None:
        self.name = name
        self.host = host
        self.circuit = circuit
        self.state: WorkerState = "starting"  # `change_state` is its only writer
        self.reason = ""
        self.listeners: list[Callable[[ProcessEvent], None]] = []
        self.restarts = self.stalls = 0
        self._stalled: asyncio.Task[None] | None = None  # that kills a stalled child
        self.rss_bytes = 0
        self.history = ExitHistory()
        self.starting = StartupTiming()
        self.child: AnyChild[Incoming] | None = None
        self.policy = RestartPolicy(random.random)
        self._died_of = ""
        self._boot_failed: BootFailed | None = None
        self._engine_died = ""  # the cause, as the child reported it
        self._began_at = 0.0
        self._ready_at: float | None = None
        self._proved = False
        self._due = 0.0  # when its back-off is over; infinity: no automatic restart
        self._next_at: float | None = None  # the earliest restart, by back-off and breaker
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[Shutdown] = self._loop.create_future()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        if circuit is not None:
            circuit.join(name, self._wake)

    # ---- overridden by subclasses

    @abstractmethod
    def command(self) -> Command:
        """Return the command that starts the next incarnation."""

    async def spawn(self) -> AnyChild[Incoming]:
        """Start the next incarnation. Raises OSError."""
        return await ChildProcess[Incoming].spawn(
            self.command(), self.incoming, self.receive, self._on_line
        )

    @abstractmethod
    def send_greeting(self) -> None:
        """Send the first messages to a child that was just started."""

    @abstractmethod
    def receive(self, message: Incoming) -> None:
        """Handle a message from the child."""

    @abstractmethod
    def load(self) -> tuple[int, int]:
        """Return the requests that this incarnation has completed, and those it runs."""

    def use(self) -> int:
        """Return the requests that count as use of this incarnation."""
        return self.load()[0]

    def forget_child(self) -> None:
        """Forget the state of a child that was reaped."""

    async def acquire_resources(self) -> str:
        """Wait for the resources of a start; return why there are none, or ""."""
        return ""

    def release_resources(self) -> None:
        """Release the resources after each life, and after an `acquire_resources` that failed."""

    # ---- life cycle

    async def supervise(self) -> None:
        """Run until `end_child` was called and the last child is reaped."""
        after_s: float | None = 0.0
        lives = 0
        while await self._wait_for_start(after_s):
            self.restarts += lives > 0
            lives += 1
            try:
                after_s = await self._live_once()
            except Exception as error:  # it must not end the instance
                log.exception("supervision_failed", child=self.name)
                self._died_of = f"servekit's supervision of it failed: {describe_error(error)}"
                after_s = self.policy.after_s(fruitful=False)
                if self.circuit is not None:
                    self.circuit.died(self.name, self._died_of, fruitful=False, permanent=False)
        if self.circuit is not None:
            self.circuit.unregister(self.name)
        journal.record_event("stopped", worker=self.name)
        self.change_state("stop", self.reason)

    def end_child(self, ask: msgspec.Struct, grace_s: float) -> None:
        """Ask the child to end, and kill it if it has not ended within `grace_s`."""
        if not self._ending.done():
            self._ending.set_result(Shutdown(ask, grace_s))
        elif self.child is not None:  # it drains already, perhaps with a longer grace time
            self.child.send(ask)
            self._loop.call_later(grace_s, self.child.kill, "did not end in time, killed")

    def end_now(self) -> None:
        """End the child without waiting for its requests."""
        self.end_child(Stop(), _NOW_S)
        if self.child is not None:
            self.child.send(Stop())
            self._loop.call_later(_NOW_S, self.child.kill, "stopped at once, killed")

    @property
    def ending(self) -> bool:
        return self._ending.done()

    def retry(self) -> None:
        """Restart it now if it has failed or is in back-off, with the back-off reset."""
        if self.state in _WAITING:
            self.policy.reset_backoff()
            self.starting.occasion = StartReason.from_now("operator")
            self.change_state("retry", self.reason)
        self._due = time.monotonic()
        self._wake()

    def fail_boot(self, message: str, *, permanent: bool) -> None:
        """Treat the running child as one that could not boot."""
        self._boot_failed = BootFailed(message, permanent)
        if self.child is not None:
            self._loop.call_later(GOODBYE_S, self.child.kill, message)

    def mark_engine_dead(self, cause: str) -> None:
        """Record the child's report that its engine has died; kill it unless it exits soon."""
        self._engine_died = cause
        if self.child is not None:
            self._loop.call_later(_DEAD_S, self.child.kill, cause)
        self.change_state("lose engine", cause)

    def mark_ready(self) -> None:
        """Record that the child serves, unless that comes too late."""
        if not self.change_state("serve", self.reason):
            return
        self._ready_at = time.monotonic()
        self.starting.ready(self._ready_at)
        journal.record_event(
            "ready", worker=self.name, after_s=round(self._ready_at - self._began_at, 2)
        )
        self.note_segments()

    def change_state(self, event: Event, reason: str = "") -> bool:
        """Change the state by an event, and tell the listeners.

        Returns False, and changes nothing, if the present state has no transition for the event:
        it comes too late, as a report of a child that was told to end.
        """
        before, after = self.state, TRANSITIONS.get((self.state, event))
        if after is None:
            return False
        self.state, self.reason = after, reason
        self.host.publish_change()
        self.emit(StateChanged(self, before, after))
        return True

    def emit(self, event: ProcessEvent) -> None:
        for listener in self.listeners:
            listener(event)

    def accepts(self, event: Event) -> bool:
        """Return whether the present state has a transition for the event."""
        return (self.state, event) in TRANSITIONS

    def explain_state(self, reason: str) -> None:
        """Set the reason of the present state."""
        self.reason = reason
        self.host.publish_change()

    def check_health(self) -> None:
        """Let the breaker know once this life is fruitful. Called at each tick."""
        if not self._proved and self._is_fruitful():
            self._proved = True
            if self.circuit is not None:
                self.circuit.record_success()

    def kill_stalled(self, cause: str) -> None:
        """Have a child that does not answer write its stacks and end; another follows it."""
        if (child := self.child) is None or not self.change_state("stall", cause):
            return
        log.error("process_stalled", child=self.name, pid=child.pid, reason=cause)
        journal.record_event("stalled", cause, worker=self.name, pid=child.pid)
        self.stalls += 1
        self._stalled = self._loop.create_task(child.dump_and_kill(cause))

    def forgive_suspension(self) -> None:
        """Allow for a suspension of the supervisor."""

    def measure(self) -> None:
        """Read the child's resident memory, or take its node's figure."""
        self.rss_bytes = 0 if self.child is None else self.child.rss_bytes

    def note_segments(self) -> Collection[Segment]:
        """Return the shared memory that the child has created, as far as it has been seen."""
        return () if self.child is None else self.child.note_segments()

    @property
    def pid(self) -> int:
        return self.child.pid if self.child is not None else 0

    @property
    def gave_up(self) -> bool:
        """Return whether it cannot start, and waiting will not change that."""
        return self.state == "failed" and math.isinf(self._due)

    @property
    def gpu_bytes(self) -> int:
        return 0

    @property
    def silent_s(self) -> float:
        """The time since the oldest ping that is unanswered; 0 if there is none."""
        return 0.0

    @property
    def alert(self) -> str:
        """A sentence on what is wrong while it runs; "" if nothing is."""
        return ""

    def make_history(self) -> ReplicaHistory:
        """Return its state, its restarts and its deaths so far."""
        next_s = None
        if self._next_at is not None:
            next_s = max(0.0, self._next_at - time.monotonic())
        return ReplicaHistory(
            *(self.name, self.state, self.reason, self.restarts, next_s),
            self.history.exits(),
            self.alert,
        )

    # ---- one incarnation

    async def _live_once(self) -> float | None:
        """Run one incarnation, spawn to reap; return the delay of the next, None for no restart."""
        self._boot_failed, self._ready_at, self._proved = None, None, False
        self._engine_died = ""
        self._began_at = time.monotonic()
        self.starting.start_record(self._began_at)
        self.change_state("start", self._died_of)
        try:
            refusal = await run_unless(self._ending, self.acquire_resources())
            if self.ending:
                return None
            if refusal:
                return self._record_exit(Exit(None, None, (), cause=refusal))
            return await self._incarnate()
        finally:
            self.starting.died(time.monotonic())
            self.release_resources()

    async def _incarnate(self) -> float | None:
        self._began_at = time.monotonic()
        try:
            self.child = child = await self.spawn()
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
            return self._record_exit(Exit(None, None, (), cause=reason))
        self.starting.begin_phase("fork" if child.forked else self.begins_with, self._began_at)
        log.info("process_started", child=self.name, pid=child.pid)
        if was_upgraded():
            log.warning("servekit_upgraded", child=self.name)
        journal.record_event("started", worker=self.name, pid=child.pid)
        self.host.children_changed()
        try:
            self.send_greeting()
            exit_ = await self._until_exit(child)
            return None if self.ending else self._record_exit(exit_)
        finally:
            if not child.exited.done():
                child.kill("its supervision failed")
                await asyncio.wait((child.exited,))
            self.child, self.rss_bytes = None, 0
            self.forget_child()
            self.host.children_changed()

    async def _until_exit(self, child: AnyChild[Incoming]) -> Exit:
        await asyncio.wait((child.exited, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if child.exited.done():
            return child.exited.result()
        ending = self._ending.result()
        self.change_state("drain", self.reason)
        if isinstance(ending.ask, Drain):
            await asyncio.wait((child.exited,), timeout=self.notice_s)
        return await child.stop(ending.ask, ending.grace_s)

    def _record_exit(self, exit_: Exit) -> float | None:
        """Record the death, inform the breaker, and return the delay of the restart."""
        crashed = self._ready_at is not None and self._boot_failed is None
        said = self._boot_failed
        if self._engine_died:
            exit_ = exit_.of_engine(self._engine_died)
        fruitful, permanent = self._is_fruitful(), said is not None and said.permanent
        if said is not None:
            self._died_of = said.message
        else:
            self._died_of = exit_.explain("" if crashed else self._explain_start(exit_))
        if not crashed and UPGRADED not in self._died_of and was_upgraded():
            self._died_of = f"{self._died_of.rstrip('.')}. {UPGRADED}"
        death = self.history.add_exit(exit_, self._describe_child(), self._died_of)
        after_s = None if permanent else self.policy.after_s(fruitful=fruitful)
        report_death(self.name, death, after_s, crashed=crashed)
        if self.circuit is not None:
            self.circuit.died(self.name, self._died_of, fruitful=fruitful, permanent=permanent)
        return after_s

    def _explain_start(self, exit_: Exit) -> str:
        """Return how far the start came, with the file that a killed process was reading."""
        file = "" if exit_.signal is None or exit_.out_of_memory else self.starting.find_open_file()
        return " before it was ready" + (f", while it loaded {file}" if file else "")

    def _is_fruitful(self) -> bool:
        if self._ready_at is None:
            return False
        return self.policy.is_fruitful(self.use(), time.monotonic() - self._ready_at)

    def _describe_child(self) -> LastSeen:
        served, running = self.load()
        phase: str = self.state
        if phase == "stalled":
            phase = "loading" if self._ready_at is None else "ready"
        return LastSeen(
            pid=self.pid,
            lived_s=time.monotonic() - self._began_at,
            start=self.starting.last() if self._ready_at is None else None,
            phase=phase,
            served=served,
            running=running,
            rss_bytes=self.rss_bytes,
            gpu_bytes=self.gpu_bytes,
        )

    # ---- between two incarnations

    async def _wait_for_start(self, after_s: float | None) -> bool:
        """Wait until the next incarnation may start; return False if it was told to end instead."""
        self._due = math.inf if after_s is None else time.monotonic() + after_s
        while not self.ending:
            wait_s = max(0.0, self._due - time.monotonic())
            held_s = 0.0 if self.circuit is None else self.circuit.held_for_s()
            if not wait_s and held_s == 0.0:
                self._next_at = None
                if self.circuit is not None:
                    self.circuit.started(self.name)
                return True
            await self._wait(wait_s, held_s)
        self._next_at = None
        return False

    async def _wait(self, wait_s: float, held_s: float | None) -> None:
        """Wait until back-off and breaker allow a start, or until woken."""
        held = self.circuit is not None and held_s != 0.0 and not math.isinf(wait_s)
        wait_s = math.inf if held_s is None else max(wait_s, held_s)
        timeout_s = None if math.isinf(wait_s) else wait_s
        self._next_at = None if timeout_s is None else time.monotonic() + timeout_s
        if held and self.circuit is not None:
            self.change_state("fail", self.circuit.explain())
        else:
            self.change_state("fail" if timeout_s is None else "back off", self._died_of)
        self._woken = self._loop.create_future()
        await asyncio.wait(
            (self._ending, self._woken),
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _on_line(self, text: str) -> None:
        self.host.on_line(self.name, text)


async def wait_for_tasks(tasks: Tasks, within_s: float) -> set[str]:
    """Wait for tasks to end; return the names of those that did not. Raises a task's exception."""
    if not tasks:
        return set()
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in done:
        task.result()
    return {task.get_name() for task in pending}


async def run_unless(over: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; cancel it and return None if `over` is done first."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def complete_before(over: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any]) -> bool:
    """Return whether `work` was done before `over`; the first to end cancels the other."""
    told = asyncio.get_running_loop().create_task(over)
    try:
        await run_unless(told, work)
        if told.done():
            told.result()
        return not told.done()
    finally:
        told.cancel()
