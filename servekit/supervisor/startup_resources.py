"""The resources that an instance takes before it starts anything: run directory, ports, limits."""

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
    """The resources of an instance, taken before any process is started."""

    run_dir: RunDir
    #: The public listener first, then the listener for older clients, if there is one.
    listeners: tuple[socket.socket, ...]
    #: The gateways and workers that outlived a supervisor that was killed.
    takeover: Takeover | None = None

    @classmethod
    def acquire(
        cls,
        run_dir: Path | None,
        host: str,
        port: int,
        legacy_port: int | None = None,
        *,
        inherits: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> StartupResources:
        """Bind the sockets and lock the run directory; raise the file limit. Raises StartError.

        Without `run_dir`, takes the first usable default of `environ`. With `inherits`, takes over
        the processes that outlived the last supervisor of that run directory.

        The sockets come first: if a port is busy, no directory has been created in vain.
        """
        raise_file_limit()
        heir_of = run_dir or default_paths(environ)[0]
        takeover = Takeover.take_over(heir_of, port) if inherits else None
        if takeover is not None:
            return cls(RunDir.claim(heir_of, sweep=False), takeover.listeners, takeover)
        with contextlib.ExitStack() as taken:
            listeners = [taken.enter_context(sockets.bind_listener(host, port))]
            if legacy_port is not None:
                legacy = sockets.bind_listener(host, legacy_port, setting="server.legacy_port")
                listeners.append(taken.enter_context(legacy))
            taken_dir = RunDir.take_default(environ) if run_dir is None else RunDir.claim(run_dir)
            resources = cls(taken_dir, tuple(listeners))
            taken.pop_all()
        return resources


def has_terminal() -> bool:
    """Return whether we have a controlling terminal that is still there; source: tty(4)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
