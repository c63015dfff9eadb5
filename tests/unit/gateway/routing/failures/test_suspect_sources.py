"""Who is charged with a worker's death, and what comes of it."""

from __future__ import annotations

import msgspec
import pytest

from servekit.gateway.routing.failures.suspect_sources import (
    HALF_LIFE_S,
    MOST_PAUSE_S,
    PAUSE_S,
    Sources,
    Suspect,
    Verdict,
    in_words,
    verdict,
)
from servekit.protocol.messages import SourceReport


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
        sources.add_death([innocent, poison], sure=False, now_s=float(at))
        assert not sources.has_suspects(float(at)) or at
        sources.charge_suspect(poison)
        sources.clear_suspect(innocent)
    assert sources.judge("address:a", 2.0) is Verdict.FREE
    assert sources.judge("address:b", 2.0) is Verdict.ALONE
    assert sources.judge("address:b", 2.0 + HALF_LIFE_S) is Verdict.FREE


def test_a_share_is_small_while_many_may_have_done_it() -> None:
    sources = Sources()
    for at in range(3):
        crowd = [Suspect((f"address:{n}",)) for n in range(9)]
        poison = Suspect(("address:b",))
        sources.add_death([*crowd, poison], sure=False, now_s=float(at))
        sources.charge_suspect(poison)
    assert sources.judge("address:b", 3.0) is Verdict.FREE


def test_one_address_for_all_is_cleared_as_they_come_through() -> None:
    """Workers killed from outside, every few seconds, for hours."""
    sources = Sources()
    for at in range(1000):
        running = [Suspect(("address:a", f"f{at}-{n}")) for n in range(5)]
        sources.add_death(running, sure=False, now_s=at * 3.0)
        for suspect in running:
            sources.clear_suspect(suspect)
        assert sources.judge("address:a", at * 3.0) is Verdict.FREE


def test_the_same_request_weighs_twice() -> None:
    sources = Sources()
    one = Suspect(("address:a", "f"))
    sources.add_death([one], sure=False, now_s=0.0)
    sources.charge_suspect(one)
    assert sources.judge("address:a", 0.0) is Verdict.FREE
    assert sources.judge("f", 0.0, times=2.0) is Verdict.ALONE


def test_it_is_refused_for_longer_each_time_and_forgotten_at_last() -> None:
    sources = Sources()
    for at in range(3):
        one = Suspect(("key:k",))
        sources.add_death([one], sure=True, now_s=float(at))
        sources.charge_suspect(one)
    assert sources.judge("key:k", 3.0) is Verdict.REFUSED
    assert [sources.refuse_for_s("key:k", 100.0) for _ in range(3)] == [30.0, 60.0, 100.0]
    assert sources.pause_s("key:k", 3.5) == pytest.approx(4.3, abs=0.1)
    assert not sources.has_suspects(10_000.0)
    assert in_words("key:k") == "the key 'k'"


def charge(sources: Sources, mark: str, at_s: float, *, sure: bool) -> None:
    one = Suspect((mark,))
    sources.add_death([one], sure=sure, now_s=at_s)
    sources.charge_suspect(one)


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


def test_the_pause_grows_with_the_deaths_whoever_is_served_and_passes_with_time() -> None:
    sources = Sources()
    pauses = []
    for at in range(40):
        charge(sources, "address:a", float(at), sure=True)
        sources.pass_through("address:a", alone=True)
        pauses.append(sources.whole_pause_s("address:a", float(at)))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (PAUSE_S, MOST_PAUSE_S)
    assert sources.whole_pause_s("address:a", 40.0 + 10 * HALF_LIFE_S) == PAUSE_S


# ---------------------------------------------------------------- several gateways


class Gateways:
    """The sources of two gateways, whose news are forwarded at once."""

    def __init__(self) -> None:
        self.messages = 0
        self.both = Sources(self._forward), Sources(self._forward)
        for sources in self.both:
            sources.has_peers = True
        self.now_s = 0.0

    def _forward(self) -> None:
        self.messages += 1

    def tell(self) -> None:
        """Forward the news of both."""
        news = [one.take_report(f"gateway/{n}", self.now_s) for n, one in enumerate(self.both)]
        self.both[0].add_report(decode(encode(news[1])), self.now_s)
        self.both[1].add_report(decode(encode(news[0])), self.now_s)

    def kill(self, at: int, mark: str = "address:a", worker: str = "", sure: bool = True) -> None:
        """Charge a death to a mark at one gateway."""
        one = Suspect((mark,))
        self.both[at].add_death([one], sure=sure, now_s=self.now_s, worker=worker)
        self.both[at].charge_suspect(one)
        self.tell()

    def judge(self, mark: str = "address:a") -> list[Verdict]:
        return [one.judge(mark, self.now_s) for one in self.both]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SourceReport).decode


