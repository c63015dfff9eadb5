"""Takeover from a supervisor that was killed: its port, and gateways that keep serving."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from servekit.protocol.messages import Status
from servekit.protocol.transport.socket_handover import DRAIN, inherit_sockets
from servekit.supervisor.process.run_dir import read_record
from servekit.system.orphan_cleanup import Started, end_leftovers, read_children

log: Any = structlog.get_logger("servekit.supervisor")

#: Time for our own gateways and workers to serve before the old ones are ended in any case.
PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Takeover:
    """Sockets and processes of the previous instance.

    `previous_gateways` are connections to the gateways that serve with its topology.
    """

    listeners: tuple[socket.socket, ...]
    previous_gateways: tuple[socket.socket, ...]
    children: Sequence[Started]
    mark: str

    @classmethod
    def take_over(cls, run_dir: Path, port: int) -> Takeover | None:
        """Take over what serves on that port (0: any); None if nothing does."""
        record = read_record(run_dir)
        found = inherit_sockets(run_dir.glob("heir-*.sock"))
        if not found or record is None:
            return None
        (_, listeners), *others = found
        for _, same in others:
            for sock in same:
                sock.close()
        made = cls(
            tuple(listeners),
            tuple(previous for previous, _ in found),
            read_children(run_dir),
            record.mark,
        )
        if port in (0, listeners[0].getsockname()[1]):
            return made
        made.drain_gateways()  # another port is configured
        for sock in listeners:
            sock.close()
        return None

    def drain_gateways(self) -> None:
        """Drain the old gateways."""
        for previous in self.previous_gateways:
            with contextlib.suppress(OSError):
                previous.send(DRAIN)

    async def drain_previous(self, status: Callable[[], Status], drain_s: float) -> None:
        """Drain the old gateways once ours serve, and end whatever is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not is_serving(status()):  # noqa: ASYNC110 - looked at from outside
                    await asyncio.sleep(_LOOK_EVERY_S)
        log.info("takeover_completed", gateways=len(self.previous_gateways))
        self.drain_gateways()
        await asyncio.wait(
            [asyncio.ensure_future(_await_end(one)) for one in self.previous_gateways],
            timeout=drain_s,
        )
        self.kill_previous()

    def kill_previous(self) -> None:
        """Kill the previous instance's processes and close their sockets immediately."""
        end_leftovers(self.children, self.mark)
        for previous in self.previous_gateways:
            previous.close()


def is_serving(status: Status) -> bool:
    """Return whether our gateways serve, and our workers do or have failed."""
    ours = [gateway for gateway in status.gateways if not gateway.node]
    workers = [replica for model in status.models for replica in model.replicas]
    return (
        all(gateway.state == "ready" for gateway in ours)
        and any(worker.state == "ready" for worker in workers)
        and all(worker.state not in ("starting", "loading") for worker in workers)
    )


async def _await_end(previous: socket.socket) -> None:
    previous.setblocking(False)
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_recv(previous, 1)
