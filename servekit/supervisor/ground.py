"""What an instance stands on: its run directory, its port, its terminal, its limits."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from servekit.supervisor import listening
from servekit.supervisor.run_dir import RunDir

_FILES = 65536


@dataclass(frozen=True, slots=True)
class Ground:
    """What an instance stands on, taken before anything is started."""

    run_dir: RunDir
    listener: socket.socket

    @classmethod
    def take(cls, run_dir: Path, host: str, port: int) -> Ground:
        """Bind the public socket and lock the run directory. Raises StartError.

        The socket first: where the port is busy no directory has been made in vain.
        """
        listener = listening.bind(host, port)
        try:
            return cls(RunDir.take(run_dir), listener)
        except BaseException:
            listener.close()
            raise


def raise_file_limit() -> None:
    """Every connection is a file; the usual soft limit of 1024 is for programs that select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_terminal() -> bool:
    """Whether we have a controlling terminal that is still there; source: tty(4)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
