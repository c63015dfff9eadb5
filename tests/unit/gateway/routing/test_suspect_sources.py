"""Who is charged with a worker's death, and what comes of it."""

from __future__ import annotations

import pytest

from servekit.gateway.routing.suspect_sources import (
    HALF_LIFE_S,
    Sources,
    Suspect,
    Verdict,
    in_words,
    verdict,
)


@pytest.mark.parametrize(
    ("deaths", "sure", "expected"),
    [
        (1.3, 1.3, Verdict.FREE),
        (2.0, 0.0, Verdict.ALONE),
        (9.0, 0.3, Verdict.ALONE),
        (9.0, 1.1, Verdict.WAITS),
        (2.0, 2.0, Verdict.WAITS),
        (3.0, 2.0, Verdict.REFUSED),
        (99.0, 99.0, Verdict.REFUSED),
    ],
)
def test_the_table(deaths: float, sure: float, expected: Verdict) -> None:
    assert verdict(deaths, sure) is expected
    assert verdict(deaths, sure, 2.1) is min(expected, Verdict.WAITS)
    assert verdict(deaths, sure, 2.2) is expected


def test_what_comes_through_in_another_attempt_is_cleared_and_what_hangs_up_is_charged() -> None:
    sources = Sources()
    for at in range(2):
        innocent, poison = Suspect(("address:a", "f1")), Suspect(("address:b", "f2"))
        sources.add([innocent, poison], sure=False, now_s=float(at))
        assert not sources.holds(float(at)) or at
        sources.charge(poison)
        sources.clear(innocent)
    assert sources.judge("address:a", 2.0) is Verdict.FREE
    assert sources.judge("address:b", 2.0) is Verdict.ALONE
    assert sources.judge("address:b", 2.0 + HALF_LIFE_S) is Verdict.FREE


def test_a_share_is_small_while_many_may_have_done_it() -> None:
    sources = Sources()
    for at in range(3):
        crowd = [Suspect((f"address:{n}",)) for n in range(9)]
        poison = Suspect(("address:b",))
        sources.add([*crowd, poison], sure=False, now_s=float(at))
        sources.charge(poison)
    assert sources.judge("address:b", 3.0) is Verdict.FREE


def test_one_address_for_all_is_cleared_as_they_come_through() -> None:
    """Workers killed from outside, every few seconds, for hours."""
    sources = Sources()
    for at in range(1000):
        running = [Suspect(("address:a", f"f{at}-{n}")) for n in range(5)]
        sources.add(running, sure=False, now_s=at * 3.0)
        for suspect in running:
            sources.clear(suspect)
        assert sources.judge("address:a", at * 3.0) is Verdict.FREE


def test_the_same_request_weighs_twice() -> None:
    sources = Sources()
    one = Suspect(("address:a", "f"))
    sources.add([one], sure=False, now_s=0.0)
    sources.charge(one)
    assert sources.judge("address:a", 0.0) is Verdict.FREE
    assert sources.judge("f", 0.0, times=2.0) is Verdict.ALONE


def test_it_is_refused_for_longer_each_time_and_forgotten_at_last() -> None:
    sources = Sources()
    for at in range(3):
        one = Suspect(("key:k",))
        sources.add([one], sure=True, now_s=float(at))
        sources.charge(one)
    assert sources.judge("key:k", 3.0) is Verdict.REFUSED
    assert [sources.refuse_for_s("key:k", 100.0) for _ in range(3)] == [30.0, 60.0, 100.0]
    assert sources.pause_s("key:k", 3.5) == 0.5
    assert not sources.holds(10_000.0)
    assert in_words("key:k") == "the key 'k'"


def charge(sources: Sources, mark: str, at_s: float, *, sure: bool) -> None:
    one = Suspect((mark,))
    sources.add([one], sure=sure, now_s=at_s)
    sources.charge(one)


@pytest.mark.parametrize("sure", [False, True])
def test_a_source_is_free_again_once_its_requests_came_through_alone(sure: bool) -> None:
    """Two workers killed from outside, just when all clients hung up."""
    sources = Sources()
    for _ in range(2):
        charge(sources, "address:a", 0.0, sure=sure)
    for _ in range(100):
        sources.pass_through("address:a", alone=False)
        sources.pass_through("address:b", alone=True)
    for _ in range(11):
        assert sources.judge("address:a", 0.0) >= Verdict.ALONE
        sources.pass_through("address:a", alone=True)
    sources.pass_through("address:a", alone=True)
    assert sources.judge("address:a", 0.0) is Verdict.FREE


def test_an_address_is_refused_if_nothing_of_it_comes_through_and_tried_again() -> None:
    sources = Sources()
    for at in range(3):
        assert sources.judge("address:a", float(at)) <= Verdict.WAITS
        charge(sources, "address:a", float(at), sure=True)
    assert sources.judge("address:a", 3.0) is Verdict.REFUSED
    assert sources.refuse_for_s("address:a", 100.0) == 30.0
    assert sources.judge("address:a", 33.0) is Verdict.WAITS
    for at in range(33, 36):
        charge(sources, "address:a", float(at), sure=True)
    assert sources.judge("address:a", 36.0) is Verdict.REFUSED
    assert sources.refuse_for_s("address:a", 100.0) == 60.0


def test_an_address_is_not_refused_where_another_client_of_it_is_served() -> None:
    sources = Sources()
    for at in range(20):
        charge(sources, "address:a", float(at), sure=True)
        if at % 2:
            sources.pass_through("address:a", alone=True)
        assert sources.judge("address:a", float(at)) <= Verdict.WAITS


def test_one_of_several_gateways_does_not_refuse_an_address() -> None:
    """It does not know of the address's requests that another gateway has served."""
    sources = Sources()
    sources.sees_all = False
    for at in range(20):
        charge(sources, "address:a", float(at), sure=True)
        charge(sources, "key:a", float(at), sure=True)
    assert sources.judge("address:a", 20.0) is Verdict.WAITS
    assert sources.judge("key:a", 20.0) is Verdict.REFUSED
