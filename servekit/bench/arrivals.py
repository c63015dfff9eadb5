"""When requests arrive that wait for nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, source: random.Random) -> Iterator[float]:
    """Times of arrival in seconds from the start, `rate` a second on average, without end.

    The gaps are exponential and know nothing of each other. Several such processes together are one
    with the sum of their rates, so that clients may share a rate without a word between them.
    """
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now
