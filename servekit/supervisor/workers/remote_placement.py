"""The place of a worker on another machine, where a launcher provides one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servekit.protocol.messages import FromWorker
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.lifecycle.context import SupervisorContext
from servekit.supervisor.lifecycle.launcher import AnyChild, Guest
from servekit.supervisor.lifecycle.remote_process import RemoteChild


class RemotePlacement:
    """The remote place of one worker, through all its incarnations; without a launcher, none."""

    def __init__(self, name: str, host: SupervisorContext) -> None:
        self._name = name
        self._host = host

    @property
    def is_remote(self) -> bool:
        return self._host.launcher is not None

    async def enter(self, guest: Guest) -> str:
        """Wait for a place; return the reason if there is none."""
        return "" if self._host.launcher is None else await self._host.launcher.enter(guest)

    async def spawn(
        self,
        guest: Guest,
        on_message: Callable[[FromWorker], None],
        on_line: Callable[[str], None],
    ) -> RemoteChild[FromWorker] | None:
        """Start the worker there; return None if it is to be our child. Raises OSError."""
        if self._host.launcher is None:
            return None
        return await self._host.launcher.spawn(guest, FromWorker, on_message, on_line)

    async def release(self) -> None:
        """Release the place of a worker that will not be started again."""
        if self._host.launcher is not None:
            await self._host.launcher.release(self._name)

    async def strays(self) -> str:
        """Return a sentence on memory it holds on other GPUs there; "" if none."""
        return "" if self._host.launcher is None else await self._host.launcher.strays(self._name)

    def adopts(self, child: AnyChild[Any], adapters: Adapters) -> bool:
        """Return whether the worker existed before us and has loaded its model, or is about to.

        Keeps the adapters that operators have added to it, as it reports.
        """
        if isinstance(child, RemoteChild):
            adapters.keep(child.added)
        self.remember(child, adapters)
        return isinstance(child, RemoteChild) and child.state != "empty"

    def remember(self, child: AnyChild[Any] | None, adapters: Adapters) -> None:
        """Have the worker remember the adapters that operators added, if it may outlive us."""
        if isinstance(child, RemoteChild):
            child.remember(adapters.added)

    def address(self, child: AnyChild[Any] | None) -> str:
        return child.address if isinstance(child, RemoteChild) else ""

    def where(self) -> str:
        return "" if self._host.launcher is None else self._host.launcher.where(self._name)
