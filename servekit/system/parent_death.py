"""The end of a child: with its parent, with its own children, and first where memory is short."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

#: Environment variable of one child and of all that it starts, whatever group they move to.
CHILD_MARK = "SERVEKIT_CHILD"
#: Environment variable, "1" for an instance or a model (`env`) whose engines may be made to fail:
#: FAIL_STEP then makes the next engine step raise. The signal ends other workers.
CHAOS = "SERVEKIT_CHAOS"
FAIL_STEP = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
#: Thousandths of the memory that a worker counts for more than it has when the kernel chooses.
_OOM_SCORE = 300


def die_with(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, even deep in C code.

    If the parent died before this call, no signal would come, so its PID is compared afterwards.
    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def prefer_for_oom_kill() -> None:
    """Have the kernel choose this process before the supervisor and the gateways.

    Where memory is short they may hold more of it than a worker that has just started, but only a
    worker is replaced without a request being lost. Source: proc(5), /proc/PID/oom_score_adj.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # a kernel or a container without it
        path.write_text(str(min(1000, int(path.read_text()) + _OOM_SCORE)))


def end_group() -> None:
    """SIGKILL this process, and its process group if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
