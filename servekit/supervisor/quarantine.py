"""The requests that take workers down: what one gateway has found out, all are told."""

from __future__ import annotations

import time
from collections.abc import Callable

from servekit.supervisor.journal import journal
from servekit.wire.messages import Quarantined

#: The oldest are forgotten beyond this many: the list goes into every Topology.
_MOST = 1000


class Quarantine:
    """Fingerprints that still hold. `clock` gives Unix time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._held: dict[str, Quarantined] = {}

    def add(self, request: Quarantined) -> None:
        if request.fingerprint not in self._held:
            for_s = round(request.until - self._clock())
            said = f"a request is refused for {for_s} s: workers have died of it again and again"
            fingerprint = request.fingerprint[:12]
            journal.tell("quarantine", said, model=request.model, fingerprint=fingerprint)
        known = self._held.pop(request.fingerprint, request)
        self._held[request.fingerprint] = max(known, request, key=lambda one: one.until)
        while len(self._held) > _MOST:
            del self._held[next(iter(self._held))]

    def expire(self) -> bool:
        """Drop those whose time is over; whether there were any."""
        now = self._clock()
        over = [one.fingerprint for one in self._held.values() if one.until <= now]
        for fingerprint in over:
            del self._held[fingerprint]
        return bool(over)

    def holding(self) -> tuple[Quarantined, ...]:
        """Those that hold now, as every Topology repeats them."""
        self.expire()
        return tuple(self._held.values())
