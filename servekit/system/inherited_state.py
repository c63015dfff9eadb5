"""What a process inherits from the one that started it, and cannot work with."""

from __future__ import annotations

import io
import os
import signal
import sys


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed; call this before anything is opened.

    Otherwise a socket or a lock gets its number, and a child's own stream takes its place there.
    Characters that the encoding of stdout lacks are written as "?".
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def reset_signals() -> None:
    """Let signals through that were blocked, and keep the exit codes of children.

    Where SIGCHLD is ignored the kernel reaps our children: waitpid(2).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
