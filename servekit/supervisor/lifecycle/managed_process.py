"""The life cycle of a supervised process across restarts. One task runs it, and only it acts.

starting ──▶ loading ──▶ ready ──▶ draining ──▶ stopped
    ▲           │ ╲       ╱ │          ▲
    │           │  stalled  │          └─ `end`, from any state
    └─ backoff ◀┴─────┴─────┘
          └▶ failed   (`restart_policy` says when it restarts, `breaker` whether at all)
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import structlog

from servekit.protocol.messages import BootFailed, Drain, ReplicaHistory, Stop, WorkerState
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.circuit_breaker import CircuitBreaker
from servekit.supervisor.lifecycle.context import SupervisorContext as SupervisorContext
from servekit.supervisor.lifecycle.exit_history import ExitHistory, LastSeen, lament
from servekit.supervisor.lifecycle.launcher import AnyChild as AnyChild
from servekit.supervisor.lifecycle.restart_policy import RestartPolicy
from servekit.supervisor.lifecycle.startup_timing import StartReason, StartupTiming
from servekit.supervisor.process.child_process import GOODBYE_S, ChildProcess, Command, Exit
from servekit.supervisor.process.task_utils import Shutdown, unless
from servekit.system.shared_memory import Segment

log: Any = structlog.get_logger("servekit.supervisor")
Incoming = TypeVar("Incoming")

#: From "stop now" to SIGKILL.
_NOW_S = 1.0
#: From a child's report that its engine has died to SIGKILL: a broken device may block its exit.
_DEAD_S = 3.0


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
        self.state: WorkerState = "starting"
        self.reason = ""
        self.restarts = self.stalls = 0
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
    def greet(self) -> None:
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

    def buried(self) -> None:
        """Forget the state of a child that was reaped."""

    async def enter(self) -> str:
        """Wait for the resources of a start; return why there are none, or ""."""
        return ""

    def leave(self) -> None:
        """Release the resources after each life, and after an `enter` that failed."""

    # ---- life cycle

    async def run(self) -> None:
        """Run until `end` was called and the last child is reaped."""
        after_s: float | None = 0.0
        lives = 0
        while await self._admitted(after_s):
            self.restarts += lives > 0
            lives += 1
            after_s = await self._live_once()
        if self.circuit is not None:
            self.circuit.leave(self.name)
        journal.tell("stopped", worker=self.name)
        self.set("stopped", self.reason)

    def end(self, ask: msgspec.Struct, grace_s: float) -> None:
        """Ask the child to end, and kill it if it has not ended within `grace_s`."""
        if not self._ending.done():
            self._ending.set_result(Shutdown(ask, grace_s))
        elif self.child is not None:  # it drains already, perhaps with a longer grace time
            self.child.send(ask)
            self._loop.call_later(grace_s, self.child.kill, "did not end in time, killed")

    def end_now(self) -> None:
        """End the child without waiting for its requests."""
        self.end(Stop(), _NOW_S)
        if self.child is not None:
            self.child.send(Stop())
            self._loop.call_later(_NOW_S, self.child.kill, "told to stop at once, killed")

    @property
    def ending(self) -> bool:
        return self._ending.done()

    def retry(self) -> None:
        """Restart it now if it has failed or is in back-off, with the back-off reset."""
        if self.state in ("failed", "backoff"):
            self.policy.forget()
            self.starting.occasion = StartReason.now("operator")
            self.set("starting", self.reason)
        self._due = time.monotonic()
        self._wake()

    def fail(self, message: str, *, permanent: bool) -> None:
        """Treat the running child as one that could not boot."""
        self._boot_failed = BootFailed(message, permanent)
        if self.child is not None:
            self._loop.call_later(GOODBYE_S, self.child.kill, message)

    def engine_died(self, cause: str) -> None:
        """Record the child's report that its engine has died; kill it unless it exits soon."""
        self._engine_died = cause
        if self.child is not None:
            self._loop.call_later(_DEAD_S, self.child.kill, cause)
        if self.state != "draining":
            self.set("stalled", cause)

    def came_up(self) -> None:
        """Record that the child serves."""
        self._ready_at = time.monotonic()
        self.starting.ready(self._ready_at)
        journal.tell("ready", worker=self.name, after_s=round(self._ready_at - self._began_at, 2))
        self.set("ready", self.reason)
        self.note_segments()

    def set(self, state: WorkerState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.host.changed()

    def look(self) -> None:
        """Let the breaker know once this life is fruitful. Called at each tick."""
        if not self._proved and self._is_fruitful():
            self._proved = True
            if self.circuit is not None:
                self.circuit.fruitful()

    def slept(self) -> None:
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
    def alert(self) -> str:
        """A sentence on what is wrong while it runs; "" if nothing is."""
        return ""

    def story(self) -> ReplicaHistory:
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
        self.starting.begin(self._began_at)
        self.set("starting", self._died_of)
        try:
            refusal = await unless(self._ending, self.enter())
            if self.ending:
                return None
            if refusal:
                return self._judge(Exit(None, None, (), cause=refusal))
            return await self._incarnate()
        finally:
            self.starting.died(time.monotonic())
            self.leave()

    async def _incarnate(self) -> float | None:
        self._began_at = time.monotonic()
        try:
            self.child = child = await self.spawn()
        except OSError as error:
            reason = f"cannot be started: {error.strerror or error}"
            return self._judge(Exit(None, None, (), cause=reason))
        self.starting.awaits("fork" if child.forked else self.begins_with, self._began_at)
        log.info("process_started", child=self.name, pid=child.pid)
        journal.tell("started", worker=self.name, pid=child.pid)
        self.host.children_changed()
        self.greet()
        try:
            exit_ = await self._until_exit(child)
            return None if self.ending else self._judge(exit_)
        finally:
            self.child, self.rss_bytes = None, 0
            self.buried()
            self.host.children_changed()

    async def _until_exit(self, child: AnyChild[Incoming]) -> Exit:
        await asyncio.wait((child.exited, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if child.exited.done():
            return child.exited.result()
        ending = self._ending.result()
        self.set("draining", self.reason)
        if isinstance(ending.ask, Drain):
            await asyncio.wait((child.exited,), timeout=self.notice_s)
        return await child.stop(ending.ask, ending.grace_s)

    def _judge(self, exit_: Exit) -> float | None:
        """Record the death, inform the breaker, and return the delay of the restart."""
        crashed = self._ready_at is not None and self._boot_failed is None
        said = self._boot_failed
        if self._engine_died:
            exit_ = exit_.of_engine(self._engine_died)
        fruitful, permanent = self._is_fruitful(), said is not None and said.permanent
        if said is not None:
            self._died_of = said.message
        else:
            self._died_of = exit_.explain("" if crashed else " before it was ready")
        death = self.history.add(exit_, self._known(), self._died_of)
        after_s = None if permanent else self.policy.after_s(fruitful=fruitful)
        lament(self.name, death, after_s, crashed=crashed)
        if self.circuit is not None:
            self.circuit.died(self.name, self._died_of, fruitful=fruitful, permanent=permanent)
        return after_s

    def _is_fruitful(self) -> bool:
        if self._ready_at is None:
            return False
        return self.policy.is_fruitful(self.use(), time.monotonic() - self._ready_at)

    def _known(self) -> LastSeen:
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

    async def _admitted(self, after_s: float | None) -> bool:
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
            self.set("failed", self.circuit.explain())
        else:
            self.set("failed" if timeout_s is None else "backoff", self._died_of)
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
        self.host.line(self.name, text)
