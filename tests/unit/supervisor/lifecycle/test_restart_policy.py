"""The restart policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.supervisor.lifecycle.restart_policy import Limits, RestartPolicy

LIMITS = Limits(first_s=1.0, longest_s=8.0, jitter=0.0, healthy_s=30.0)


def policy(limits: Limits = LIMITS, chance: float = 0.5) -> RestartPolicy:
    return RestartPolicy(lambda: chance, limits)


def test_backs_off_exponentially_up_to_the_longest() -> None:
    one = policy()
    assert [one.after_s(fruitful=False) for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_a_fruitful_life_starts_the_back_off_over() -> None:
    one = policy()
    lives = (False, False, False, True, False, True, True)
    assert [one.after_s(fruitful=life) for life in lives] == [1, 2, 4, 1, 2, 1, 1]


def test_an_operators_word_starts_it_over_too() -> None:
    one = policy()
    assert [one.after_s(fruitful=False) for _ in range(3)] == [1, 2, 4]
    one.reset_backoff()
    assert one.after_s(fruitful=False) == 1


@pytest.mark.parametrize(
    ("served", "ready_s", "fruitful"),
    [(0, 0.0, False), (0, 29.9, False), (0, 30.0, True), (1, 0.0, True)],
)
def test_a_life_is_fruitful_by_what_it_did_or_how_long(
    served: int, ready_s: float, fruitful: bool
) -> None:
    assert policy().is_fruitful(served, ready_s) is fruitful


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_jitter_spreads_both_ways(chance: float, expected: float) -> None:
    limits = Limits(first_s=1.0, jitter=0.2)
    assert policy(limits, chance).after_s(fruitful=False) == pytest.approx(expected)


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_whatever_happens_it_comes_back_within_bounds(lives: list[bool], chance: float) -> None:
    one = policy(Limits(first_s=0.1, longest_s=5.0, jitter=0.2), chance)
    for fruitful in lives:
        after_s = one.after_s(fruitful=fruitful)
        assert 0.08 - 1e-9 <= after_s <= (0.12 if fruitful else 6.0) + 1e-9


def test_a_year_of_crashes_overflows_nothing() -> None:
    one = policy()
    assert {one.after_s(fruitful=False) for _ in range(5000)} == {1.0, 2.0, 4.0, 8.0}
