"""Arrivals are a Poisson process: exponential gaps that know nothing of each other."""

from __future__ import annotations

import math
import random
import statistics
from itertools import islice, pairwise

import pytest

from servekit.bench.arrivals import poisson_arrivals


def arrivals(rate: float, count: int, seed: str = "1") -> list[float]:
    return list(islice(poisson_arrivals(rate, random.Random(seed)), count))


def test_gaps_are_exponential() -> None:
    times = arrivals(50.0, 20_000)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.03)  # as its mean
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = -math.log(1 - share) / 50.0
        assert sorted(gaps)[int(share * len(gaps))] == pytest.approx(expected, rel=0.08)


def test_gaps_are_independent() -> None:
    gaps = [b - a for a, b in pairwise(arrivals(1.0, 20_000))]
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.03


def test_several_clients_make_one_process_of_the_whole_rate() -> None:
    times = sorted(t for n in range(4) for t in arrivals(25.0, 5_000, str(n)) if t < 150)
    counts = [sum(second <= t < second + 1 for t in times) for second in range(150)]
    assert statistics.mean(counts) == pytest.approx(100, rel=0.03)
    assert statistics.variance(counts) == pytest.approx(100, rel=0.35)  # Poisson's is its mean
