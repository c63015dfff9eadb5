"""Load progress of the processes in this process group, because vLLM reports little while it loads.

CPU time used and bytes read count as progress, however slow; a load that hangs uses neither.
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
def report_activity(report: Report) -> Iterator[None]:
    """Report load progress for as long as the processes do something."""
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch_activity, args=(report, done), name="activity", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch_activity(report: Report, done: threading.Event) -> None:
    report(Progress("load"))
    ticks, read = measure_activity()
    while not done.wait(_LOOK_EVERY_S):
        now_ticks, now_read = measure_activity()
        if abs(now_ticks - ticks) > _IDLE_TICKS or abs(now_read - read) > _IDLE_BYTES:
            report(Progress("load"))
        ticks, read = now_ticks, now_read


def measure_activity() -> tuple[int, int]:
    """Return the clock ticks used and bytes read by all processes of this process group."""
    group = os.getpgrp()
    ticks = read = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
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
