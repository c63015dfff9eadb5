"""Timestamps of traced requests: acceptance, submission to the engine and output."""

from __future__ import annotations

import time

from msgspec.structs import replace

from servekit.protocol.messages import Delta


class Stopwatch:
    """Unix times in ns of traced jobs; other jobs are not recorded."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: dict[int, list[int]] = {}  # accepted, submitted to the engine, first token

    @property
    def runs(self) -> bool:
        """Return whether any job is timed."""
        return bool(self._times)

    def accept(self, job_id: int) -> None:
        """Start timing a job."""
        self._times[job_id] = [time.time_ns()]

    def note(self, job_id: int) -> None:
        """Record the time at which a job is submitted to the engine."""
        if (times := self._times.get(job_id)) is not None:
            times.append(time.time_ns())

    def stamp(self, job_id: int, delta: Delta) -> Delta:
        """Record the time of a delta; the last one of a job carries all times (`times_ns`)."""
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
        """Drop the times of a job that has ended."""
        self._times.pop(job_id, None)
