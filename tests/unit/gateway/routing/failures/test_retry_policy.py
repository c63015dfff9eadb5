"""The table of fates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway.routing.failures.retry_policy import (
    MOST_DEATHS,
    PROOF_TOKENS,
    RetryDecision,
    deaths_in_a_row,
    decide_retry,
)


def fates(attempts: list[int]) -> list[RetryDecision]:
    """What becomes of a call whose attempts each bring so many new tokens and then die."""
    found, in_a_row = [], 0
    for in_all, new_tokens in enumerate(attempts, 1):
        in_a_row = deaths_in_a_row(in_a_row, new_tokens)
        found.append(decide_retry(in_a_row, in_all))
        if found[-1] is RetryDecision.QUARANTINE:
            break
    return found


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([0, 0, 0], "again alone quarantine"),
        ([1, 1, 1], "again alone quarantine"),  # its prefill works, its first step kills
        ([500, 0, 0], "again alone quarantine"),  # it kills at a certain length
        ([0, 0, 2, 0, 0], "again alone again alone quarantine"),
        ([0, 9, 0, 9], "again again alone again"),
    ],
)
def test_the_table(attempts: list[int], expected: str) -> None:
    assert " ".join(f.value for f in fates(attempts)) == expected


def test_what_kills_slowly_is_tried_alone_in_the_end() -> None:
    found = fates([5] * 100)
    assert len(found) == MOST_DEATHS
    assert set(found[:-2]) == {RetryDecision.AGAIN}
    assert found[-2:] == [RetryDecision.LAST, RetryDecision.QUARANTINE]


@given(st.lists(st.integers(0, 4), min_size=MOST_DEATHS, max_size=MOST_DEATHS))
def test_only_three_in_a_row_or_sixteen_in_all_end_in_quarantine(attempts: list[int]) -> None:
    found = fates(attempts)
    assert found[-1] is RetryDecision.QUARANTINE, "nothing dies for ever"
    if len(found) < MOST_DEATHS:
        assert all(new < PROOF_TOKENS for new in attempts[len(found) - 2 : len(found)])
        assert found[-2] in (RetryDecision.ALONE, RetryDecision.LAST), "it has had its chance alone"
    for before, after in pairwise(found):
        assert before is not RetryDecision.QUARANTINE
        assert (before, after) != (RetryDecision.AGAIN, RetryDecision.QUARANTINE)
