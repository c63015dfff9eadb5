"""A cluster in simulated time (tests/bench/cluster.py): a tenth of the page on scale, seeded."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from servekit.protocol.messages import ToGateway
from tests.bench.cluster import Cluster, Outcome, Shape
from tests.bench.scale import topology

SHAPE = Shape(workers=60, gateways=3, streams=4000, slots=90, before_s=5.0, after_s=30.0)


@pytest.fixture(scope="module")
def roomy() -> Outcome:
    return Cluster(SHAPE, seed=1).run()


def test_streams_are_spread_evenly_and_those_of_the_dead_over_the_rest(roomy: Outcome) -> None:
    assert roomy.spread["before"][1] < 1.2
    assert roomy.spread["after the deaths"][1] < 1.2
    assert roomy.spread["at the end"][1] < 1.3


def test_where_there_is_room_nobody_waits_for_it(roomy: Outcome) -> None:
    assert roomy.lost == len(roomy.waits) > 300
    assert max(roomy.waits) == 0.0


def test_all_are_back_as_soon_as_a_load_takes(roomy: Outcome) -> None:
    assert len(roomy.starts) == 6
    assert max(roomy.starts) < 0.2
    assert roomy.whole_s is not None
    assert roomy.whole_s < 1.1 * SHAPE.load_s + 0.2


def test_a_worker_that_is_new_gets_more_than_others_and_no_flood(roomy: Outcome) -> None:
    assert 1 < roomy.rush < 20


def test_where_there_is_none_they_wait_until_others_end() -> None:
    tight = Cluster(replace(SHAPE, slots=72), seed=1).run()
    assert tight.lost == len(tight.waits)
    assert 0 < max(tight.waits) < 1.1 * SHAPE.load_s + 0.2


def test_one_worker_in_a_crash_loop_holds_up_no_other() -> None:
    found = Cluster(Shape(60, 3, 3000, 90, before_s=25.0, after_s=30.0, bad=1), seed=1).run()
    assert found.whole_s is not None
    assert found.whole_s < 1.1 * SHAPE.load_s + 1.0


def test_what_gateways_are_told_stays_small() -> None:
    frames = [len(msgspec.msgpack.encode(topology(workers))) for workers in (100, 1000)]
    assert frames[1] < 11 * frames[0]
    assert frames[1] < 300_000
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(topology(3)), type=ToGateway)
    assert told == topology(3)
