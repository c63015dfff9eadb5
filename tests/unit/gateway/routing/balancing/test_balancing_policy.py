"""The table of balance.py, row by row."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from msgspec.structs import replace

from servekit.gateway.routing.balancing.balancing_policy import (
    FULL,
    SLACK,
    SPREAD,
    Policy,
    ReplicaLoad,
    RequestTraits,
    choose_replica,
    home_replica,
)

POLICIES: tuple[Policy, ...] = ("auto", "least_loaded", "round_robin")


def replicas(*owed: float) -> list[ReplicaLoad]:
    return [ReplicaLoad(8, one, seed=at * 0x9E3779B97F4A7C15) for at, one in enumerate(owed)]


@pytest.mark.parametrize("policy", POLICIES)
def test_where_none_has_room_it_waits(policy: Policy) -> None:
    full = [replace(one, room=room) for room, one in zip((0, -1), replicas(0, 5), strict=True)]
    assert choose_replica(policy, RequestTraits(), full) is None
    assert choose_replica(policy, RequestTraits(), []) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_only_one_has_room(policy: Policy) -> None:
    facts = [replace(one, room=0) for one in replicas(0, 0, 0)]
    facts[1] = ReplicaLoad(1, 1e9, kv_used=1.0)
    assert choose_replica(policy, RequestTraits(session=1, turn=2), facts) == 1


def test_round_robin_takes_turns_and_passes_over_the_full() -> None:
    facts = replicas(9, 0, 5)
    assert [
        choose_replica("round_robin", RequestTraits(turn=turn), facts) for turn in range(4)
    ] == [
        0,
        1,
        2,
        0,
    ]
    facts[1] = replace(facts[1], room=0)
    assert choose_replica("round_robin", RequestTraits(turn=1), facts) == 2


@pytest.mark.parametrize("policy", ["auto", "least_loaded"])
def test_the_least_loaded_by_its_speed(policy: Policy) -> None:
    assert choose_replica(policy, RequestTraits(100), replicas(300, 200, 400)) == 1
    fast = replicas(300, 200, 400)
    fast[2] = replace(fast[2], speed=4.0)
    assert choose_replica(policy, RequestTraits(100), fast) == 2


@pytest.mark.parametrize("policy", ["auto", "least_loaded"])
def test_of_equals_the_emptier_then_who_waited_longest(policy: Policy) -> None:
    facts = [
        replace(one, last=last) for last, one in zip((3, 1, 2), replicas(0, 0, 0), strict=True)
    ]
    assert choose_replica(policy, RequestTraits(100), facts) == 1
    facts[1] = replace(facts[1], kv_used=0.5)
    assert choose_replica(policy, RequestTraits(100), facts) == 2


@pytest.mark.parametrize("policy", ["auto", "least_loaded"])
def test_a_full_cache_takes_nothing_while_another_is_not(policy: Policy) -> None:
    facts = [replace(replicas(0)[0], kv_used=FULL, held=100), *replicas(500)]
    assert choose_replica(policy, RequestTraits(100, average=1000), facts) == 1
    facts[1] = replace(facts[1], kv_used=1.0)
    assert choose_replica(policy, RequestTraits(100, average=1000), facts) == 0


def test_a_prefix_draws_as_far_as_it_saves_work() -> None:
    asked = RequestTraits(1000, average=10_000)
    assert choose_replica("auto", asked, [ReplicaLoad(8, 799, held=800), ReplicaLoad(8, 0)]) == 0
    assert choose_replica("auto", asked, [ReplicaLoad(8, 801, held=800), ReplicaLoad(8, 0)]) == 1
    assert (
        choose_replica("least_loaded", asked, [ReplicaLoad(8, 799, held=800), ReplicaLoad(8, 0)])
        == 1
    )


def test_a_prefix_draws_no_farther_than_near() -> None:
    asked = RequestTraits(100_000, average=100)
    limit = SPREAD * 1000 + SLACK * 100
    holder = ReplicaLoad(8, limit, held=100_000)
    assert choose_replica("auto", asked, [ReplicaLoad(8, 1000), holder]) == 1
    assert (
        choose_replica("auto", asked, [ReplicaLoad(8, 1000), replace(holder, owed=limit + 1)]) == 0
    )


def test_a_session_stays_at_home_until_that_is_too_busy_or_gone() -> None:
    facts = replicas(0, 0, 0, 0)
    asked = RequestTraits(100, session=12345, average=100)
    at = home_replica(12345, facts)
    facts[at] = replace(facts[at], owed=SLACK * 100)
    assert choose_replica("auto", asked, facts) == at, "whatever else is less loaded"
    drawn = [replace(one, held=100) for one in facts]
    drawn[at] = facts[at]
    assert choose_replica("auto", asked, drawn) == at, "whoever holds the prompt"
    facts[at] = replace(facts[at], owed=SLACK * 100 + 1)
    assert choose_replica("auto", asked, facts) != at
    facts[at] = replace(facts[at], owed=0, room=0)
    assert choose_replica("auto", asked, facts) not in (at, None)


def test_homes_are_even_and_only_those_of_the_dead_move() -> None:
    chance = random.Random(7)
    keys = [chance.getrandbits(64) for _ in range(4000)]
    facts = replicas(0, 0, 0, 0)
    before = {key: facts[home_replica(key, facts)].seed for key in keys}
    counts = Counter(before.values())
    assert set(counts) == {one.seed for one in facts}
    assert all(900 < count < 1100 for count in counts.values())
    dead = facts.pop(2).seed
    after = {key: facts[home_replica(key, facts)].seed for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {
        key for key in keys if before[key] == dead
    }
    moved = Counter(after[key] for key in keys if before[key] == dead)
    assert all(count > 250 for count in moved.values())
    assert len(moved) == 3


def test_with_other_gateways_an_unknown_conversation_has_a_home_too() -> None:
    facts = replicas(0, 0, 0, 0)
    homes = {home_replica(head, facts) for head in range(50)}
    assert homes == {0, 1, 2, 3}
    for head in range(50):
        at = home_replica(head, facts)
        assert choose_replica("auto", RequestTraits(1000, head=head, average=100), facts) == at
        # who holds less than half of it proves nothing: a system prompt, perhaps
        some = [replace(one, held=400 if index != at else 0) for index, one in enumerate(facts)]
        assert choose_replica("auto", RequestTraits(1000, head=head, average=100), some) == at
        half = [replace(one, held=500 if index == 1 else 0) for index, one in enumerate(facts)]
        assert choose_replica("auto", RequestTraits(1000, head=head, average=100), half) == 1


def test_in_any_case_it_has_room_and_the_same_facts_make_the_same_choice() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        facts = [
            ReplicaLoad(
                chance.randint(-1, 3), chance.choice((0.0, 50.0, chance.random() * 1e4)),
                chance.randint(0, 900), chance.random(), chance.randint(0, 9),
                chance.getrandbits(64), chance.choice((1.0, 1.0, 3.5)),
            )
            for _ in range(chance.randint(0, 6))
        ]  # fmt: skip
        asked = RequestTraits(
            chance.randint(0, 1000), chance.choice((None, 5)), chance.choice((None, 6)),
            chance.randint(0, 99), chance.random() * 1000,
        )  # fmt: skip
        for policy in POLICIES:
            at = choose_replica(policy, asked, facts)
            assert at == choose_replica(policy, asked, facts)
            if at is None:
                assert all(one.room <= 0 for one in facts)
            else:
                assert facts[at].room > 0


def test_the_bound_is_monotonic() -> None:
    """The busier the holder, the less it is chosen: once given up it stays so."""
    asked = RequestTraits(2000, average=200)
    chosen = [
        choose_replica("auto", asked, [ReplicaLoad(8, owed, held=2000), ReplicaLoad(8, 400)])
        for owed in range(0, 4000, 50)
    ]
    assert chosen[0] == 0 and chosen[-1] == 1
    assert all(before <= after for before, after in pairwise(chosen) if before is not None)  # type: ignore[operator]
