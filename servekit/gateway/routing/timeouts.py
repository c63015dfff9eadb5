"""One timer for the deadlines of all calls: a timer each would cost more than most of them do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection

from servekit.gateway.routing.request import InflightRequest

#: A deadline is met at most this much late. It bounds how often all calls are looked through.
GRAIN_S = 0.01


class Deadlines:
    """Calls `expire` with each of the open `calls` once it is older than its `limit_s`.

    `calls` is the owner's collection, and the owner's to keep; nothing is to be done for a call
    that ends in time, and nearly all do.
    """

    def __init__(
        self, calls: Collection[InflightRequest], expire: Callable[[InflightRequest], None]
    ) -> None:
        self._calls = calls
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when the timer fires

    def keep(self, call: InflightRequest) -> None:
        """Hold a call to its limit from now on; it is among `calls`."""
        due_s = call.created_s + call.limit_s
        if due_s < self._due_s:
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        wait_s = max(GRAIN_S, due_s - time.monotonic())
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._timer, self._due_s = None, math.inf
        now = time.monotonic()
        for call in [call for call in self._calls if call.created_s + call.limit_s <= now]:
            if not call.done:  # the end of one may bring about another's
                self._expire(call)
        if self._calls:
            self._arm(min(call.created_s + call.limit_s for call in self._calls))
