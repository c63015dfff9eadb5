"""Restarts of a child that died: its back-off, and the circuit breaker of its model.

No I/O but log lines. The random numbers of the back-off are an argument, and so is the clock of
`BreakerPolicy`; `CircuitBreaker` adds the clock.

    event                                              reaction                     state
    a fruitful life ended                              the back-off starts over     backoff
    any other life ended                               restart after back-off       backoff
    a boot failure that would repeat unchanged         no restart, until a reload   failed
    a model's lives are fruitless in a row             its breaker decides          failed

A life (one incarnation) is fruitful once it has completed a request, or has been ready for
`healthy_s`. Back-off doubles from `first_s` to `longest_s`, spread by ± `jitter` so that replicas
that died together do not come back together. Becoming ready does not reset it: a worker that
crashes a moment after it is ready is in a crash loop too.

The replicas of a model share a breaker:

    state      event                                              next state
    closed     a life ended fruitless, fewer than 5 a replica     closed
    closed     … as many as 5 for each replica, in a row          open for `first_s`
    open       its time is over, and a replica wants to start     half-open: that one is the probe
    open       its time is not over                               open: no replica starts
    half-open  any other replica wants to start                   half-open: that one waits
    half-open  the probe's life ended fruitless                   open, for twice as long
    half-open  the probe was taken away (drained, removed)        open, the next one may try at once
    any        a life became fruitful, or a fruitful one ended    closed, counters reset
    any        the request that killed them was quarantined       closed, counters reset

Only deaths count, so a client can open the breaker only by requests that kill workers. A failure
that would repeat unchanged (a missing file) is final for its replica, and not counted here.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.supervisor.event_log import journal

log: Any = structlog.get_logger("servekit.supervisor")

BreakerState = Literal["closed", "open", "half-open"]

#: The longest pause before a remote endpoint that is down is asked again.
ENDPOINT_S = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the back-off; times in seconds."""

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.2
    healthy_s: float = 30.0


class RestartPolicy:
    """The back-off of one child. `random` gives numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._random = random
        self._delays = 0  # restarts delayed in a row

    def is_fruitful(self, served: int, ready_s: float) -> bool:
        """Return whether a life with `served` requests, ready for `ready_s`, was of use."""
        return served > 0 or ready_s >= self.limits.healthy_s

    def after_s(self, *, fruitful: bool) -> float:
        """Return the delay from a life's end to the next start."""
        if fruitful:
            self._delays = 0
        # The exponent is bounded so that a year of crashes does not overflow a float.
        delay_s = self.limits.first_s * 2.0 ** min(self._delays, 32)
        self._delays += 1
        return self._spread(min(delay_s, self.limits.longest_s))

    def reset_backoff(self) -> None:
        """Reset the back-off, as when an operator asks for another try."""
        self._delays = 0

    def _spread(self, delay_s: float) -> float:
        return delay_s * (1 + self.limits.jitter * (2 * self._random() - 1))


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The limits of a breaker; times in seconds."""

    lives: float = 5  # for each replica; infinity: it never opens
    first_s: float = 10.0
    longest_s: float = 300.0


@dataclass(frozen=True, slots=True)
class StartDelay:
    """The time until which no replica may start; None until the probe has succeeded or failed."""

    until: float | None


class BreakerPolicy:
    """The circuit breaker of one model."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self._limits = limits or BreakerLimits()
        self.state: BreakerState = "closed"
        self.since = 0.0  # when it left "closed"
        self.until = 0.0  # when an open breaker lets a probe start
        self.probe = ""  # the replica that is tried while half-open
        self.fruitless = 0  # lives in a row
        self._openings = 0  # in a row

    def blocked_until(self, now: float) -> StartDelay | None:
        """Return None if a replica may start now, else until when it must wait."""
        if self.state == "open" and now < self.until:
            return StartDelay(self.until)
        return StartDelay(None) if self.state == "half-open" else None

    def started(self, replica: str) -> None:
        """Record the start of a replica that `blocked_until` has allowed."""
        if self.state == "open":
            self.state, self.probe = "half-open", replica

    def record_success(self) -> None:
        """Record a life that was of use: a request completed, or ready for long enough."""
        self.state, self.probe = "closed", ""
        self.fruitless = self._openings = 0

    def fruitless_end(self, replica: str, now: float, replicas: int = 1) -> None:
        """Record a life that ended before it was of use, of a model with so many replicas.

        Requests that kill their worker are retried, so that a few of them, asked at once, take each
        replica down some times before they are quarantined.
        """
        self.fruitless += 1
        if self.state == "closed" and self.fruitless >= self._limits.lives * max(1, replicas):
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