def test_an_address_is_refused_for_the_deaths_at_all_gateways() -> None:
    gateways = Gateways()
    for at in range(3):
        assert max(gateways.judge()) <= Verdict.WAITS
        gateways.kill(at % 2, worker=f"w{at}.sock")
    assert gateways.judge() == [Verdict.REFUSED] * 2
    assert gateways.both[0].refuse_for_s("address:a", 100.0) == 30.0
    gateways.tell()
    assert gateways.judge() == [Verdict.WAITS] * 2
    assert gateways.both[1].refuse_for_s("address:a", 100.0) == 60.0


def test_a_request_that_another_gateway_has_served_keeps_its_address_from_refusal() -> None:
    gateways = Gateways()
    for at in range(20):
        gateways.kill(0, worker=f"w{at}.sock")
        if at % 2:
            gateways.both[1].pass_through("address:a", alone=at % 4 > 1)
            gateways.tell()
        assert max(gateways.judge()) <= Verdict.WAITS


def test_requests_that_came_through_alone_at_any_gateway_free_a_source() -> None:
    gateways = Gateways()
    for at in range(2):
        gateways.kill(at, worker=f"w{at}.sock")
    assert min(gateways.judge()) >= Verdict.ALONE
    for at in range(12):
        gateways.both[at % 2].pass_through("address:a", alone=True)
        gateways.tell()
    assert gateways.judge() == [Verdict.FREE] * 2


def test_one_death_that_two_gateways_have_seen_is_one() -> None:
    gateways = Gateways()
    for at in range(2):
        gateways.kill(at, worker="w1.sock", sure=False)
    assert gateways.judge() == [Verdict.FREE] * 2
    for at in range(2):
        gateways.kill(at, worker="w2.sock", sure=False)
    assert gateways.judge() == [Verdict.ALONE] * 2


def test_the_innocent_at_another_gateway_share_a_death_until_they_are_cleared() -> None:
    gateways = Gateways()
    innocents = []
    for at in range(2):
        crowd = [Suspect((f"address:{n}",)) for n in range(9)]
        gateways.both[1].add_death(crowd, sure=False, now_s=0.0, worker=f"w{at}.sock")
        gateways.kill(0, worker=f"w{at}.sock", sure=False)
        innocents += crowd
    assert gateways.judge() == [Verdict.FREE] * 2
    for suspect in innocents:
        gateways.both[1].clear_suspect(suspect)
    gateways.tell()
    assert gateways.judge() == [Verdict.ALONE] * 2


def test_a_connection_that_breaks_twice_is_two_deaths() -> None:
    gateways = Gateways()
    for _ in range(2):
        gateways.kill(0, worker="w1.sock", sure=False)
    assert gateways.judge() == [Verdict.ALONE] * 2


def test_nothing_is_sent_for_requests_of_sources_without_deaths() -> None:
    gateways = Gateways()
    gateways.both[0].pass_through("address:a", alone=False)
    gateways.kill(0, worker="w1.sock")
    sent = gateways.messages
    for _ in range(100):
        gateways.both[1].pass_through("address:b", alone=False)
    assert gateways.messages == sent
    for _ in range(100):
        gateways.both[1].pass_through("address:a", alone=False)
        gateways.tell()
    assert gateways.messages == sent + 1, "that some came through is news once"


def test_the_only_gateway_keeps_no_news() -> None:
    sources = Sources(lambda: pytest.fail("there is no other gateway"))
    charge(sources, "address:a", 0.0, sure=True)
    sources.pass_through("address:a", alone=True)
    sources.refuse_for_s("address:a", 100.0)
    assert sources.take_report("gateway/0", 0.0) == SourceReport("gateway/0")


def test_what_is_remembered_is_bounded_however_much_is_reported() -> None:
    gateways = Gateways()
    for at in range(1000):
        gateways.kill(at % 2, mark=f"address:{at}", worker=f"w{at}.sock")
    assert all(len(one.deaths) == 64 for one in gateways.both)
    assert gateways.judge("address:0") == [Verdict.FREE] * 2
    assert not any(one.has_suspects(10_000.0) for one in gateways.both)


def test_a_refusal_after_a_thousand_others_is_like_the_last() -> None:
    sources = Sources()
    for _ in range(1100):  # with `quarantine_s: 0`, each request of a refused source is one
        assert sources.refuse_for_s("key:k", 100.0) <= 100.0
