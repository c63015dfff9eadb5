"""Progress of the processes in this process group, for engines whose processes report little.

CPU time used and bytes read count as progress, however slow; a process that hangs uses neither.
Source: proc(5), /proc/PID/stat and /proc/PID/io.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servekit.engines.api.base import Report
from servekit.protocol.messages import Progress

_LOOK_EVERY_S = 1.0
#: Clock ticks and bytes per interval up to which a process counts as idle: polling uses some.
_IDLE_TICKS = 2
_IDLE_BYTES = 2**20


@contextmanager
def report_activity(report: Report, *, without: int = 0) -> Iterator[None]:
    """Report load progress for as long as the processes, but the PID `without`, do something."""
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch_activity, args=(report, done, without), name="activity", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch_activity(report: Report, done: threading.Event, without: int) -> None:
    report(Progress("load"))
    activity = Activity(without)
    while not done.wait(_LOOK_EVERY_S):
        if activity.has_moved():
            report(Progress("load"))


class Activity:
    """The activity of this process group without one PID, from one look to the next."""

    def __init__(self, without: int = 0) -> None:
        self._without = without
        self._last = measure_activity(without)

    def has_moved(self) -> bool:
        """Return whether the processes have done something since the last look."""
        (ticks, read), self._last = self._last, measure_activity(self._without)
        return abs(self._last[0] - ticks) > _IDLE_TICKS or abs(self._last[1] - read) > _IDLE_BYTES


def measure_activity(without: int = 0) -> tuple[int, int]:
    """Return the clock ticks used and bytes read by the processes of this process group."""
    group = os.getpgrp()
    ticks = read = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.name != str(without):
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    ticks += int(fields[11]) + int(fields[12])
                    read += _bytes_read(process)
            except (OSError, IndexError):
                continue  # the process has ended
    return ticks, read


def _bytes_read(process: Path) -> int:
    try:
        lines = (process / "io").read_text().splitlines()
    except OSError:  # no permission
        return 0
    return int(lines[0].partition(":")[2])
