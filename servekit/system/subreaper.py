"""The children that this process started itself, told apart from those that the kernel gives it.

The supervisor is a subreaper: what a worker starts and leaves behind becomes a child of ours, not
of init, wherever it moved its session and whatever it did to its environment. So we find it, end
it and reap it. As PID 1 of a container that holds without asking.

A process has one set of children, so this module's state is the module's own.

Source: prctl(2), PR_SET_CHILD_SUBREAPER; proc(5), /proc/PID/task/TID/children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from servekit.system import procfs

_PR_SET_CHILD_SUBREAPER = 36
_TASKS = Path("/proc/self/task")

_lock = threading.Lock()  # between a fork and the note of it nobody may reap
_own: set[int] = set()  # PIDs whose end somebody else waits for
#: Who was here, alive, at the last two looks: PID and birthmark.
_before: set[tuple[int, int]] = set()
_settled: set[tuple[int, int]] = set()
#: Without it, whoever started us may have children of other kinds in this process.
_adopting = False


def become_subreaper() -> None:
    """Be given every orphan among our descendants from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    global _adopting
    _adopting = True


def start(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`; say `reaped` once it has been waited for. Raises OSError."""
    with _lock:
        process: subprocess.Popen[bytes] = subprocess.Popen(args, **options)
        _own.add(process.pid)
    return process


class Forked:
    """A child that another process has forked for us, with what is used of Popen's interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap it; returns its exit code, or the number of its signal, negative."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked
#: Has a worker forked from a standby, if there is one: environment, mark, and two descriptors.
Fork = Callable[[Mapping[str, str], str, int, int], Awaitable[Forked | None]]


def take(pid: int) -> Forked:
    """What was forked for us and given to us is ours from now on, and somebody waits for its end.

    Raises ChildProcessError if it is not our child, or has ended and was reaped.
    """
    with _lock:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        _own.add(pid)
    return Forked(pid)


def reaped(process: Process) -> None:
    """Its PID may be another's from now on."""
    _own.discard(process.pid)


def is_own(pid: int) -> bool:
    """Whether we started it, and somebody waits for its end."""
    return pid in _own


def adopted() -> list[procfs.Process]:
    """The children that others had started, zombies among them; none before we are a subreaper."""
    if not _adopting:
        return []
    with _lock:
        others = (pid for pid in _children() if pid not in _own)  # to read all takes time
        found = [process for pid in others if (process := procfs.read(pid)) is not None]
        return [process for process in found if process.parent == os.getpid()]


def look() -> None:
    """Called often: reap what has ended of them, and remember who stays.

    Whoever is here at two looks in a row was left behind by a process in the midst of a worker
    that lives on; those that come with a worker's death are new to us.
    """
    global _before, _settled
    living = {(p.pid, p.started) for p in _reap(adopted())}
    _before, _settled = living, living & _before


def kill_strays(mark: str) -> int:
    """SIGKILL the adopted who are new here and carry no `mark` (a name) in their environment.

    Called at a child's death: they are what it left, having emptied their environments, for what
    carries a mark is found by it. How many there were; to be repeated until 0.
    """
    return _kill(
        process
        for process in _reap(adopted())
        if (process.pid, process.started) not in _settled and not procfs.has(process.pid, mark)
    )


def end_adopted(within_s: float = 5.0) -> None:
    """SIGKILL and reap all of them."""
    deadline = time.monotonic() + within_s
    while _kill(_reap(adopted())) and time.monotonic() < deadline:
        time.sleep(0.01)


def _reap(found: Iterable[procfs.Process]) -> list[procfs.Process]:
    """Collect those that have ended; returns the others."""
    living = []
    for process in found:
        if process.state != "Z":
            living.append(process)
            continue
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return living


def _kill(processes: Iterable[procfs.Process]) -> int:
    killed = 0
    for process in processes:
        killed += 1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    return killed


def _children() -> Iterator[int]:
    """PIDs of all our children: from the kernel's list of each thread's, else from all there are.

    The list is quick, and not in every kernel (CONFIG_PROC_CHILDREN).
    """
    try:
        lists = [(task / "children").read_text() for task in _TASKS.iterdir()]
    except OSError:  # none, or a thread that ended meanwhile
        yield from procfs.all_pids()
        return
    for line in lists:
        yield from map(int, line.split())
