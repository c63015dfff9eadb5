"""The seed of a run of the lane `fuzz`: it decides the examples, and leaves failures kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.properties import FIXED, is_property, set_seed

BY_CHANCE = settings(settings.get_profile(FIXED), derandomize=False, max_examples=10)


def draw_from_function(seed: int) -> list[int]:
    drawn: list[int] = []

    @settings(BY_CHANCE)
    @given(st.integers(0, 2**40))
    def test(number: int) -> None:
        drawn.append(number)

    set_seed(test, seed)
    test()
    return drawn


def draw_from_machine(seed: int) -> list[int]:
    drawn: list[int] = []

    class Machine(RuleBasedStateMachine):
        @rule(number=st.integers(0, 2**40))
        def draw(self, number: int) -> None:
            drawn.append(number)

    case = Machine.TestCase
    case.settings = settings(BY_CHANCE, stateful_step_count=5)
    set_seed(case.runTest, seed)
    case("runTest").runTest()
    return drawn


@pytest.mark.parametrize("draw", [draw_from_function, draw_from_machine])
def test_a_seed_decides_the_examples(draw: Callable[[int], list[int]]) -> None:
    assert draw(1) == draw(1) != draw(2)


def test_what_has_failed_is_kept_and_tried_first() -> None:
    database = InMemoryExampleDatabase()
    drawn: list[int] = []

    @settings(BY_CHANCE, database=database, max_examples=100)
    @given(st.integers(0, 2**40))
    def test(number: int) -> None:
        drawn.append(number)
        assert number < 1000

    for seed in (1, 2):
        drawn.clear()
        set_seed(test, seed)
        with pytest.raises(AssertionError):
            test()
    assert drawn[0] == 1000, "the smallest one that failed, whatever the seed"


def test_property_tests_are_told_from_others(request: pytest.FixtureRequest) -> None:
    assert not is_property(request.node)
    assert settings.get_current_profile_name() in (FIXED, "random")
