"""What an instance stands on: its run directory, its port, its terminal, its limits."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from servekit.ray.takeover import Takeover
from servekit.supervisor.process.run_dir import RunDir, default_paths
from servekit.system import sockets
from servekit.system.rlimits import raise_file_limit


@dataclass(frozen=True, slots=True)
class StartupResources:
    """What an instance stands on, taken before anything is started."""

    run_dir: RunDir
    #: The public one first, and then the one for older clients, if there is one.
    listeners: tuple[socket.socket, ...]
    #: What serves on of a supervisor that was killed.
    heritage: Takeover | None = None

    @classmethod
    def take(
        cls,
        run_dir: Path | None,
        host: str,
        port: int,
        legacy_port: int | None = None,
        *,
        inherits: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> StartupResources:
        """Bind the sockets and lock the run directory, with room for files. Raises StartError.

        Without `run_dir` the first default that can be used, by `environ`.
        `inherits`: what outlives a supervisor of that run directory is to serve on.

        The sockets first: where a port is busy no directory has been made in vain.
        """
        raise_file_limit()
        heir_of = run_dir or default_paths(environ)[0]
        heritage = Takeover.of(heir_of, port) if inherits else None
        if heritage is not None:
            return cls(RunDir.take(heir_of, sweep=False), heritage.listeners, heritage)
        with contextlib.ExitStack() as taken:
            listeners = [taken.enter_context(sockets.bind(host, port))]
            if legacy_port is not None:
                legacy = sockets.bind(host, legacy_port, setting="server.legacy_port")
                listeners.append(taken.enter_context(legacy))
            taken_dir = RunDir.take_default(environ) if run_dir is None else RunDir.take(run_dir)
            ground = cls(taken_dir, tuple(listeners))
            taken.pop_all()
        return ground


def has_terminal() -> bool:
    """Whether we have a controlling terminal that is still there; source: tty(4)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
