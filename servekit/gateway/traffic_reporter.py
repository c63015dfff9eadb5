"""Reports to the supervisor what the gateway does, once a second while it does something.

Other gateways are told sooner of the requests of a key with `max_concurrent`.

At rest no timer runs: connections stir the reporter, and the supervisor's pings, which come anyway,
bring what happened without a connection.
"""

from __future__ import annotations

import asyncio

from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.router import Router
from servekit.gateway.supervisor_channel import Channel
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.protocol.messages import KeyUsage, Traffic
from servekit.system.timers import next_tick_s

TRAFFIC_EVERY_S = 1.0
#: Time after which the other gateways are told that requests of such a key have begun or ended.
ACTIVE_EVERY_S = 0.01


class TrafficReporter:
    """Sends the traffic, the use of keys and the counts of `router`; writes the request log."""

    def __init__(self, router: Router, channel: Channel) -> None:
        self._router, self._channel = router, channel
        self._loop = asyncio.get_running_loop()
        self._last: Traffic | None = None
        self._stirred = asyncio.Event()
        self._rests = False
        self._active: set[ApiKey] = set()  # changed since their last report
        router.access.on_active = self._on_active

    def _on_active(self, caller: ApiKey) -> None:
        if self._router.sources.has_peers:
            if not self._active:
                self._loop.call_later(ACTIVE_EVERY_S, self._report_active)
            self._active.add(caller)

    def _report_active(self) -> None:
        changed, self._active = self._active, set()
        if self._channel.has_supervisor:
            uses = tuple(use for caller in changed if (use := caller.use()))
            self._channel.send(KeyUsage(self._router.name, uses))

    def stir(self) -> None:
        """Look for news within a second: something may have happened."""
        self._stirred.set()

    def look_at_rest(self) -> None:
        """Look at once if no look is due."""
        if self._rests and self._report_news():
            self.stir()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._rests = not self._stirred.is_set()
            await self._stirred.wait()
            self._rests = False
            self._stirred.clear()
            await asyncio.sleep(next_tick_s(TRAFFIC_EVERY_S, self._loop.time()))
            if self._report_news():
                self.stir()
            if RECORDER.has_pending:  # a thread that wakes up for nothing costs more than a look
                await asyncio.to_thread(RECORDER.flush)

    def _report_news(self) -> bool:
        """Send what is new; return whether more is to be expected."""
        if not self._channel.has_supervisor:
            return True  # counts accumulate until a supervisor connects
        router = self._router
        queued = {name: route.waiting for name, route in router.routes.items()}
        tokens = {name: route.generated_tokens() for name, route in router.routes.items()}
        waited = {n: round(s, 1) for n, r in router.routes.items() if (s := r.waited_s())}
        now = Traffic(router.requests, router.in_flight, queued, tokens, waited)
        if (spent := router.access.spent(router.name)) is not None:
            self._channel.send(spent)
        if is_new := now != self._last:
            self._channel.send(now)
            self._last = now
        counted = self.report_counts()
        if is_new or counted:
            router.tell_listeners()
        return is_new or spent is not None or counted or bool(now.in_flight or RECORDER.has_pending)

    def report_counts(self) -> bool:
        """Send the counts of requests since the last call; return whether there are any."""
        counted = self._router.measures.pop_counts()
        if counted is not None:
            self._channel.send(counted)
        return counted is not None
