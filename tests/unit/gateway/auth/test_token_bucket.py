"""Token buckets, on a clock of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway.auth.token_bucket import Bucket


def test_a_minutes_worth_at_once_and_then_at_its_rate() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(100.0) == 0
    assert bucket.level(101.5) == pytest.approx(1.5)
    assert bucket.wait_s(3.0, 101.5) == pytest.approx(1.5)
    assert bucket.level(1000.0) == 60


def test_debts_are_paid_first() -> None:
    bucket = Bucket(600, 0.0)
    bucket.take(1800, 0.0)
    assert bucket.level(0.0) == -1200
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(120.1)
    assert bucket.level(120.0) == pytest.approx(0.0)


def test_another_limit_forgives_nothing_and_takes_nothing() -> None:
    bucket = Bucket(10, 0.0)
    bucket.take(10, 0.0)
    bucket.become(100, 0.0)
    assert (bucket.limit, bucket.level(0.0)) == (100, 90)
    bucket.become(5, 0.0)
    assert bucket.level(0.0) == -5


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40),
)
def test_never_more_than_a_burst_and_the_rate(limit: int, steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = Bucket(limit, 0.0), 0.0, 0
    for pause_s, wanted in steps:
        now_s += pause_s
        for _ in range(wanted):
            if bucket.level(now_s) >= 1:
                bucket.take(1, now_s)
                taken += 1
    assert taken <= limit + limit * now_s / 60 + 1e-6
