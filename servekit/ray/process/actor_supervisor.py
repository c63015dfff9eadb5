"""Supervise the process of an actor: `python -m` this module ROLE MARK REPORT_FD ARGS….

A Ray actor can be killed at any time, and its worker or gateway must not outlive it, nor anything
that this has started. So this small process is their parent, and ends them when its pipe from the
actor closes. It reports on REPORT_FD, as a line of JSON each, the PID of the process and how it
ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from servekit.system import cgroup, subreaper
from servekit.system.orphan_cleanup import kill_marked
from servekit.system.parent_death import CHILD_MARK
from servekit.system.python import python_command
from servekit.system.rlimits import raise_file_limit

#: Poll interval without pidfds.
_LOOK_EVERY_S = 0.05
_CLEAR_S = 5.0


def supervise_process(role: str, mark: str, report_fd: int, args: list[str]) -> None:
    """Start the process, and return when nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    subreaper.become_subreaper()
    raise_file_limit()
    fds = [int(args[i + 1]) for i, arg in enumerate(args) if arg.endswith("-fd")]
    oom_kills = cgroup.count_oom_kills()
    worker = subreaper.start_process(
        [
            *python_command.module_command(f"servekit.{role}"),
            *args,
            "--parent-pid",
            str(os.getpid()),
        ],
        env={**os.environ, CHILD_MARK: mark},
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,
    )
    for fd in fds:
        if fd != report_fd:
            os.close(fd)
    _tell_actor(report_fd, {"pid": worker.pid})
    _until_over(worker)
    code = _end_worker(worker, mark)
    oom = code == -signal.SIGKILL and cgroup.count_oom_kills() > oom_kills
    _tell_actor(report_fd, {"code": code, "out_of_memory": oom})


def _tell_actor(fd: int, what: dict[str, object]) -> None:
    os.write(fd, json.dumps(what).encode() + b"\n")


def _until_over(worker: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended, or the actor is gone."""
    try:
        pidfd = os.pidfd_open(worker.pid)
    except OSError:
        while not select.select([0], [], [], _LOOK_EVERY_S)[0] and not _has_ended(worker.pid):
            pass
        return
    select.select([0, pidfd], [], [])
    os.close(pidfd)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_worker(worker: subprocess.Popen[bytes], mark: str) -> int:
    """Kill the process, its group and its other descendants; return its exit code or -signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    code = worker.wait()
    subreaper.forget_process(worker)
    deadline = time.monotonic() + _CLEAR_S
    while kill_marked(CHILD_MARK, mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    subreaper.end_adopted()
    return code


if __name__ == "__main__":
    supervise_process(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
