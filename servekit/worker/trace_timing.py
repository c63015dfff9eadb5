"""When the requests that are traced came, went to the engine, and brought something."""

from __future__ import annotations

import time

from msgspec.structs import replace

from servekit.protocol.messages import Delta


class Stopwatch:
    """Unix times in ns of the jobs that were accepted here; of all others nothing is noted."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: dict[int, list[int]] = {}  # accepted, given to the engine, first token

    @property
    def runs(self) -> bool:
        """Some job is timed."""
        return bool(self._times)

    def accept(self, job_id: int) -> None:
        """Time a job from now on."""
        self._times[job_id] = [time.time_ns()]

    def note(self, job_id: int) -> None:
        """A job goes to the engine now."""
        if (times := self._times.get(job_id)) is not None:
            times.append(time.time_ns())

    def stamp(self, job_id: int, delta: Delta) -> Delta:
        """Note that this came; the last one tells all times, see `Delta.times_ns`."""
        times = self._times.get(job_id)
        if times is None:
            return delta
        now = time.time_ns()
        if len(times) == 2:
            times.append(now)
        if delta.finish is None or len(times) < 3:
            return delta
        return replace(delta, times_ns=(*times, now))

    def forget(self, job_id: int) -> None:
        """A job is over."""
        self._times.pop(job_id, None)
