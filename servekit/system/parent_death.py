"""How a child notices that its parent is gone, and takes its own children with it."""

from __future__ import annotations

import ctypes
import os
import signal

#: In the environment of one child and of all that it starts, whatever group they move to.
CHILD_MARK = "SERVEKIT_CHILD"
#: "1" in the environment of an instance, or of a model (`env`), whose engines may be told to fail:
#: its workers take FAIL_STEP for the order to have the next step raise. It ends other workers.
CHAOS = "SERVEKIT_CHAOS"
FAIL_STEP = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, even deep in C code.

    The parent may have died before this call, in which case no signal would come: so its pid is
    compared afterwards. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def end_group() -> None:
    """SIGKILL this process and all that it has started: its process group, if it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
