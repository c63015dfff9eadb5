"""Own children of this process, as opposed to orphans that the kernel gives it.

The supervisor is a subreaper: processes that a worker starts and leaves behind become our children
instead of init's, whatever session they moved to and whatever their environment. So we find, end
and reap them. PID 1 of a container gets them in any case.

A process has one set of children, so the state is global to this module.

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
from typing import Any

from servekit.system import procfs
from servekit.system.orphan_cleanup import kill_processes

_PR_SET_CHILD_SUBREAPER = 36
_TASKS = "/proc/self/task"

_lock = threading.Lock()  # between a fork and its registration no child may be reaped
_own: set[int] = set()  # PIDs of children that other code waits for
#: Living orphans at the last look, and at both of the last two looks: PID and start time.
_before: set[tuple[int, int]] = set()
_settled: set[tuple[int, int]] = set()
#: Whether orphans may be reaped; otherwise other code may have children in this process.
_adopting = False


def become_subreaper() -> None:
    """Adopt every orphan among our descendants from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    global _adopting
    _adopting = True


def start_process(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a `subprocess.Popen`; call `forget_process` after waiting for it. Raises OSError."""
    with _lock:
        process: subprocess.Popen[bytes] = subprocess.Popen(args, **options)
        _own.add(process.pid)
    return process


class Forked:
    """A child that another process has forked for us, with the used part of Popen's interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Reap the child; return its exit code, or the negative number of its signal."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked
#: Function that forks a worker from a fork server, if there is one: environment, mark, two
#: descriptors.
Fork = Callable[[Mapping[str, str], str, int, int], Awaitable[Forked | None]]


def register_fork(pid: int) -> Forked:
    """Register a child that was forked for us, and that the caller will wait for.

    Raises ChildProcessError if it is not our child, or has ended and was reaped.
    """
    with _lock:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        _own.add(pid)
    return Forked(pid)


def forget_process(process: Process) -> None:
    """Forget a reaped child: its PID may be reused."""
    _own.discard(process.pid)


def is_own(pid: int) -> bool:
    """Return whether we started the process, and other code waits for it."""
    return pid in _own


def adopted_children() -> list[procfs.Process]:
    """Return the children that others started, zombies included; none unless we are a subreaper."""
    if not _adopting:
        return []
    with _lock:
        others = (pid for pid in _own_children() if pid not in _own)  # reading all is slow
        found = [process for pid in others if (process := procfs.read_process(pid)) is not None]
        return [process for process in found if process.parent == os.getpid()]


def reap_orphans() -> None:
    """Reap ended orphans and remember the living ones; call this often.

    Orphans seen at two looks in a row were left behind by a worker that lives on; those that appear
    at a worker's death are new.
    """
    global _before, _settled
    living = {(p.pid, p.started) for p in _reap_ended(adopted_children())}
    _before, _settled = living, living & _before


def kill_strays(mark: str) -> int:
    """SIGKILL new orphans without the variable `mark` in their environment; return how many.

    Call this at a child's death, and repeat until 0: these are processes that it left behind with
    an emptied environment; others are found by their mark.
    """
    return kill_processes(
        process
        for process in _reap_ended(adopted_children())
        if (process.pid, process.started) not in _settled
        and not procfs.has_variable(process.pid, mark)
    )


def end_adopted(within_s: float = 5.0) -> None:
    """SIGKILL and reap all orphans."""
    deadline = time.monotonic() + within_s
    while kill_processes(_reap_ended(adopted_children())) and time.monotonic() < deadline:
        time.sleep(0.01)


def _reap_ended(found: Iterable[procfs.Process]) -> list[procfs.Process]:
    """Reap those that have ended; return the others."""
    living = []
    for process in found:
        if process.state != "Z":
            living.append(process)
            continue
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return living


def _own_children() -> Iterator[int]:
    """Yield the PIDs of all our children, from the kernel's lists or else from all processes.

    The lists are quicker, but not in every kernel (CONFIG_PROC_CHILDREN).
    """
    try:
        lists = [_read_list(task) for task in os.listdir(_TASKS)]  # noqa: PTH208  (pathlib: 4 ×)
    except OSError:  # no lists, or a thread that ended meanwhile
        yield from procfs.all_pids()
        return
    for line in lists:
        yield from map(int, line.split())


def _read_list(task: str) -> bytes:
    with open(f"{_TASKS}/{task}/children", "rb", buffering=0) as file:  # noqa: PTH123  (as in procfs)
        return file.read()