class CircuitBreaker:
    """The circuit breaker that the replicas of one generation of a model share.

    `join` registers a callback that wakes a waiting replica.
    """

    def __init__(self, model: str, limits: BreakerLimits | None = None) -> None:
        self._model = model
        self._breaker = BreakerPolicy(limits)
        self._wake: dict[str, Callable[[], None]] = {}
        self._last_reason = ""
        self._tried_at = 0.0  # when a replica was started last

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def join(self, replica: str, wake: Callable[[], None]) -> None:
        self._wake[replica] = wake

    def unregister(self, replica: str) -> None:
        """Unregister a replica that is ended on purpose."""
        self._wake.pop(replica, None)
        self.withdrawn(replica)

    def withdrawn(self, replica: str) -> None:
        """Record that a replica is not restarted; if it was the probe, another replica may be."""
        self._breaker.withdrawn(replica, time.monotonic())
        self._wake_all()

    def reset(self) -> None:
        """Close the breaker: an operator retries, or the deadly request is quarantined."""
        self._breaker.record_success()
        self._wake_all()

    def held_for_s(self) -> float | None:
        """Return the seconds to wait before a start, 0 if allowed now; None: until woken."""
        now = time.monotonic()
        hold = self._breaker.blocked_until(now)
        if hold is None:
            return 0.0
        return None if hold.until is None else hold.until - now

    def started(self, replica: str) -> None:
        was, self._tried_at = self._breaker.state, time.monotonic()
        self._breaker.started(replica)
        if self._breaker.state != was:
            log.warning("breaker_half_opened", model=self._model, probe=replica)
            journal.record_event("breaker", f"half-open: {replica} is tried", model=self._model)
            self._wake_all()  # so that the others say which probe they wait for

    def died(self, replica: str, reason: str, *, fruitful: bool, permanent: bool) -> None:
        """Record the end of a replica's life."""
        if fruitful:
            self.record_success()
        elif permanent:  # it would fail again, and is not restarted
            self.withdrawn(replica)
        else:
            self.record_failure(replica, reason)

    def record_success(self) -> None:
        was = self._breaker.state
        self._breaker.record_success()
        if was != "closed":
            log.info("breaker_closed", model=self._model)
            journal.record_event("breaker", "closed", model=self._model)
            self._wake_all()

    def record_failure(self, replica: str, reason: str) -> None:
        was, self._last_reason = self._breaker.state, reason
        self._breaker.fruitless_end(replica, time.monotonic(), len(self._wake))
        if self._breaker.state == "open" != was:
            log.error("breaker_opened", model=self._model, reason=self.explain())
            journal.record_event("breaker", f"open: {self.explain()}", model=self._model)
            self._wake_all()

    def explain(self) -> str:
        """Return "closed", or a sentence that says since when it is open, why, and until when."""
        breaker = self._breaker
        if breaker.state == "closed":
            return "closed"
        text = (
            f"crash loop: {breaker.fruitless} processes in a row died before completing a "
            f"request (the last: {self._last_reason})"
        )
        tried = _format_time(self._tried_at)
        if breaker.state == "half-open":
            return f"{text}; only {breaker.probe} is being tried, since {tried}"
        return f"{text}; last attempt at {tried}, next attempt at {_format_time(breaker.until)}"

    def _wake_all(self) -> None:
        for wake in list(self._wake.values()):
            wake()


def make_circuit_breaker(model: ModelConfig) -> CircuitBreaker:
    """Return a model's breaker; it never opens for a remote endpoint, which may just be down."""
    limits = BreakerLimits(lives=math.inf) if KINDS[model.engine].is_remote else BreakerLimits()
    return CircuitBreaker(model.name, limits)


def make_restart_policy(model: ModelConfig) -> RestartPolicy:
    """Return a replica's restart policy; with a short back-off for a remote endpoint."""
    remote = KINDS[model.engine].is_remote
    return RestartPolicy(random.random, Limits(longest_s=ENDPOINT_S) if remote else Limits())


def _format_time(at: float) -> str:
    """Return a monotonic time as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + at))
