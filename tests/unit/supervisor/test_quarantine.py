from __future__ import annotations

from servekit.protocol.messages import Quarantined
from servekit.supervisor.quarantine import Quarantine, aged, differ_in_time_only


def entry(mark: str, for_s: float, generation: str = "") -> Quarantined:
    return Quarantined(mark, "m", 0.0, for_s, generation)


def test_what_a_gateway_reports_holds_until_its_time() -> None:
    now = [100.0]
    one = Quarantine(lambda: now[0])
    one.add_request(entry("f1", 10.0))
    one.add_request(entry("f2", 20.0))
    one.add_request(entry("f1", 5.0))  # an older report of the same, from another gateway
    assert {(held.fingerprint, held.for_s) for held in one.holding()} == {
        ("f1", 10.0),
        ("f2", 20.0),
    }
    assert not one.expire()
    now[0] = 110.0
    assert one.expire()
    assert one.holding() == (entry("f2", 10.0),)


def test_the_list_is_bounded_and_the_oldest_goes_first() -> None:
    one = Quarantine(lambda: 0.0)
    for number in range(1500):
        one.add_request(entry(str(number), 10.0))
    held = one.holding()
    assert len(held) == 1000
    assert held[0].fingerprint == "500"


def test_another_generation_of_the_model_lifts_it() -> None:
    one = Quarantine(lambda: 0.0)
    one.add_request(entry("f1", 10.0, "a.1"))
    one.add_request(entry("f2", 10.0))  # of a gateway that does not know
    one.lift({"m": "a.1", "n": "b"})
    one.lift({"m": ""})
    one.lift({})
    assert len(one.holding()) == 2
    one.lift({"m": "b.1"})
    assert one.holding() == (entry("f2", 10.0),)


def test_what_is_told_again_later_holds_for_less() -> None:
    held = (entry("f1", 10.0), entry("f2", 3.0))
    assert aged(held, 4.0) == (entry("f1", 6.0),)
    assert differ_in_time_only(held, aged(held, 1.0))
    assert not differ_in_time_only(held, aged(held, 4.0))
