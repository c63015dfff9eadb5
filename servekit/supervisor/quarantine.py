"""The requests that take workers down: what one gateway has found out, all are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from servekit.protocol.messages import Quarantined
from servekit.supervisor.event_log import journal

#: The oldest are forgotten beyond this many: the list goes into every Topology.
_MOST = 1000


class Quarantine:
    """Fingerprints and sources that still hold. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[str, str], tuple[float, Quarantined]] = {}  # with its end

    def add(self, request: Quarantined) -> None:
        at = request.model, request.fingerprint
        if at not in self._held:
            kind, colon, name = request.fingerprint.partition(":")
            what = f"the {kind} {name!r}" if colon else "a request"
            said = (
                f"{what} is refused for {request.for_s:.0f} s: workers have died of it again and"
                " again"
            )
            shown = request.fingerprint if colon else request.fingerprint[:12]
            journal.tell("quarantine", said, model=request.model, fingerprint=shown)
        until_s = self._clock() + request.for_s
        known_s, _ = self._held.pop(at, (0.0, request))
        self._held[at] = max(known_s, until_s), request
        while len(self._held) > _MOST:
            del self._held[next(iter(self._held))]

    def expire(self) -> bool:
        """Drop those whose time is over; whether there were any."""
        now_s = self._clock()
        over = [at for at, (until_s, _) in self._held.items() if until_s <= now_s]
        for at in over:
            del self._held[at]
        return bool(over)

    def lift(self, generations: Mapping[str, str]) -> None:
        """Drop those of models that are another generation by now. `generations` are by model."""
        for at, (_, one) in list(self._held.items()):
            if one.generation and generations.get(one.model, one.generation) not in (
                "",
                one.generation,
            ):
                del self._held[at]
                journal.tell("quarantine", "lifted: another model is served", model=one.model)

    def holding(self) -> tuple[Quarantined, ...]:
        """Those that hold now, as every Topology repeats them."""
        self.expire()
        now_s = self._clock()
        return tuple(replace(one, for_s=until_s - now_s) for until_s, one in self._held.values())


def aged(held: tuple[Quarantined, ...], by_s: float) -> tuple[Quarantined, ...]:
    """What still holds of them, so much later."""
    return tuple(replace(one, for_s=one.for_s - by_s) for one in held if one.for_s > by_s)


def alike(one: tuple[Quarantined, ...], other: tuple[Quarantined, ...]) -> bool:
    """Whether they differ in nothing but the time that has passed."""
    return [replace(each, for_s=0.0) for each in one] == [
        replace(each, for_s=0.0) for each in other
    ]
