"""Periodic timers of all processes that expire together, so that an idle machine sleeps longer.

Source: CLOCK_MONOTONIC, which event loops count by, is one clock for all processes.
"""

from __future__ import annotations


def next_tick_s(period_s: float, now_s: float) -> float:
    """Return the time from `now_s` of an event loop's clock to the next multiple of a period, s.

    A timer may expire a little too early: the tick that is about to come does not count.
    """
    left_s = period_s - now_s % period_s
    return left_s if left_s > period_s / 10 else left_s + period_s
