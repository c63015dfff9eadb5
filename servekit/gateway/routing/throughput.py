"""Estimate of a model's throughput, for Retry-After. Callers pass the time."""

from __future__ import annotations

from math import exp

#: Time constant by which the weight of past completions decays.
MEMORY_S = 10.0
#: Answer before anything has been completed.
UNKNOWN_S = 5.0
LEAST_S, MOST_S = 1.0, 120.0


class ThroughputEstimator:
    """An exponentially weighted rate of completions over busy time.

    Idle time does not count: a model without requests is not a slow one.
    """

    __slots__ = ("_at", "_busy_s", "_weight")

    def __init__(self) -> None:
        self._at = 0.0
        self._weight = 0.0  # decayed number of completions
        self._busy_s = 0.0  # decayed busy time of these completions

    @property
    def at(self) -> float:
        """Return the time up to which the estimate is updated: of the last work, or of a query."""
        return self._at

    def resume(self, now: float) -> None:
        """Begin busy time, because work has come after a time without."""
        self._at = now

    def completed(self, now: float) -> None:
        if now != self._at:  # the event loop's clock stands still for a millisecond
            self._pass(now)
        self._weight += 1.0

    def rate(self, now: float) -> float:
        """Return completions per second; 0 if there were none."""
        self._pass(now)
        return self._weight / self._busy_s if self._busy_s else 0.0

    def wait_s(self, ahead: int, now: float) -> float:
        """Estimate how long `ahead` requests will take, within LEAST_S and MOST_S."""
        rate = self.rate(now)
        if not rate:
            return UNKNOWN_S
        return min(max(ahead / rate, LEAST_S), MOST_S)

    def _pass(self, now: float) -> None:
        gone_s = max(0.0, now - self._at)
        left = exp(-gone_s / MEMORY_S)
        self._weight *= left
        # the integral of the same weights over that time, so that a constant rate is exact
        self._busy_s = self._busy_s * left + MEMORY_S * (1.0 - left)
        self._at = now
