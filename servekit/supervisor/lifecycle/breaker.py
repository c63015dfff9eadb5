"""When a model that only dies is left alone: a pure state machine; the clock is an argument.

    state      what happened                                      then
    closed     a fruitless life ended, 1st to 4th in a row        closed
    closed     … the 5th in a row, whatever replicas they were    open for `first_s`
    open       its time is over, and a replica wants to start     half-open: that one is the probe
    open       its time is not over                               nobody is started
    half-open  any other replica wants to start                   it waits
    half-open  the probe's life ended fruitless                   open, for twice as long
    half-open  the probe was taken away (drained, removed)        open, the next one may try at once
    any        a life proved fruitful, or a fruitful one ended    closed, all is forgotten
    any        a request that killed them was quarantined         closed, all is forgotten

A life is fruitful once it has completed a request, or has been ready for a while. Only deaths
count, so no client can open it by what it sends, unless that kills workers; and a failure that
would be the same again (a missing file) is final for its replica, and not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Times in seconds."""

    lives: float = 5  # infinity: it never opens
    first_s: float = 10.0
    longest_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Hold:
    """Why no replica may start now. `until` None: until the probe has shown something."""

    until: float | None


class Breaker:
    """The record of one model's lives."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self.state: BreakerState = "closed"
        self.since = 0.0  # when it left "closed"
        self.until = 0.0  # when an open one lets a probe start
        self.probe = ""  # the replica that is tried while half-open
        self.fruitless = 0  # lives in a row
        self._openings = 0  # in a row

    def hold(self, now: float) -> Hold | None:
        """None if a replica may start now."""
        if self.state == "open" and now < self.until:
            return Hold(self.until)
        return Hold(None) if self.state == "half-open" else None

    def started(self, replica: str) -> None:
        """A replica was started, after `hold` said that it may be."""
        if self.state == "open":
            self.state, self.probe = "half-open", replica

    def fruitful(self) -> None:
        """A life has completed a request or stayed ready, or one that had has ended."""
        self.state, self.probe = "closed", ""
        self.fruitless = self._openings = 0

    def fruitless_end(self, replica: str, now: float) -> None:
        """A life has ended before it was of any use."""
        self.fruitless += 1
        if self.state == "closed" and self.fruitless >= self._limits.lives:
            self.since = now
            self._open(now)
        elif self.state == "half-open" and replica == self.probe:
            self._open(now)

    def withdrawn(self, replica: str, now: float) -> None:
        """A replica is ended on purpose, which says nothing about the model."""
        if self.state == "half-open" and replica == self.probe:
            self.state, self.probe, self.until = "open", "", now

    def _open(self, now: float) -> None:
        # The exponent is bounded so that a year of failures does not overflow a float.
        cooldown_s = self._limits.first_s * 2.0 ** min(self._openings, 32)
        self._openings += 1
        self.state, self.probe = "open", ""
        self.until = now + min(cooldown_s, self._limits.longest_s)
