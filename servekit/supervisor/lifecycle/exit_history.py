"""The record of a child's last deaths, for operators to read afterwards."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.protocol.startup_messages import Start
from servekit.protocol.types import ExitRecord
from servekit.supervisor.event_log import journal
from servekit.supervisor.process.child_process import Exit

log: Any = structlog.get_logger("servekit.supervisor")

#: Deaths kept per child, and for how many of them the stacks, which are long.
_DEATHS = 10
_WITH_STACKS = 2
#: The messages of CUDA and torch when a GPU's memory is exhausted.
_GPU_OUT_OF_MEMORY = ("CUDA out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")


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

    def add(self, exit_: Exit, known: LastSeen, what: str) -> ExitRecord:
        death = record(exit_, known, what)
        self._exits.append(death)
        dumped = [i for i, old in enumerate(self._exits) if old.stacks]
        for index in dumped[:-_WITH_STACKS]:
            self._exits[index] = replace(self._exits[index], stacks=())
        return death

    def exits(self) -> tuple[ExitRecord, ...]:
        return tuple(self._exits)


def lament(name: str, death: ExitRecord, after_s: float | None, *, crashed: bool) -> None:
    """Log a death and record its event; `after_s` is the delay of the restart, if any."""
    again_in_s = None if after_s is None else round(after_s, 2)
    event = "process_exited" if crashed else "process_start_failed"
    log.error(event, child=name, reason=death.what, again_in_s=again_in_s)
    journal.tell(
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


def record(exit_: Exit, known: LastSeen, what: str) -> ExitRecord:
    """Return the record of a death; `what` is its reason in a sentence."""
    return ExitRecord(
        at=time.time(),
        pid=known.pid,
        lived_s=known.lived_s,
        what=what,
        code=exit_.code,
        signal=exit_.signal,
        phase=known.phase,
        out_of_memory=out_of_memory(exit_, what),
        served=known.served,
        running=known.running,
        rss_bytes=known.rss_bytes,
        gpu_bytes=known.gpu_bytes,
        tail=exit_.tail,
        stacks=exit_.stacks,
        start=known.start,
    )


def out_of_memory(exit_: Exit, what: str) -> str:
    """Return "host" by the kernel's own counter, "gpu" by an error of CUDA or torch, else ""."""
    if exit_.out_of_memory:
        return "host"
    said = (what, *exit_.tail)
    return "gpu" if any(sign in line for line in said for sign in _GPU_OUT_OF_MEMORY) else ""
