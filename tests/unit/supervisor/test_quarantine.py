from __future__ import annotations

from servekit.supervisor.quarantine import Quarantine
from servekit.wire.messages import Quarantined


def test_what_a_gateway_reports_holds_until_its_time() -> None:
    now = [100.0]
    one = Quarantine(lambda: now[0])
    first, second = Quarantined("f1", "m", 110.0), Quarantined("f2", "m", 120.0)
    one.add(first)
    one.add(second)
    one.add(Quarantined("f1", "m", 105.0))  # an older report of the same, from another gateway
    assert set(one.holding()) == {first, second}
    assert not one.expire()
    now[0] = 110.0
    assert one.expire()
    assert one.holding() == (second,)


def test_the_list_is_bounded_and_the_oldest_goes_first() -> None:
    one = Quarantine(lambda: 0.0)
    for number in range(1500):
        one.add(Quarantined(str(number), "m", 10.0))
    held = one.holding()
    assert len(held) == 1000
    assert held[0].fingerprint == "500"
