"""Cleanup of a dead instance's processes: its children's groups, and all that carry its mark.

The mark is carried twice: in the environment, and as a resource limit that has no effect. A process
that empties its environment and starts its own session keeps its limits.

Used by the guard process, right after the death, and by the next start in the same run directory.
It imports little, to keep the guard process small.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from servekit.system import procfs

#: Environment variable of everything that an instance starts, grandchildren included.
MARK = "SERVEKIT_INSTANCE"
#: File in the run directory: the supervisor's children and their recorded descendants.
CHILDREN = "children.json"


@dataclass(frozen=True, slots=True)
class Started:
    """A child; `started` distinguishes it from a later process with the same PID."""

    name: str
    pid: int
    started: int


def end_leftovers(children: Iterable[Started], mark: str, within_s: float = 5.0) -> int:
    """SIGKILL the groups of `children` and all processes with `mark`; return how many were left."""
    deadline = time.monotonic() + within_s
    for child in children:
        if procfs.is_alive(child.pid, child.started):
            _kill_group(child.pid)
    while left := kill_marked(MARK, mark) + _kill_limited(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return 0


def mark_by_limit(mark: str) -> None:
    """Make all processes that this process starts from now on carry `mark` as a limit.

    The mark is the soft RLIMIT_RTTIME, in microseconds of more than 70,000 years, so it limits
    nothing, and the limit has no other use. Source: getrlimit(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_RTTIME, (_realtime_limit(mark), hard))


def unmark_by_limit(pid: int) -> None:
    """Remove the limit from a child that is to be spared. Raises OSError."""
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    resource.prlimit(pid, resource.RLIMIT_RTTIME, (hard, hard))


def _realtime_limit(mark: str) -> int:
    return 2**61 + int(mark[:15], 16)


def _kill_limited(mark: str) -> int:
    """SIGKILL our processes that carry `mark` as a limit; return how many there were."""
    try:
        limit = _realtime_limit(mark)
    except ValueError:  # not one of our marks
        return 0
    return kill_processes(one for one in procfs.find_limited(limit) if procfs.is_ours(one.pid))


def kill_marked(name: str, mark: str) -> int:
    """SIGKILL processes that have `mark` in the environment variable `name`; return how many.

    Repeat until it finds none: processes forked during the search are found the next time.
    """
    return kill_processes(procfs.find_marked(f"{name}={mark}")) if mark else 0


def kill_processes(processes: Iterable[procfs.Process]) -> int:
    """SIGKILL these processes; return how many there were."""
    killed = 0
    for process in processes:
        killed += 1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return killed


def _kill_group(pid: int) -> None:
    """SIGKILL the process, and its group if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def read_children(run_dir: Path) -> list[Started]:
    """Return the children that the supervisor of `run_dir` last recorded."""
    try:
        return [Started(**entry) for entry in json.loads((run_dir / CHILDREN).read_text())]
    except (OSError, ValueError, TypeError):
        return []
