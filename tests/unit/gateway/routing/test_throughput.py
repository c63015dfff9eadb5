"""The rate at which a queue drains, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway.routing.throughput import LEAST_S, MOST_S, UNKNOWN_S, ThroughputEstimator


def steady(rate: float, for_s: float, start: float = 1000.0) -> tuple[ThroughputEstimator, float]:
    pace = ThroughputEstimator()
    pace.resume(start)
    count = int(rate * for_s)
    for n in range(1, count + 1):
        pace.completed(start + n / rate)
    return pace, start + count / rate


@pytest.mark.parametrize("rate", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("for_s", [4.0, 100.0])
def test_a_constant_rate_reads_true_from_the_beginning(rate: float, for_s: float) -> None:
    pace, now = steady(rate, for_s)
    assert pace.rate(now) == pytest.approx(rate, rel=0.35 if rate * for_s < 10 else 0.15)


def test_retry_after_is_the_queue_over_the_rate_within_its_bounds() -> None:
    pace, now = steady(10.0, 60.0)
    assert pace.wait_s(300, now) == pytest.approx(30.0, rel=0.1)
    assert pace.wait_s(1, now) == LEAST_S
    assert pace.wait_s(10**6, now) == MOST_S
    assert ThroughputEstimator().wait_s(10, now) == UNKNOWN_S


def test_an_hour_without_work_does_not_count_but_a_stall_does() -> None:
    idle, now = steady(10.0, 60.0)
    idle.resume(now + 3600)
    assert idle.wait_s(300, now + 3600) == pytest.approx(30.0, rel=0.1)
    stalled, now = steady(10.0, 60.0)
    assert stalled.wait_s(300, now + 60) == MOST_S


@given(st.lists(st.floats(0, 1e4), max_size=30), st.integers(0, 10**9))
def test_it_is_within_its_bounds_whatever_happens(gaps: list[float], ahead: int) -> None:
    pace, now = ThroughputEstimator(), 0.0
    for gap in gaps:
        now += gap
        pace.completed(now)
        assert LEAST_S <= pace.wait_s(ahead, now) <= MOST_S
