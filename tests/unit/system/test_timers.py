"""Timers that expire together."""

from __future__ import annotations

import pytest

from servekit.system.timers import next_tick_s


@pytest.mark.parametrize("now_s", [0.0, 0.3, 41.0, 41.85, 1e6 + 0.5])
def test_timers_expire_at_the_same_moments(now_s: float) -> None:
    at_s = now_s + next_tick_s(1.0, now_s)
    assert at_s == pytest.approx(round(at_s))
    assert 0.1 < at_s - now_s <= 1.1


def test_a_timer_that_expires_too_early_does_not_expire_twice() -> None:
    assert next_tick_s(1.0, 41.999) == pytest.approx(1.001)
