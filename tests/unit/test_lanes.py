"""The choice of tests: what a whole run is told when tests got lost or were skipped."""

from __future__ import annotations

from pathlib import Path

from tests.lanes import LANES, complaints, describe_times

PAGE = Path(__file__).parents[2] / "servekit/docs/pages/project/contributing.md"


def test_a_whole_run_has_nothing_to_complain_of() -> None:
    assert complaints(100, {"no GPU": 3}, at_least=100, skips=3) == []


def test_tests_that_got_lost_are_noticed() -> None:
    [said] = complaints(99, {}, at_least=100, skips=0)
    assert said.startswith("99 tests ran, of at least 100")


def test_more_skips_than_allowed_are_told_by_reason() -> None:
    [said] = complaints(100, {"no GPU": 1, "no Chromium": 3}, at_least=100, skips=3)
    assert said.startswith("4 tests were skipped, of at most 3")
    assert said.endswith("3 x no Chromium; 1 x no GPU")


def test_the_longest_lane_is_told_first() -> None:
    told = describe_times({"ordinary": 30.0, "waits": 90.0})
    assert told == "minutes of tests by lane: waits 1.5, ordinary 0.5"


def test_the_page_for_contributors_names_each_lane() -> None:
    rows = [f"| `{name}` | {covers} |" for name, covers in LANES.items()]
    assert "\n".join(rows) in PAGE.read_text()
