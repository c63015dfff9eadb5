"""How fast a model works its queue off, for Retry-After. The clock is the caller's."""

from __future__ import annotations

from math import exp

#: Completions count less by a factor of e for every so many seconds since.
MEMORY_S = 10.0
#: What is answered before anything has been completed.
UNKNOWN_S = 5.0
LEAST_S, MOST_S = 1.0, 120.0


class ThroughputEstimator:
    """An exponentially weighted rate of completions, over the time in which there was work.

    Time without work does not count: a model that nobody asked for an hour is not a slow one.
    """

    __slots__ = ("_at", "_busy_s", "_weight")

    def __init__(self) -> None:
        self._at = 0.0
        self._weight = 0.0  # completions, each worth what is left of it
        self._busy_s = 0.0  # as far as MEMORY_S reaches: how much time they came from

    @property
    def at(self) -> float:
        """When work last came after a time without, or was completed."""
        return self._at

    def resume(self, now: float) -> None:
        """Work has come after a time without."""
        self._at = now

    def completed(self, now: float) -> None:
        self._pass(now)
        self._weight += 1.0

    def rate(self, now: float) -> float:
        """Completions per second; 0 if there were none."""
        self._pass(now)
        return self._weight / self._busy_s if self._busy_s else 0.0

    def wait_s(self, ahead: int, now: float) -> float:
        """How long `ahead` requests will take, within LEAST_S and MOST_S; also while it works."""
        rate = self.rate(now)
        if not rate:
            return UNKNOWN_S
        return min(max(ahead / rate, LEAST_S), MOST_S)

    def _pass(self, now: float) -> None:
        gone_s = max(0.0, now - self._at)
        left = exp(-gone_s / MEMORY_S)
        self._weight *= left
        # the integral of the same weights over that time, so that a constant rate reads true
        self._busy_s = self._busy_s * left + MEMORY_S * (1.0 - left)
        self._at = now
