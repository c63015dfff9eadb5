"""Detection of the parent's death in a child, which then ends with its own children."""

from __future__ import annotations

import ctypes
import os
import signal

#: Environment variable of one child and of all that it starts, whatever group they move to.
CHILD_MARK = "SERVEKIT_CHILD"
#: Environment variable, "1" for an instance or a model (`env`) whose engines may be made to fail:
#: FAIL_STEP then makes the next engine step raise. The signal ends other workers.
CHAOS = "SERVEKIT_CHAOS"
FAIL_STEP = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


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


def end_group() -> None:
    """SIGKILL this process, and its process group if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
