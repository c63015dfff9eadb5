"""What is decided of an adapter when its workers have answered, and what is told of it."""

from __future__ import annotations

from itertools import permutations

import pytest

from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.supervisor.adapters.state import AdapterTable, Outcome, Refusal, combine_outcomes

X, Y = AdapterSpec("x", "/x"), AdapterSpec("y", "/y")
INFO = AdapterInfo("x", "LORA", "mixed", "because")
WRONG = Refusal("wrong rank", invalid=True)
DIED = Refusal("it died", died=True)
LEFT = Refusal("told to end", died=True, left=True)


@pytest.mark.parametrize(
    ("outcomes", "decided"),
    [
        ((INFO, INFO, INFO), INFO),
        ((INFO, WRONG, INFO), WRONG),
        ((INFO, DIED, INFO), DIED),
        ((DIED, WRONG, INFO), WRONG),
        ((LEFT, INFO), INFO),
        ((LEFT, DIED), DIED),
    ],
)
def test_all_or_none_in_whatever_order(outcomes: tuple[Outcome, ...], decided: Outcome) -> None:
    for order in permutations(outcomes):
        assert combine_outcomes("m", order) == decided


@pytest.mark.parametrize("outcomes", [(), (LEFT, LEFT)])
def test_without_anybody_it_is_the_moment_that_is_wrong(outcomes: tuple[Outcome, ...]) -> None:
    decided = combine_outcomes("m", outcomes)
    assert isinstance(decided, Refusal)
    assert not decided.invalid
    assert decided.retry_after_s > 0
    assert "no worker of 'm' is ready" in decided.message


def test_workers_begin_with_what_is_expected_and_not_with_what_is_being_decided() -> None:
    book = AdapterTable([X], 1.0)
    book.add_requested(Y, 2.0, from_file=False)
    assert book.expected() == (X,)
    book.mark_serving("y", INFO, 3.0)
    assert book.expected() == (X, Y)
    book.mark_failed("x", "broken", 4.0)
    book.mark_leaving("y", 5.0)
    assert book.expected() == ()
    assert book.surplus_adapters(["x", "y", "z"]) == ["x", "y", "z"]
    told = [(one.name, one.state, one.reason, one.since) for one in book.statuses([])]
    assert told == [("x", "failed", "broken", 4.0), ("y", "unloading", "", 5.0)]
    book.forget_adapter("y")
    assert book.get("y") is None


def test_it_serves_where_all_workers_of_whichever_version_have_it() -> None:
    book = AdapterTable([X], 1.0)
    [loading] = book.statuses([])
    assert loading.state == "loading"
    [told] = book.statuses([{"x": INFO}, {}])
    assert told.state == "loading"
    [told] = book.statuses([{"x": INFO}, {"x": INFO}])
    assert (told.state, told.info) == ("serving", INFO)
    book.mark_serving("x", INFO, 2.0)
    [told] = book.statuses([])  # all restart: requests wait
    assert told.state == "serving"
    book.add_requested(X, 3.0, from_file=True)
    [told] = book.statuses([{"x": INFO}])
    assert told.state == "loading"  # until it is decided
