"""Ending what a dead instance left behind: its children's groups, and all that carries its mark.

The mark is carried twice: in the environment, and as a resource limit that limits nothing. A
process that empties its environment and begins a session of its own keeps its limits.

Used by the guard, within a moment of the death, and by the next start in the same run directory.
It imports little on purpose: the guard is one more process.
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

#: In the environment of everything that an instance starts, grandchildren included.
MARK = "SERVEKIT_INSTANCE"
#: In the run directory: what the supervisor has started, and what was seen of what they have.
CHILDREN = "children.json"


@dataclass(frozen=True, slots=True)
class Started:
    """One child: `started` tells it from another process that got its PID later."""

    name: str
    pid: int
    started: int


def end_leftovers(children: Iterable[Started], mark: str, within_s: float = 5.0) -> int:
    """SIGKILL the groups of `children` and all that carries `mark`; how many were left alive."""
    deadline = time.monotonic() + within_s
    for child in children:
        if procfs.is_alive(child.pid, child.started):
            _kill(child.pid)
    while left := kill_marked(MARK, mark) + _kill_limited(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return 0


def mark_by_limit(mark: str) -> None:
    """Have all that this process starts from now on carry `mark` as a limit.

    As the soft RLIMIT_RTTIME, in microseconds of more than 70,000 years: it can stop nothing, and
    has no other use. Source: getrlimit(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_RTTIME, (_limit(mark), hard))


def unmark_by_limit(pid: int) -> None:
    """Take the limit from a child that is to be spared. Raises OSError."""
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    resource.prlimit(pid, resource.RLIMIT_RTTIME, (hard, hard))


def _limit(mark: str) -> int:
    return 2**61 + int(mark[:15], 16)


def _kill_limited(mark: str) -> int:
    """SIGKILL what carries `mark` as a limit, if it is ours; how many there were."""
    try:
        limit = _limit(mark)
    except ValueError:  # it is none that we have given
        return 0
    found = [one for one in procfs.limited(limit) if procfs.is_ours(one.pid)]
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return len(found)


def kill_marked(name: str, mark: str) -> int:
    """SIGKILL what carries `mark` in its environment as `name`; how many there were.

    To be repeated until it finds none: what is forked while it looks is seen the next time.
    """
    found = list(procfs.marked(f"{name}={mark}")) if mark else []
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return len(found)


def _kill(pid: int) -> None:
    """It, and its group if it leads one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def read_children(run_dir: Path) -> list[Started]:
    """What the supervisor of `run_dir` had last recorded."""
    try:
        return [Started(**entry) for entry in json.loads((run_dir / CHILDREN).read_text())]
    except (OSError, ValueError, TypeError):
        return []
