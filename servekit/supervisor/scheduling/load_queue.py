"""Queue of workers that load, one at a time on each GPU.

A worker that only fetches or converts files, which may take hours, steps aside, and comes back when
it loads. It does not wait then, so two workers may load at once; a third waits for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from servekit.system.gpus import Gpu


def _silent(what: str) -> None:
    """Ignore what the worker waits for: it is loading already."""


class LoadQueue:
    """Locks of GPUs. Use only from one event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}  # by the GPU's UUID
        self._whose: dict[str, str] = {}
        self._aside: dict[str, Sequence[Gpu]] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def take(
        self, name: str, gpus: Sequence[Gpu], tell: Callable[[str], None] = _silent
    ) -> None:
        """Wait for the locks of all `gpus`; `tell` receives what the worker waits for."""
        # Always in the same order, so that two workers cannot deadlock.
        for gpu in sorted(gpus, key=lambda gpu: gpu.index):
            lock = self._locks.setdefault(gpu.uuid, asyncio.Lock())
            if lock.locked():
                tell(f"waits for {self._whose.get(gpu.uuid, 'another')} on {gpu}")
            await lock.acquire()
            self._whose[gpu.uuid] = name

    def give(self, name: str) -> None:
        """Release the worker's locks, so that the next one may load."""
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
        """Take the locks again in the background, if the worker had stepped aside."""
        if (gpus := self._aside.pop(name, None)) is not None:
            returning = asyncio.get_running_loop().create_task(self.take(name, gpus))
            self._returning[name] = returning
