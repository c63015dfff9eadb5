"""The circuit breaker of a crash-looping model: a pure state machine; the clock is an argument.

    state      event                                              next state
    closed     a life ended fruitless, 1st to 4th in a row        closed
    closed     … the 5th in a row, of any of its replicas         open for `first_s`
    open       its time is over, and a replica wants to start     half-open: that one is the probe
    open       its time is not over                               open: no replica starts
    half-open  any other replica wants to start                   half-open: that one waits
    half-open  the probe's life ended fruitless                   open, for twice as long
    half-open  the probe was taken away (drained, removed)        open, the next one may try at once
    any        a life became fruitful, or a fruitful one ended    closed, counters reset
    any        the request that killed them was quarantined       closed, counters reset

A life (one incarnation) is fruitful once it has completed a request, or has been ready for a while.
Only deaths count, so a client can open the breaker only by requests that kill workers. A failure
that would repeat unchanged (a missing file) is final for its replica, and not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The limits of a breaker; times in seconds."""

    lives: float = 5  # infinity: it never opens
    first_s: float = 10.0
    longest_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Hold:
    """The time until which no replica may start; None until the probe has succeeded or failed."""

    until: float | None


class Breaker:
    """The circuit breaker of one model."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self.state: BreakerState = "closed"
        self.since = 0.0  # when it left "closed"
        self.until = 0.0  # when an open breaker lets a probe start
        self.probe = ""  # the replica that is tried while half-open
        self.fruitless = 0  # lives in a row
        self._openings = 0  # in a row

    def hold(self, now: float) -> Hold | None:
        """Return None if a replica may start now, else until when it must wait."""
        if self.state == "open" and now < self.until:
            return Hold(self.until)
        return Hold(None) if self.state == "half-open" else None

    def started(self, replica: str) -> None:
        """Record the start of a replica that `hold` has allowed."""
        if self.state == "open":
            self.state, self.probe = "half-open", replica

    def fruitful(self) -> None:
        """Record a life that was of use: a request completed, or ready for long enough."""
        self.state, self.probe = "closed", ""
        self.fruitless = self._openings = 0

    def fruitless_end(self, replica: str, now: float) -> None:
        """Record a life that ended before it was of use."""
        self.fruitless += 1
        if self.state == "closed" and self.fruitless >= self._limits.lives:
            self.since = now
            self._open(now)
        elif self.state == "half-open" and replica == self.probe:
            self._open(now)

    def withdrawn(self, replica: str, now: float) -> None:
        """Record that a replica is ended on purpose, which says nothing about the model."""
        if self.state == "half-open" and replica == self.probe:
            self.state, self.probe, self.until = "open", "", now

    def _open(self, now: float) -> None:
        # The exponent is bounded so that a year of failures does not overflow a float.
        cooldown_s = self._limits.first_s * 2.0 ** min(self._openings, 32)
        self._openings += 1
        self.state, self.probe = "open", ""
        self.until = now + min(cooldown_s, self._limits.longest_s)
