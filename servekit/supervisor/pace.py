"""The pace of the supervisor's looks: quick while something happens, seldom at rest.

At rest a look is due for what comes without an event: a process that does not answer, a model that
nobody has used for long. All that happens ends the wait for it, so that it may be long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from servekit.system.timers import next_tick_s

#: The interval of looks, and the same at rest: once nothing has happened for `REST_AFTER_S`.
TICK_S, TICK_AT_REST_S = 0.2, 4.0
REST_AFTER_S = 30.0


class Pace:
    """The time between two looks. `longest_s` returns a further limit of it at rest, in seconds."""

    def __init__(self, longest_s: Callable[[], float] = lambda: math.inf) -> None:
        self._longest_s = longest_s
        self._active_at = time.monotonic()
        self._roused = asyncio.Event()

    def is_at_rest(self) -> bool:
        """Return whether nothing has happened for a while, so that looking seldom will do."""
        return time.monotonic() - self._active_at > REST_AFTER_S

    def note_activity(self) -> None:
        """Note that something happens: the looks are quick for a while."""
        self._active_at = time.monotonic()
        self.rouse()

    def rouse(self) -> None:
        """Let the next look be soon, also at rest."""
        self._roused.set()
        self._roused = asyncio.Event()

    @property
    def interval_s(self) -> float:
        """The time between two looks by now."""
        if not self.is_at_rest():
            return TICK_S
        return max(TICK_S, min(TICK_AT_REST_S, self._longest_s()))

    async def wait_for_tick(self) -> None:
        """Return when the next look is due."""
        roused, now_s = self._roused, time.monotonic()
        if (every_s := self.interval_s) > TICK_S:
            try:
                async with asyncio.timeout(next_tick_s(every_s, now_s)):
                    await roused.wait()
            except TimeoutError:
                return
        await asyncio.sleep(next_tick_s(TICK_S, time.monotonic()))
