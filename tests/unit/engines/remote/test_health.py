"""Whether an endpoint serves, and what it is asked to find that out: the module's table."""

from __future__ import annotations

import pytest

from servekit.engines.remote.errors import Refused, response_refusal, unreachable_error
from servekit.engines.remote.health import HealthWatcher

DOWN = unreachable_error("http://x/v1", "connection refused")


def status(code: int) -> Refused:
    return response_refusal(code, {}, b"")


def watch(*, lists: bool = True) -> HealthWatcher:
    return HealthWatcher(lists=lists, now_s=0.0)


def test_a_list_costs_nothing_and_is_asked_for_when_idle() -> None:
    one = watch()
    assert one.due_request(14.0) == "nothing"
    assert one.due_request(15.0) == "list"
    one.answered(15.0)
    assert one.due_request(29.0) == "nothing"
    one.listed(None, 30.0)
    assert one.due_request(44.0) == "nothing"
    assert one.due_request(45.0) == "list"


@pytest.mark.parametrize("refusal", [DOWN, status(500), status(503), status(401), status(403)])
def test_a_list_that_does_not_come_is_trouble_until_it_does(refusal: Refused) -> None:
    one = watch()
    one.listed(refusal, 15.0)
    assert one.trouble == refusal.error.message
    assert one.due_request(30.0) == "list"
    one.listed(None, 30.0)
    assert one.trouble == ""


@pytest.mark.parametrize("code", [404, 405, 400, 410, 301])
def test_who_has_no_list_is_asked_nothing(code: int) -> None:
    one = watch()
    one.listed(status(code), 15.0)
    assert one.trouble == ""
    assert one.due_request(1e6) == "nothing"
    assert watch(lists=False).due_request(1e6) == "nothing"


@pytest.mark.parametrize("refusal", [DOWN, status(500), status(503)])
@pytest.mark.parametrize(("lists", "then"), [(True, "list"), (False, "greet")])
def test_who_is_down_is_looked_for(refusal: Refused, lists: bool, then: str) -> None:
    one = watch(lists=lists)
    one.refused(refusal, 5.0)
    assert one.trouble
    assert one.due_request(19.0) == "nothing"
    assert one.due_request(20.0) == then
    one.answered(20.0)
    assert one.trouble == ""


@pytest.mark.parametrize("code", [401, 402, 403, 404, 301])
def test_only_an_answer_shows_that_the_key_is_taken_again(code: int) -> None:
    one = watch()
    one.refused(status(code), 0.0)
    at_s, pauses = 0.0, []
    for _ in range(8):
        wait_s = next(s for s in range(10_000) if one.due_request(at_s + s) == "greet")
        pauses.append(wait_s)
        at_s += wait_s
        one.refused(status(code), at_s)
        one.greeted_in_vain()
    assert pauses == [15, 30, 60, 120, 240, 480, 600, 600]
    one.answered(at_s)
    assert (one.trouble, one.due_request(at_s + 15)) == ("", "list")


@pytest.mark.parametrize("code", [400, 422, 429, 408])
def test_what_one_request_did_wrong_is_no_trouble(code: int) -> None:
    one = watch()
    one.refused(status(code), 0.0)
    assert one.trouble == ""
