"""The circuit breaker with a clock, log messages and callbacks that wake the waiting replicas."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import structlog

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.breaker import Breaker, BreakerLimits, BreakerState
from servekit.supervisor.lifecycle.restart_policy import Limits, RestartPolicy

log: Any = structlog.get_logger("servekit.supervisor")

#: The longest pause before a remote endpoint that is down is asked again.
ENDPOINT_S = 10.0


class CircuitBreaker:
    """The circuit breaker that the replicas of one generation of a model share.

    `join` registers a callback that wakes a waiting replica.
    """

    def __init__(self, model: str, limits: BreakerLimits | None = None) -> None:
        self._model = model
        self._breaker = Breaker(limits)
        self._wake: dict[str, Callable[[], None]] = {}
        self._last_reason = ""
        self._tried_at = 0.0  # when a replica was started last

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def join(self, replica: str, wake: Callable[[], None]) -> None:
        self._wake[replica] = wake

    def leave(self, replica: str) -> None:
        """Unregister a replica that is ended on purpose."""
        self._wake.pop(replica, None)
        self.withdrawn(replica)

    def withdrawn(self, replica: str) -> None:
        """Record that a replica is not restarted; if it was the probe, another replica may be."""
        self._breaker.withdrawn(replica, time.monotonic())
        self._wake_all()

    def reset(self) -> None:
        """Close the breaker: an operator retries, or the deadly request is quarantined."""
        self._breaker.fruitful()
        self._wake_all()

    def held_for_s(self) -> float | None:
        """Return the seconds to wait before a start, 0 if allowed now; None: until woken."""
        now = time.monotonic()
        hold = self._breaker.hold(now)
        if hold is None:
            return 0.0
        return None if hold.until is None else hold.until - now

    def started(self, replica: str) -> None:
        was, self._tried_at = self._breaker.state, time.monotonic()
        self._breaker.started(replica)
        if self._breaker.state != was:
            log.warning("breaker_half_opened", model=self._model, probe=replica)
            journal.tell("breaker", f"half-open: {replica} is tried", model=self._model)
            self._wake_all()  # so that the others say which probe they wait for

    def died(self, replica: str, reason: str, *, fruitful: bool, permanent: bool) -> None:
        """Record the end of a replica's life."""
        if fruitful:
            self.fruitful()
        elif permanent:  # it would fail again, and is not restarted
            self.withdrawn(replica)
        else:
            self.fruitless(replica, reason)

    def fruitful(self) -> None:
        was = self._breaker.state
        self._breaker.fruitful()
        if was != "closed":
            log.info("breaker_closed", model=self._model)
            journal.tell("breaker", "closed", model=self._model)
            self._wake_all()

    def fruitless(self, replica: str, reason: str) -> None:
        was, self._last_reason = self._breaker.state, reason
        self._breaker.fruitless_end(replica, time.monotonic())
        if self._breaker.state == "open" != was:
            log.error("breaker_opened", model=self._model, reason=self.explain())
            journal.tell("breaker", f"open: {self.explain()}", model=self._model)
            self._wake_all()

    def explain(self) -> str:
        """Return "closed", or a sentence that says since when it is open, why, and until when."""
        breaker = self._breaker
        if breaker.state == "closed":
            return "closed"
        text = (
            f"crash loop: {breaker.fruitless} lives in a row ended before they had completed a "
            f"request (the last: {self._last_reason})"
        )
        tried = _clock(self._tried_at)
        if breaker.state == "half-open":
            return f"{text}; {breaker.probe} is tried alone since {tried}"
        return f"{text}; last attempt at {tried}, next attempt at {_clock(breaker.until)}"

    def _wake_all(self) -> None:
        for wake in list(self._wake.values()):
            wake()


def circuit_of(model: ModelConfig) -> CircuitBreaker:
    """Return a model's breaker; it never opens for a remote endpoint, which may just be down."""
    limits = BreakerLimits(lives=math.inf) if KINDS[model.engine].is_remote else BreakerLimits()
    return CircuitBreaker(model.name, limits)


def policy_of(model: ModelConfig) -> RestartPolicy:
    """Return a replica's restart policy; with a short back-off for a remote endpoint."""
    remote = KINDS[model.engine].is_remote
    return RestartPolicy(random.random, Limits(longest_s=ENDPOINT_S) if remote else Limits())


def _clock(at: float) -> str:
    """Return a monotonic time as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + at))
