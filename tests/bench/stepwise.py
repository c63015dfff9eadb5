"""An engine that is one step ahead of whoever reads, and no more: what a gateway can do at most
while each token has a write of its own.

A worker that steps by the clock is either too slow for its gateway or too fast, and tokens that
have come together share a write. This one steps as soon as all gateways have read the step before,
which they are writing to their clients meanwhile. It looks whether they have in every turn of its
event loop, and so takes a core for itself.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.engines.api.base import Emit, Job
from servekit.engines.echo.engine import EchoEngine
from servekit.protocol.messages import WorkerSpec

NAME = "stepwise"
#: Turns of the loop after which a step has been written: it is gathered, sent, written.
_WRITTEN_AFTER = 3
_ROOT = Path(__file__).parents[2]


def installed(folder: Path) -> dict[str, str]:
    """Bring the engine as a package in `folder` would; the environment that finds it."""
    info = folder / f"{NAME}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[servekit.engines]\n{NAME} = {__name__}:Stepwise\n")
    paths = (str(folder), str(_ROOT), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def model(name: str) -> dict[str, Any]:
    """A model of it, for the configuration file."""
    options = {"slots": 512, "max_context": 100_000, "step_s": 1.0}
    return {
        "name": name,
        "engine": NAME,
        "path": name,
        "device": "cpu",
        "replicas": 1,
        "options": options,
    }


class Stepwise(EchoEngine):
    """`step_s` is not waited for; it only says that a step is one token."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._links: list[int] = []
        self._turns = False
        self._unwritten = 0

    def start(self, emit: Emit) -> None:
        super().start(emit)
        self._event_loop = asyncio.get_running_loop()

    def _loop(self) -> None:
        """It steps on the event loop, not in a thread."""

    def submit(self, job: Job) -> None:
        super().submit(job)
        if not self._turns:
            self._turns = True
            self._links = list(_links())
            self._event_loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turns = bool(self._runs)
        if not self._turns:
            return
        if self._unwritten:
            self._unwritten -= 1
        elif not any(map(_unread_bytes, self._links)):
            self._run_step()
            self._unwritten = _WRITTEN_AFTER
        self._event_loop.call_soon(self._turn)


def _links() -> Iterator[int]:
    """This process's connected Unix sockets."""
    for name in list(Path("/proc/self/fd").iterdir()):
        number = int(name.name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    one.getpeername()
                    if one.family == socket.AF_UNIX and one.type == socket.SOCK_STREAM:
                        yield number


def _unread_bytes(link: int) -> int:
    """What was written there and not yet read at the other end. Source: unix_ioctl, SIOCOUTQ."""
    found = array.array("i", [0])
    fcntl.ioctl(link, termios.TIOCOUTQ, found)
    return found[0]
