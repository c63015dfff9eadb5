"""Arrival times of an open loop, independent of answers."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate: float, source: random.Random) -> Iterator[float]:
    """Yield arrival times in seconds from the start, `rate` per second on average, without end.

    The gaps are exponential and independent. Several such processes add up to one with the sum of
    their rates, so that clients can share a rate without coordination.
    """
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now
