"""What is proposed without a model, and when proposals pay."""

from __future__ import annotations

import random

import numpy as np
import pytest

from servekit.engines.api.speculation import StepRates, count_worthwhile, look_up


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], [8, 8, 1, 2]),  # the latest
        ([5, 1, 2, 7, 7, 1, 2, 8, 8, 5, 1, 2], [7, 7, 1, 2]),  # the longest
        ([1, 9, 3, 1], []),  # one token is too few
        ([4, 4, 4], [4, 4, 4, 4]),  # a period of one
        ([6, 5, 6, 5, 6], [5, 6, 5, 6]),
    ],
)
def test_lookup(tokens: list[int], expected: list[int]) -> None:
    assert look_up(np.array(tokens, np.int32), 3, 2, 4) == expected


def test_lookup_agrees_with_a_plain_search() -> None:
    made = random.Random(3)
    for _ in range(300):
        tokens = made.choices(range(made.choice([2, 5, 30])), k=made.randrange(60))
        longest = made.randrange(1, 5)
        shortest = made.randrange(1, longest + 1)
        assert look_up(np.array(tokens, np.int32), longest, shortest, 5) == _search_plainly(
            tokens, longest, shortest, 5
        )


def _search_plainly(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                said = list(tokens)
                while len(said) < len(tokens) + count:
                    said.append(said[end + len(said) - len(tokens)])
                return said[len(tokens) :]
    return []


def test_what_pays_depends_on_load_and_on_luck() -> None:
    def count(chance: float, rows: int, cost: float = 0.0) -> int:
        return count_worthwhile(chance, rows, 8, cost, 4)

    assert [count(0.9, rows) for rows in (1, 4, 16, 64, 128)] == [4, 4, 3, 1, 0]
    assert [count(chance, 1) for chance in (0.05, 0.2, 0.5, 1.0)] == [0, 1, 3, 4]
    assert count(0.5, 1, cost=0.3) < count(0.5, 1)
    assert count(0.9, 1, cost=2.0) == 0
    assert count_worthwhile(0.9, 1, 8, 0.0, 0) == 0


# ---------------------------------------------------------------- measured rates


def run_steps(rates: StepRates, count: int, tokens: int, took_s: float) -> list[bool]:
    """Run steps of which one with proposals brings so much; one without brings a token in 1 s."""
    proposed = []
    for _ in range(count):
        proposed.append(not rates.rest)
        if proposed[-1]:
            rates.note_step(proposed=True, tokens=tokens, took_s=took_s)
        else:
            rates.note_step(proposed=False, tokens=1, took_s=1.0)
    return proposed


def test_steps_without_proposals_come_first_and_then_the_faster_way() -> None:
    good = run_steps(StepRates(64), 2000, tokens=3, took_s=2.0)
    assert good == [False] * 16 + [True] * 1024 + [False] * 16 + [True] * 944
    rates = StepRates(64)
    bad = run_steps(rates, 20_000, tokens=3, took_s=4.0)
    assert 16 * 5 < bad.count(True) < 0.02 * len(bad), "it is tried again, ever more seldom"
    better = run_steps(rates, 8000, tokens=3, took_s=2.0)
    assert better[-1000:].count(True) > 980, "it pays again, and that is found"


def test_a_bad_moment_is_not_believed_for_ever() -> None:
    """Steps without proposals that were measured while the machine was slow are measured again."""
    rates = StepRates(64)
    for _ in range(rates.rest):
        rates.note_step(proposed=False, tokens=1, took_s=100.0)
    later = run_steps(rates, 8000, tokens=3, took_s=4.0)
    assert all(later[:1024]), "compared with that moment, proposals pay"
    assert later[1100:].count(True) < 0.05 * len(later)


def test_proposals_that_take_very_long_are_given_up_after_a_few_steps() -> None:
    tried = run_steps(StepRates(1024), 500, tokens=3, took_s=8.0)
    assert tried == [False] * 16 + [True] * 5 + [False] * 479


def test_slow_steps_now_and_then_do_not_end_proposals_that_pay() -> None:
    rates = StepRates(64)
    run_steps(rates, 16, tokens=3, took_s=2.0)
    for _ in range(90):
        run_steps(rates, 1, tokens=3, took_s=8.0)
        assert all(run_steps(rates, 10, tokens=3, took_s=2.0))
