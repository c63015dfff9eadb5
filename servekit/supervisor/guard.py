"""`python -m servekit.supervisor.guard RUN_DIR MARK`: ends an instance whose supervisor was killed.

A worker sees the end of its lifeline, or gets PR_SET_PDEATHSIG, and is gone. What it had started
itself is not its child any more by then, and nobody would end that: so one small process of our
own waits for the supervisor's end of a pipe to close. A supervisor that ends in order says so
first, by one byte.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from servekit.supervisor import interpreter, offspring, shared_memory
from servekit.supervisor.leftovers import MARK, end_leftovers, read_children

#: A child that was between fork and exec when its parent died carries its mark a moment later.
_WATCH_S = 0.3


class Guard:
    """The supervisor's side of it."""

    def __init__(
        self, run_dir: Path, mark: str, environ: Mapping[str, str], grace_s: float = 0.0
    ) -> None:
        self._process = offspring.start(
            [*interpreter.module("servekit.supervisor.guard"), str(run_dir), mark, f"{grace_s:g}"],
            env={name: value for name, value in environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """There is nothing left to guard; returns when it is gone."""
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(b".")
            stdin.close()
        except BrokenPipeError:  # it was killed before us
            pass
        self._process.wait()
        offspring.reaped(self._process)


def main() -> None:
    run_dir, mark, grace_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1):
        return
    if grace_s and _succeeded(run_dir, mark, grace_s):
        return
    deadline = time.monotonic() + _WATCH_S
    while end_leftovers(read_children(run_dir), mark) or time.monotonic() < deadline:
        time.sleep(0.02)
    shared_memory.remove(shared_memory.read(run_dir))


def _succeeded(run_dir: Path, mark: str, grace_s: float) -> bool:
    """Wait for another supervisor, which sees to what the last one has left; whether one came."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        try:
            if json.loads((run_dir / "supervisor.json").read_text())["mark"] != mark:
                return True
        except (OSError, ValueError, KeyError):
            pass  # it is being written, or nobody has come yet
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
