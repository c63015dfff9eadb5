"""Ending what a dead instance left behind: its children's groups, and all that carries its mark.

Used by the guard, within a moment of the death, and by the next start in the same run directory.
It imports little on purpose: the guard is one more process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from servekit.supervisor import procfs

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
    while left := kill_marked(MARK, mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return 0


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
