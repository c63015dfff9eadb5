"""The quarantine of requests that kill workers: found by one gateway, sent to all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from servekit.protocol.messages import Quarantined
from servekit.supervisor.event_log import journal

#: The most entries kept; the oldest are dropped, because every Topology carries the list.
_MOST = 1000


class Quarantine:
    """The fingerprints and sources that are refused now. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[float, Quarantined]] = {}  # with its end

    def add_request(self, request: Quarantined) -> None:
        at = request.model, request.fingerprint
        if at not in self._held:
            kind, colon, name = request.fingerprint.partition(":")
            what = f"the {kind} {name!r}" if colon else "a request"
            said = (
                f"{what} is refused for {request.for_s:.0f} s: workers have died of it again and"
                " again"
            )
            shown = request.fingerprint if colon else request.fingerprint[:12]
            journal.record_event("quarantine", said, model=request.model, fingerprint=shown)
        until_s = self._clock() + request.for_s
        known_s, _ = self._held.pop(at, (0.0, request))
        self._held[at] = max(known_s, until_s), request
        while len(self._held) > _MOST:
            del self._held[next(iter(self._held))]

    def expire(self) -> bool:
        """Drop the entries whose time is over; return whether there were any."""
        now_s = self._clock()
        over = [at for at, (until_s, _) in self._held.items() if until_s <= now_s]
        for at in over:
            del self._held[at]
        return bool(over)

    def lift(self, generations: Mapping[str, str]) -> None:
        """Drop the entries of models whose generation has changed. `generations` are by model."""
        for at, (_, one) in list(self._held.items()):
            if one.generation and generations.get(one.model, one.generation) not in (
                "",
                one.generation,
            ):
                del self._held[at]
                journal.record_event(
                    "quarantine", "lifted: another model is served", model=one.model
                )

    def holding(self) -> tuple[Quarantined, ...]:
        """Return the entries in force, as every Topology repeats them."""
        self.expire()
        now_s = self._clock()
        return tuple(replace(one, for_s=until_s - now_s) for until_s, one in self._held.values())


def aged(held: tuple[Quarantined, ...], by_s: float) -> tuple[Quarantined, ...]:
    """Return the entries of `held` that are still in force `by_s` seconds later."""
    return tuple(replace(one, for_s=one.for_s - by_s) for one in held if one.for_s > by_s)


def differ_in_time_only(one: tuple[Quarantined, ...], other: tuple[Quarantined, ...]) -> bool:
    """Return whether the two lists differ in the remaining time only."""
    return [replace(each, for_s=0.0) for each in one] == [
        replace(each, for_s=0.0) for each in other
    ]
