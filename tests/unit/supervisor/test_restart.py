"""The restart policy, with a clock that is only a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.supervisor.restart import Decision, Limits, RestartPolicy

LIMITS = Limits(first_s=1.0, longest_s=8.0, jitter=0.0, healthy_s=30.0, boot_failures=3)


def policy(limits: Limits = LIMITS, chance: float = 0.5) -> RestartPolicy:
    return RestartPolicy(lambda: chance, limits)


def crash(of: RestartPolicy, served_s: float) -> Decision:
    of.came_up(100.0)
    return of.crashed(100.0 + served_s)


def test_backs_off_exponentially_up_to_the_longest() -> None:
    one = policy()
    assert [crash(one, 1.0).after_s for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_health_starts_the_back_off_over() -> None:
    one = policy()
    assert [crash(one, t).after_s for t in (1, 1, 1, 30, 29.9)] == [1, 2, 4, 1, 2]


def test_coming_up_is_not_yet_health() -> None:
    one = policy()
    crash(one, 0.0)
    one.came_up(500.0)
    assert one.crashed(500.1).after_s == 2.0


def test_a_permanent_boot_failure_is_final() -> None:
    assert policy().boot_failed(permanent=True) == Decision("failed", None)


def test_boot_failures_in_a_row_end_in_probes() -> None:
    one = policy()
    decisions = [one.boot_failed(permanent=False) for _ in range(4)]
    assert [d.state for d in decisions] == ["backoff", "backoff", "failed", "failed"]
    assert [d.after_s for d in decisions] == [1.0, 2.0, 60.0, 60.0]


def test_coming_up_forgets_boot_failures_but_not_crashes() -> None:
    one = policy()
    one.boot_failed(permanent=False)
    one.boot_failed(permanent=False)
    assert crash(one, 1.0) == Decision("backoff", 4.0)
    assert one.boot_failed(permanent=False).state == "backoff"


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_jitter_spreads_both_ways(chance: float, expected: float) -> None:
    limits = Limits(first_s=1.0, jitter=0.2)
    assert crash(policy(limits, chance), 0.0).after_s == pytest.approx(expected)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["came_up", "crashed", "boot"]), st.floats(0, 100)), max_size=60
)


@given(EVENTS, st.floats(0, 1))
def test_whatever_happens_it_comes_back_within_bounds(
    events: list[tuple[str, float]], chance: float
) -> None:
    limits = Limits(first_s=0.1, longest_s=5.0, jitter=0.2, boot_failures=5, probe_s=60.0)
    one, now, boots = policy(limits, chance), 0.0, 0
    for event, passed_s in events:
        now += passed_s
        if event == "came_up":
            one.came_up(now)
            boots = 0
            continue
        boots += event == "boot"
        decision = one.crashed(now) if event == "crashed" else one.boot_failed(permanent=False)
        assert decision.after_s is not None
        probing = event == "boot" and boots >= 5
        assert (decision.state == "failed") == probing
        low, high = (48.0, 72.0) if probing else (0.08, 6.0)
        assert low <= decision.after_s <= high + 1e-9


def test_a_year_of_crashes_overflows_nothing() -> None:
    one = policy()
    assert {crash(one, 0.0).after_s for _ in range(5000)} == {1.0, 2.0, 4.0, 8.0}
