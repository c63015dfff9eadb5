"""The record of a child's last deaths, and of the phases of its last two starts.

Of a start, the supervisor records what it sees itself (reason, back-off, admission, spawn, death);
a worker reports the rest. A phase whose end is not reported ends with the next report.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.protocol.control.startup_messages import (
    Cause,
    GatewayConnected,
    Phase,
    PhaseReport,
    Start,
    Starts,
)
from servekit.protocol.types import ExitRecord
from servekit.supervisor.event_log import journal
from servekit.supervisor.process.child_process import Exit
from servekit.system import procfs

log: Any = structlog.get_logger("servekit.supervisor")

#: Deaths kept per child, and for how many of them the stacks, which are long.
_DEATHS = 10
_WITH_STACKS = 2
#: The messages of CUDA and torch when a GPU's memory is exhausted.
_GPU_OUT_OF_MEMORY = ("CUDA out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")
#: A shorter phase is not recorded: there was no wait.
_NOTHING_S = 0.001
#: Starts kept: the present one, and the one before.
_LIVES = 2
#: The limit against a worker that reports phases without end.
_MOST_PHASES = 256
#: The name of the phase from the reason for a start to the start, by that reason.
_BEFORE: dict[Cause, str] = {
    "up": "supervisor",
    "reload": "reload",
    "request": "room",
    "operator": "room",
    "restart": "back-off",
    "standby": "standby",
    "scale": "room",
}
#: The phase in which a worker produces its first token.
FIRST_TOKEN = "warm-up"


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The last known state of a running child."""

    pid: int = 0
    lived_s: float = 0.0
    phase: str = ""
    served: int = 0
    running: int = 0
    rss_bytes: int = 0
    gpu_bytes: int = 0
    start: Start | None = None  # how far its start came, if it died before it was ready


class ExitHistory:
    """The last deaths of one child, the newest last."""

    def __init__(self) -> None:
        self._exits: deque[ExitRecord] = deque(maxlen=_DEATHS)

    def add_exit(self, exit_: Exit, known: LastSeen, what: str) -> ExitRecord:
        death = make_record(exit_, known, what)
        self._exits.append(death)
        dumped = [i for i, old in enumerate(self._exits) if old.stacks]
        for index in dumped[:-_WITH_STACKS]:
            self._exits[index] = replace(self._exits[index], stacks=())
        return death

    def exits(self) -> tuple[ExitRecord, ...]:
        return tuple(self._exits)


def report_death(name: str, death: ExitRecord, after_s: float | None, *, crashed: bool) -> None:
    """Log a death and record its event; `after_s` is the delay of the restart, if any."""
    again_in_s = None if after_s is None else round(after_s, 2)
    event = "process_exited" if crashed else "process_start_failed"
    log.error(event, child=name, reason=death.what, again_in_s=again_in_s)
    journal.record_event(
        "exit",
        death.what,
        worker=name,
        pid=death.pid,
        code=death.code,
        signal=death.signal,
        phase=death.phase,
        lived_s=round(death.lived_s, 2),
        served=death.served,
        out_of_memory=death.out_of_memory,
        again_in_s=again_in_s,
    )


def make_record(exit_: Exit, known: LastSeen, what: str) -> ExitRecord:
    """Return the record of a death; `what` is its reason in a sentence."""
    return ExitRecord(
        at=time.time(),
        pid=known.pid,
        lived_s=known.lived_s,
        what=what,
        code=exit_.code,
        signal=exit_.signal,
        phase=known.phase,
        out_of_memory=find_exhausted_memory(exit_, what),
        served=known.served,
        running=known.running,
        rss_bytes=known.rss_bytes,
        gpu_bytes=known.gpu_bytes,
        tail=exit_.tail,
        stacks=exit_.stacks,
        start=known.start,
    )


def find_exhausted_memory(exit_: Exit, what: str) -> str:
    """Return "host" by the kernel's own counter, "gpu" by an error of CUDA or torch, else ""."""
    if exit_.out_of_memory:
        return "host"
    said = (what, *exit_.tail)
    return "gpu" if any(sign in line for line in said for sign in _GPU_OUT_OF_MEMORY) else ""


@dataclass(frozen=True, slots=True)
class StartReason:
    """The reason of a start, and its time on the monotonic clock, in s."""

    cause: Cause
    at_s: float

    @classmethod
    def from_supervisor_start(cls) -> StartReason:
        """Return the reason "up", since the start of the supervisor."""
        return cls("up", time.monotonic() - procfs.age_s())

    @classmethod
    def from_now(cls, cause: Cause) -> StartReason:
        return cls(cause, time.monotonic())


