"""What became of a child: its deaths, as far as they can be told afterwards."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from servekit.supervisor.child import Exit
from servekit.wire.values import ExitRecord

#: Deaths remembered per child, and of how many the stacks: they are long.
_DEATHS = 10
_WITH_STACKS = 2
#: What CUDA and torch say when a GPU's memory is used up.
_GPU_OUT_OF_MEMORY = ("CUDA out of memory", "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Known:
    """What was last known of a running child."""

    pid: int = 0
    lived_s: float = 0.0
    phase: str = ""
    served: int = 0
    running: int = 0
    rss_bytes: int = 0
    gpu_bytes: int = 0


class History:
    """The last deaths of one child, the newest last."""

    def __init__(self) -> None:
        self._exits: deque[ExitRecord] = deque(maxlen=_DEATHS)

    def add(self, exit_: Exit, known: Known, what: str) -> None:
        self._exits.append(record(exit_, known, what))
        dumped = [i for i, old in enumerate(self._exits) if old.stacks]
        for index in dumped[:-_WITH_STACKS]:
            self._exits[index] = replace(self._exits[index], stacks=())

    def exits(self) -> tuple[ExitRecord, ...]:
        return tuple(self._exits)


def record(exit_: Exit, known: Known, what: str) -> ExitRecord:
    """One death; `what` is its reason in a sentence."""
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
    )


def out_of_memory(exit_: Exit, what: str) -> str:
    """ "host" by the kernel's own counter, "gpu" by the words of CUDA and torch, else ""."""
    if exit_.out_of_memory:
        return "host"
    said = (what, *exit_.tail)
    return "gpu" if any(sign in line for line in said for sign in _GPU_OUT_OF_MEMORY) else ""
