"""The orphan guard, which ends an instance whose supervisor was killed.

Runs as `python -m` this module, with RUN_DIR MARK GRACE_S. A worker sees the end of its lifeline,
or gets PR_SET_PDEATHSIG, and exits. The processes that it started itself are no longer its children
by then, and nobody would end them. So this small process waits for the supervisor's end of a pipe
to close. A supervisor that ends in order kills it first.

It has a process group of its own in the supervisor's session. If somebody has stopped it (SIGSTOP),
the kernel lets it go on when the supervisor dies, since that orphans its group: setpgid(2).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from servekit.system import shared_memory, subreaper
from servekit.system.orphan_cleanup import (
    MARK,
    end_leftovers,
    read_children,
    unmark_by_limit,
)
from servekit.system.python import python_command

#: How long to search: a child that was between fork and exec when its parent died carries its mark
#: a moment later.
_WATCH_S = 0.3
#: The shortest time between two starts of the guard.
_AGAIN_S = 0.5


class OrphanGuard:
    """The supervisor's handle on the guard process."""

    def __init__(
        self, run_dir: Path, mark: str, environ: Mapping[str, str], grace_s: float = 0.0
    ) -> None:
        self._args = (str(run_dir), mark, f"{grace_s:g}")
        self._env = {name: value for name, value in environ.items() if name != MARK}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._began_at = time.monotonic()
        process = subreaper.start_process(
            [
                *python_command.module_command("servekit.supervisor.process.orphan_guard"),
                *self._args,
            ],
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        with contextlib.suppress(OSError):  # else the guard is ended with the other children
            unmark_by_limit(process.pid)
        return process

    def restart_if_dead(self) -> bool:
        """Restart the guard if it has died; return whether it was. Called at each tick."""
        if self._process.poll() is None or time.monotonic() < self._began_at + _AGAIN_S:
            return False
        self._reap()
        with contextlib.suppress(OSError):  # no memory, no files left: try again at a later tick
            self._process = self._start()
            return True
        return False

    def _reap(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        subreaper.forget_process(self._process)

    def stop_guard(self) -> None:
        """Kill the guard: nothing is left to guard. Return when it is gone."""
        self._process.kill()
        self._reap()


def guard_orphans() -> None:
    run_dir, mark, grace_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)
    if grace_s and _succeeded(run_dir, mark, grace_s):
        return
    deadline = time.monotonic() + _WATCH_S
    while end_leftovers(read_children(run_dir), mark) or time.monotonic() < deadline:
        time.sleep(0.02)
    shared_memory.sweep_segments(run_dir, {child.pid for child in read_children(run_dir)})


def _succeeded(run_dir: Path, mark: str, grace_s: float) -> bool:
    """Wait for a new supervisor, which takes over the processes; return whether one came."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        try:
            if json.loads((run_dir / "supervisor.json").read_text())["mark"] != mark:
                return True
        except (OSError, ValueError, KeyError):
            pass  # it is being written, or no supervisor has come yet
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    guard_orphans()