@dataclass(slots=True)
class _StartRecord:
    """The record of one life, for its start."""

    occasion: StartReason
    at: float
    phases: list[Phase] = field(default_factory=list)
    ready_s: float | None = None
    died_s: float | None = None
    greeted: dict[str, float] = field(default_factory=dict)

    @property
    def over_s(self) -> float | None:
        """The time at which the start succeeded or failed; None while it is under way."""
        if self.ready_s is not None:
            return max([self.ready_s, *self.greeted.values()])
        return self.died_s

    def record_phase(self, phase: Phase) -> None:
        """Record a phase, or replace an earlier record of it."""
        for at, known in enumerate(self.phases):
            if (known.name, known.began_s) == (phase.name, phase.began_s):
                self.phases[at] = phase
                return
        if len(self.phases) < _MOST_PHASES:
            self.phases.append(phase)

    def start(self, now: float) -> Start:
        zero, over = self.occasion.at_s, self.over_s
        phases = [*self.phases, *self._gateways()]
        return Start(
            cause=self.occasion.cause,
            at=self.at,
            state="up" if self.ready_s is not None else "starting" if over is None else "died",
            phases=tuple(
                _shift_phase(zero, one) for one in sorted(phases, key=lambda one: one.began_s)
            ),
            total_s=(now if over is None else over) - zero,
            first_token_s=self._first_token_s(),
        )

    def _gateways(self) -> Iterator[Phase]:
        if self.ready_s is not None and self.greeted:
            yield Phase("gateways", self.ready_s, self.over_s)

    def _first_token_s(self) -> float | None:
        ends = [one.ended_s for one in self.phases if one.name == FIRST_TOKEN and not one.failed]
        return next((end - self.occasion.at_s for end in ends if end is not None), None)


class StartupTiming:
    """The record of one process's starts. Times are on the monotonic clock, in s."""

    def __init__(self) -> None:
        self.occasion: StartReason | None = None  # of its next start, unless that is a restart
        self._lives: deque[_StartRecord] = deque(maxlen=_LIVES)
        self._awaited = ""  # the phase that ends with the next report

    def start_record(self, now: float) -> None:
        """Begin the record of a start."""
        occasion = self.occasion or StartReason("restart", self._died_s(now))
        self.occasion, self._awaited = None, ""
        at = time.time() - (time.monotonic() - occasion.at_s)
        self._lives.append(_StartRecord(occasion, at))
        self.spent(_BEFORE[occasion.cause], occasion.at_s, now)

    def spent(self, name: str, began_s: float, ended_s: float) -> None:
        """Record a phase that is over, unless it took no time."""
        if self._lives and ended_s - began_s >= _NOTHING_S:
            self._lives[-1].record_phase(Phase(name, began_s, ended_s))

    def begin_phase(self, name: str, began_s: float) -> None:
        """Begin a phase that ends with the next report."""
        self._end_awaited(began_s)
        if self._lives:
            self._awaited = name
            self._lives[-1].record_phase(Phase(name, began_s))

    def add_report(self, said: PhaseReport | GatewayConnected) -> None:
        """Record a report of the process."""
        if not self._lives:
            return
        if isinstance(said, PhaseReport):
            self._end_awaited(said.phase.began_s)
            self._lives[-1].record_phase(said.phase)
        else:
            self._lives[-1].greeted.setdefault(said.gateway, said.at_s)

    def ready(self, now: float) -> None:
        """Record that the process serves."""
        self._end_awaited(now)
        if self._lives:
            self._lives[-1].ready_s = now

    def died(self, now: float) -> None:
        """Record the end of its life; the phase in which it died stays open."""
        self._awaited = ""
        if self._lives:
            self._lives[-1].died_s = now

    def find_open_file(self) -> str:
        """Return the file that its newest start reads, or was reading at its end; "" if none."""
        phases = self._lives[-1].phases if self._lives else []
        return next((one.file for one in reversed(phases) if one.file and one.ended_s is None), "")

    def last(self) -> Start | None:
        """Return its newest start; None before the first."""
        return self._lives[-1].start(time.monotonic()) if self._lives else None

    def all(self, name: str) -> Starts:
        """Return its starts, the newest last."""
        now = time.monotonic()
        return Starts(name, tuple(life.start(now) for life in self._lives))

    def _died_s(self, now: float) -> float:
        before = self._lives[-1].died_s if self._lives else None
        return now if before is None else before

    def _end_awaited(self, at_s: float) -> None:
        if not self._awaited:
            return
        name, self._awaited = self._awaited, ""
        began = next(one.began_s for one in self._lives[-1].phases if one.name == name)
        self._lives[-1].record_phase(Phase(name, began, max(began, at_s)))


def _shift_phase(zero: float, phase: Phase) -> Phase:
    ended_s = None if phase.ended_s is None else phase.ended_s - zero
    return replace(phase, began_s=phase.began_s - zero, ended_s=ended_s)
