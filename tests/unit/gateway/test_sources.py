"""Who is charged with a worker's death, and what comes of it."""

from __future__ import annotations

import pytest

from servekit.gateway.sources import (
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
    assert verdict(deaths, sure, shared=False) is expected
    assert verdict(deaths, sure, shared=True) is min(expected, Verdict.WAITS)


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
