"""Deadlines of all calls with a single timer, because one timer per call would cost too much."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection

from servekit.gateway.routing.request import InflightRequest

#: Greatest delay of an expiry; it bounds how often all calls are searched.
GRAIN_S = 0.01


class Deadlines:
    """The deadlines of the open `calls`; `expire` is called with each call that exceeds `limit_s`.

    The owner maintains the collection `calls`; a call that ends in time needs no work here.
    """

    def __init__(
        self, calls: Collection[InflightRequest], expire: Callable[[InflightRequest], None]
    ) -> None:
        self._calls = calls
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf  # when the timer fires

    def watch(self, call: InflightRequest) -> None:
        """Watch the deadline of a call, which the owner has added to `calls`."""
        due_s = call.created_s + call.limit_s
        if due_s < self._due_s:
            self._arm(due_s)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        wait_s = max(GRAIN_S, due_s - time.monotonic())
        self._timer = self._loop.call_later(wait_s, self._expire_due)

    def _expire_due(self) -> None:
        self._timer, self._due_s = None, math.inf
        now = time.monotonic()
        for call in [call for call in self._calls if call.created_s + call.limit_s <= now]:
            if not call.done:  # one call's expiry may end another
                self._expire(call)
        if self._calls:
            self._arm(min(call.created_s + call.limit_s for call in self._calls))
