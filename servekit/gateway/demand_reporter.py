"""Reports to the supervisor how much each swappable model is in use at this gateway.

The report costs a request for a loaded model nothing: the counts of its queue are read ten times a
second while there are requests, and only the first request that has to wait is reported at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from servekit.errors import DeadlineExceeded, QueueFull
from servekit.gateway.routing.model_queue import ModelQueue
from servekit.protocol.residency import KeepAlive, ModelDemand

EVERY_S = 0.1


class DemandReporter:
    """Watches the queues of swappable models; `tell` sends to the supervisor."""

    def __init__(self, tell: Callable[[ModelDemand | KeepAlive], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._watched: list[ModelQueue] = []
        self._told: dict[str, tuple[int, int, float]] = {}  # waiting, running, last used
        self._tiers: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    def watch_models(self, routes: Iterable[ModelQueue]) -> None:
        """Watch these models from now on, and note their residency.

        The demand for a model whose residency tier has changed is reported again, because the last
        report may count requests that have been answered since.
        """
        self._watched = []
        for route in routes:
            residence = route.status.residence
            route.on_wait = None if residence is None else self._on_wait
            if residence is None:
                continue
            self._watched.append(route)
            if self._tiers.get(route.status.name) != residence.tier:
                self._tiers[route.status.name] = residence.tier
                self._told.pop(route.status.name, None)
                self._report(route)
        self.resume()
        self._news.set()
        self._news = asyncio.Event()

    def resume(self) -> None:
        """Report periodically until no request is left. Call it when a first one has come."""
        if self._watched and self._timer is None:
            self._timer = self._loop.call_later(EVERY_S, self._report_demand)

    def report_keep_alive(
        self, route: ModelQueue, stay_s: float | None, *, loads: bool = False
    ) -> None:
        """Report a client's keep-alive for a model; `loads` also asks to load the model now."""
        if route.status.residence is not None:
            self._tell(KeepAlive(route.base.status.name, stay_s, loads))

    async def until_known(self, route: ModelQueue, timeout_s: float | None = None) -> bool:
        """Have a model loaded if its `ModelInfo` is still unknown, and wait for that.

        The info says how the model calls tools and writes reasoning; it is missing only before the
        first load. Return False if it was known. Raises ModelUnavailable, QueueFull,
        DeadlineExceeded.
        """
        base = route.base
        if base.status.info is not None or base.status.residence is None:
            return False
        route.check_available()
        if base.expected >= base.queue.limit:
            raise QueueFull(f"{base.expected} requests wait for {base.status.name!r} already")
        limit_s = base.status.timeout_s if timeout_s is None else timeout_s
        base.expected += 1
        self._on_wait(base)
        try:
            async with asyncio.timeout(min(limit_s, base.status.timeout_s)):
                while base.status.info is None and not (base.is_permanently_down or base.removed):
                    await self._news.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"not done within {limit_s:g} s; it was waiting") from None
        finally:
            base.expected -= 1
        if base.status.info is None:
            raise base.unavailable()
        return True

    def _on_wait(self, route: ModelQueue) -> None:
        """Report the first waiting request at once, not with the next periodic report."""
        self.resume()
        if not self._told.get(route.status.name, (0, 0, 0.0))[0]:
            self._report(route)

    def _report_demand(self) -> None:
        self._timer = None
        for route in self._watched:
            self._report(route)
        if any(route.in_flight or route.expected for route in self._watched):
            self.resume()

    def _report(self, route: ModelQueue) -> None:
        name = route.status.name
        now = self._loop.time()
        waiting, running = route.waiting + route.expected, route.running
        used_at = now if waiting or running else route.pace.at
        use = waiting, running, 0.0 if waiting or running else used_at
        if use != self._told.get(name):
            self._told[name] = use
            self._tell(ModelDemand(name, waiting, running, now - used_at))
