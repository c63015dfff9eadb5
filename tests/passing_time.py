"""Time that passes at once, to count what an event loop does in it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Clock:
    """The time of the running event loop, which goes on to its next timer without a wait."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.wakes: list[float] = []  # the times at which timers have expired
        self._loop: Any = asyncio.get_running_loop()

    def __call__(self) -> float:
        return self.now_s

    async def pass_time(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while True:
            for _ in range(20):  # let everybody come to his next timer
                await asyncio.sleep(0)
            timers = [one.when() for one in self._loop._scheduled if not one.cancelled()]
            due_s = min(timers, default=math.inf)
            if due_s > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, due_s)
            self.wakes.append(self.now_s)


@contextmanager
def passing_time() -> Iterator[Clock]:
    """Yield the clock by which the running event loop and `time.monotonic` count in the block."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", clock)
        patch.setattr(time, "monotonic", clock)
        yield clock
