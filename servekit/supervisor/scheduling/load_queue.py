"""Whose turn it is to load, on each GPU.

Who only fetches or converts files, which may take hours, steps aside, and comes back when it loads:
it cannot be held up then, so two may load at once after all; a third waits for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from servekit.system.gpus import Gpu


def _silent(what: str) -> None:
    """Who loads already does not wait for its turn."""


class LoadQueue:
    """On one event loop, and no other thread."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}  # by the GPU's UUID
        self._whose: dict[str, str] = {}
        self._aside: dict[str, Sequence[Gpu]] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def take(
        self, name: str, gpus: Sequence[Gpu], tell: Callable[[str], None] = _silent
    ) -> None:
        """Return when it is its turn on all of them; `tell` is told whom it waits for."""
        # All in one order: two that want the same GPUs never wait for each other.
        for gpu in sorted(gpus, key=lambda gpu: gpu.index):
            lock = self._locks.setdefault(gpu.uuid, asyncio.Lock())
            if lock.locked():
                tell(f"waits for {self._whose.get(gpu.uuid, 'another')} on {gpu}")
            await lock.acquire()
            self._whose[gpu.uuid] = name

    def give(self, name: str) -> None:
        """The next one may load."""
        self._aside.pop(name, None)
        if (returning := self._returning.pop(name, None)) is not None:
            returning.cancel()
        for uuid, who in list(self._whose.items()):
            if who == name:
                del self._whose[uuid]
                self._locks[uuid].release()

    def step_aside(self, name: str, gpus: Sequence[Gpu]) -> None:
        if name not in self._aside:
            self.give(name)
            self._aside[name] = gpus

    def step_back(self, name: str) -> None:
        """If it had stepped aside, it is its turn again as soon as can be."""
        if (gpus := self._aside.pop(name, None)) is not None:
            returning = asyncio.get_running_loop().create_task(self.take(name, gpus))
            self._returning[name] = returning
