"""The residency policy, decision by decision, and over hours of simulated time."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.residency import Residency
from servekit.supervisor.model_swap.eviction import LONGEST_TURN_S, linger_s, turn_s
from servekit.supervisor.model_swap.policy import Decision, decide, leaves_in_s
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction
from tests.unit.supervisor.world import PLACE, Model, Request, World

GIB = 2**30
FREE = {PLACE: 0}


def model(name: str, size: int = 10, tier: Residency = "stopped", **more: Any) -> PolicyInput:
    facts = PolicyInput(name, "on_demand", "stopped", {PLACE: size * GIB})
    return replace(facts, tier=tier, **more)


def kinds(decision: Decision) -> list[tuple[str, str]]:
    return [(step.kind, step.model) for step in decision.steps]


# ---------------------------------------------------------------- single decisions


def test_who_waits_is_loaded_where_there_is_room() -> None:
    one = model("a", waiting_since=1.0)
    assert decide([one], {PLACE: 10 * GIB}, 2.0).steps == (SwapAction("load", "a"),)
    assert kinds(decide([replace(one, tier="asleep")], {PLACE: 10 * GIB}, 2.0)) == [("wake", "a")]
    assert decide([replace(one, waiting_since=None)], {PLACE: 10 * GIB}, 2.0).steps == ()


def test_requests_for_one_model_join_one_load() -> None:
    for tier in ("coming", "leaving", "failed", "resident"):
        assert not decide([model("a", tier=tier, waiting_since=1.0)], {PLACE: 99 * GIB}, 9.0).steps


def test_who_is_waited_for_does_not_go_by_itself() -> None:
    idle = model("a", tier="resident", idle_unload_s=60.0, used_at=0.0)
    assert kinds(decide([idle], FREE, 99.0)) == [("stop", "a")]
    for wanted in (replace(idle, waiting_since=98.0), replace(idle, busy=True)):
        assert kinds(decide([wanted], FREE, 99.0)) == []


def test_a_place_that_is_not_named_has_no_end() -> None:
    assert kinds(decide([model("a", waiting_since=1.0)], {}, 2.0)) == [("load", "a")]


def test_one_that_is_quiet_makes_room_and_the_reason_is_told() -> None:
    old = model("old", tier="resident", used_at=0.0)
    decision = decide([old, model("new", 30, waiting_since=99.0)], {PLACE: 20 * GIB}, 100.0)
    said = "evicted for new, 30.0 GiB needed, 20.0 GiB free"
    assert decision.steps == (SwapAction("stop", "old", said, makes_room=True),)
    assert decision.waits == {"new": "30.0 GiB needed, 20.0 GiB free; it waits for old"}


@pytest.mark.parametrize(
    "other",
    [
        {"tier": "coming"},
        {"tier": "leaving"},
        {"tier": "resident", "busy": True, "since": 99.0},
        {"tier": "resident", "used_at": 99.99},
        {"tier": "resident", "load": "on_start"},
        {"tier": "resident", "load": "manual"},
        {"tier": "resident", "claim": {"elsewhere": 50 * GIB}},
    ],
)
def test_who_does_not_make_room(other: dict[str, Any]) -> None:
    facts = [replace(model("old"), **other), model("new", waiting_since=90.0)]
    assert decide(facts, FREE, 100.0).steps == ()


def test_nobody_goes_in_vain() -> None:
    facts = [
        model("small", 5, "resident", used_at=0.0),
        model("stays", 50, "resident", load="on_start"),
        model("new", 20, waiting_since=90.0),
    ]
    decision = decide(facts, FREE, 100.0)
    assert decision.steps == ()
    assert decision.waits["new"] == "20.0 GiB needed, 0 B free, and the others stay"


def test_one_that_is_coming_is_waited_for_as_it_may_go_then() -> None:
    facts = [model("old", tier="coming"), model("new", waiting_since=90.0)]
    said = "10.0 GiB needed, 0 B free; it waits for old"
    assert decide(facts, FREE, 100.0).waits == {"new": said}
    told = decide([replace(facts[0], load="on_start"), facts[1]], FREE, 100.0).waits["new"]
    assert told.endswith("and the others stay")


def test_what_frees_much_is_long_unused_and_cheap_to_bring_back_goes_first() -> None:
    new = model("new", 10, waiting_since=99.0)
    base = model("x", 10, "resident", used_at=50.0, load_s=10.0)

    def first(*others: PolicyInput) -> str:
        return decide([*others, new], FREE, 100.0).steps[0].model

    assert first(base, replace(base, name="older", used_at=10.0)) == "older"
    assert first(base, replace(base, name="cheaper", load_s=2.0)) == "cheaper"
    half = {PLACE: 6 * GIB}
    assert first(replace(base, claim=half), replace(base, name="larger")) == "larger"
    stays = replace(base, name="stays", used_at=0.0, stay_s=math.inf)
    assert first(stays, base) == "x"
    assert first(stays) == "stays"  # there is nobody else


def test_only_as_many_go_as_it_takes() -> None:
    small = [model(f"s{n}", 2, "resident", used_at=0.0) for n in range(3)]
    large = model("large", 10, "resident", used_at=50.0, load_s=100.0)
    new = model("new", 9, waiting_since=99.0)
    assert kinds(decide([*small, large, new], FREE, 100.0)) == [("stop", "large")]
    assert len(decide([*small, new], {PLACE: 5 * GIB}, 100.0).steps) == 2


def test_room_is_made_for_one_that_comes_without_having_it() -> None:
    """A reload has added it, or its breaker lets it try again."""
    old = model("old", 10, "resident", used_at=0.0)
    new = model("new", 15, "coming", load="on_start")
    decision = decide([old, new], {PLACE: -5 * GIB}, 100.0)
    assert decision.steps == (
        SwapAction("stop", "old", "evicted for new, which lacks 5.0 GiB", makes_room=True),
    )
    assert decision.waits == {"new": "it lacks 5.0 GiB; it waits for old"}
    assert decide([old, replace(new, tier="resident")], {PLACE: -5 * GIB}, 100.0).steps
    assert not decide([old, new], FREE, 100.0).steps
    busy = replace(old, busy=True, since=99.0)
    assert decide([busy, new], {PLACE: -5 * GIB}, 100.0) == Decision((), decision.waits)
    stays = replace(old, load="on_start")
    assert decide([stays, new], {PLACE: -5 * GIB}, 100.0) == Decision((), {})
    going = replace(old, tier="leaving")
    assert decide([going, new], {PLACE: -5 * GIB}, 100.0) == Decision((), {})
    third = model("third", 10, "resident", used_at=0.0)
    assert len(decide([old, third, new], {PLACE: -5 * GIB}, 100.0).steps) == 1


def test_room_is_made_where_others_hold_what_was_free() -> None:
    old = model("old", 10, "resident", used_at=0.0)
    new = model("new", 15, "coming", lacks={PLACE: 7 * GIB})
    free = {PLACE: 20 * GIB}
    said = "evicted for new, which lacks 7.0 GiB"
    assert decide([old, new], free, 100.0).steps == (
        SwapAction("stop", "old", said, makes_room=True),
    )
    assert not decide([old, replace(new, lacks={PLACE: 11 * GIB})], free, 100.0).steps
    going = replace(old, tier="leaving")
    assert not decide([going, new], free, 100.0).steps
    third = model("third", 10, "resident", used_at=0.0)
    [step] = decide([going, third, replace(new, lacks={PLACE: 17 * GIB})], free, 100.0).steps
    assert (step.model, step.reason) == ("third", "evicted for new, which lacks 7.0 GiB")


def test_what_is_leaving_is_waited_for() -> None:
    facts = [
        model("going", 10, "leaving"),
        model("old", 10, "resident", used_at=0.0),
        model("new", 10, waiting_since=90.0),
    ]
    assert decide(facts, FREE, 100.0).steps == ()


def test_what_becomes_free_is_kept_for_who_waits_longest() -> None:
    facts = [
        model("going", 8, "leaving"),
        model("large", 10, waiting_since=50.0),
        model("small", 2, waiting_since=90.0),
    ]
    assert decide(facts, {PLACE: 2 * GIB}, 100.0).steps == ()
    assert kinds(decide(facts, {PLACE: 4 * GIB}, 100.0)) == [("load", "small")]


@pytest.mark.parametrize("large", [12, 10])
def test_who_waits_for_what_is_kept_for_another_is_not_told_that_it_stays(large: int) -> None:
    """An operator's load is refused where the others stay."""
    facts = [model("large", large, waiting_since=50.0), model("small", 2, waiting_since=90.0)]
    facts += [] if large == 10 else [model("going", 2, "leaving")]
    decision = decide(facts, {PLACE: 10 * GIB}, 100.0)
    assert decision.waits["small"].startswith("2.0 GiB needed, 0 B free; it waits for ")
    assert decision.waits["small"].endswith("large")
    assert kinds(decision) == ([("load", "large")] if large == 10 else [])
    facts = [replace(facts[0], load="on_start"), facts[1]]
    told = decide(facts, {PLACE: large * GIB}, 100.0).waits["small"]
    assert told.endswith("and the others stay")


def test_one_that_is_woken_is_not_stopped_for_the_next_that_waits() -> None:
    first = model("first", 40, "asleep", waiting_since=50.0, asleep={PLACE: GIB}, busy=True)
    second = model("second", 41, "asleep", waiting_since=90.0, asleep={PLACE: GIB}, busy=True)
    decision = decide([first, second], {PLACE: 78 * GIB}, 100.0)
    assert kinds(decision) == [("wake", "first")]
    assert decision.waits == {"second": "40.0 GiB needed, 39.0 GiB free; it waits for first"}


def test_a_busy_one_has_its_turn_and_then_makes_room() -> None:
    old = model("old", tier="resident", busy=True, since=0.0)
    new = model("new", waiting_since=1.0)
    turn = turn_s(old, new)
    assert decide([old, new], FREE, turn - 0.1).steps == ()
    assert kinds(decide([old, new], FREE, turn)) == [("stop", "old")]


def test_it_sleeps_where_it_can_and_the_host_has_memory_for_it() -> None:
    old = model("old", tier="resident", can_sleep=True, asleep={"ram": 8 * GIB})
    new = model("new", waiting_since=1.0)
    assert kinds(decide([old, new], {PLACE: 0, "ram": 9 * GIB}, 99.0)) == [("sleep", "old")]
    assert kinds(decide([old, new], {PLACE: 0, "ram": 7 * GIB}, 99.0)) == [("stop", "old")]
    half = replace(old, asleep={PLACE: 5 * GIB})  # it would go on holding too much
    assert kinds(decide([half, new], FREE, 99.0)) == [("stop", "old")]
    assert kinds(decide([half, new], {PLACE: 5 * GIB}, 99.0)) == [("sleep", "old")]


def test_several_sleepers_share_what_the_host_has() -> None:
    one = model("a", 5, "resident", can_sleep=True, asleep={"ram": 8 * GIB}, load_s=5.0)
    other = replace(one, name="b", load_s=50.0)
    new = model("new", waiting_since=1.0)
    free = {PLACE: 0, "ram": 15 * GIB}
    assert sorted(kinds(decide([one, other, new], free, 99.0))) == [("sleep", "b"), ("stop", "a")]
    free["ram"] = 16 * GIB
    assert {kind for kind, _ in kinds(decide([one, other, new], free, 99.0))} == {"sleep"}


def test_who_is_just_falling_asleep_has_its_memory_already() -> None:
    going = model("going", 5, "leaving", asleep={"ram": 8 * GIB}, falls_asleep=True)
    one = model("a", tier="resident", can_sleep=True, asleep={"ram": 8 * GIB}, requested="sleep")
    assert kinds(decide([going, one], {PLACE: 0, "ram": 16 * GIB}, 9.0)) == [("sleep", "a")]
    assert decide([going, one], {PLACE: 0, "ram": 15 * GIB}, 9.0).steps == ()


def test_an_operator_is_told_what_a_sleeper_would_need() -> None:
    one = model("a", tier="resident", can_sleep=True, requested="sleep")
    one = replace(one, asleep={PLACE: 1 * GIB, "ram": 30 * GIB})
    decision = decide([one], {PLACE: 0, "ram": 12 * GIB}, 1.0)
    assert decision.steps == ()
    said = "asleep it takes 30.0 GiB of the host's memory, where 12.0 GiB can be had"
    assert decision.waits == {"a": said}
    assert decide([replace(one, requested="")], {"ram": 12 * GIB}, 1.0).waits == {}


def test_what_one_holds_asleep_is_freed_by_stopping_it() -> None:
    old = model("old", tier="asleep", asleep={PLACE: 5 * GIB})
    assert kinds(decide([old, model("new", waiting_since=1.0)], {PLACE: 5 * GIB}, 99.0)) == [
        ("stop", "old")
    ]


def test_unused_for_long_it_sleeps_and_then_goes() -> None:
    one = model("a", tier="resident", can_sleep=True, idle_sleep_s=10.0, idle_unload_s=60.0)
    assert decide([one], FREE, 9.0).steps == ()
    assert kinds(decide([one], FREE, 11.0)) == [("sleep", "a")]
    assert kinds(decide([replace(one, can_sleep=False)], FREE, 11.0)) == []
    asleep = replace(one, tier="asleep", since=10.5)
    assert decide([asleep], FREE, 59.0).steps == ()
    assert kinds(decide([asleep], FREE, 71.0)) == [("stop", "a")]
    assert decide([replace(one, busy=True)], FREE, 100.0).steps == ()
    assert leaves_in_s(one, 4.0) == 6.0


def test_a_clients_word_goes_before_the_files() -> None:
    one = model("a", tier="resident", idle_unload_s=60.0, stay_s=5.0, told_at=0.0)
    assert kinds(decide([one], FREE, 6.0)) == [("stop", "a")]
    assert decide([replace(one, stay_s=math.inf)], FREE, 9999.0).steps == ()
    now = replace(one, stay_s=0.0, told_at=10.0)
    assert decide([now], FREE, 10.1).steps == ()  # the request that it came with is on its way
    assert decide([replace(now, busy=True)], FREE, 11.0).steps == ()
    assert kinds(decide([now], FREE, 11.0)) == [("stop", "a")]


def test_operators_are_obeyed() -> None:
    one = model("a", tier="resident", busy=True, load="on_start", can_sleep=True)
    assert kinds(decide([replace(one, requested="unload")], FREE, 1.0)) == [("stop", "a")]
    assert kinds(decide([replace(one, requested="sleep")], FREE, 1.0)) == [("sleep", "a")]


# ---------------------------------------------------------------- simulation


def alternating(count: int, every_s: float, takes_s: float = 0.5) -> list[Request]:
    return [Request(n * every_s, "ab"[n % 2], takes_s) for n in range(count)]


def pair(**more: Any) -> list[Model]:
    return [Model(name, 10, **more) for name in "ab"]


def test_six_alternating_prompts_are_two_groups() -> None:
    world = World(10, pair(), alternating(6, every_s=0.01))
    world.run(100.0)
    assert (world.swaps, len(world.waits)) == (2, 6)


def test_alternation_under_load_takes_a_fifth_of_the_time_at_most() -> None:
    world = World(10, pair(load_s=2.0), alternating(1200, every_s=0.5, takes_s=2.5))
    world.run(3000.0)
    assert len(world.waits) == 1200
    assert world.swaps * 2.0 < 0.22 * world.now
    assert world.swaps < 1200 / 10  # naively, each request is one


def test_two_that_fit_are_never_swapped() -> None:
    world = World(20, pair(), alternating(300, every_s=0.2))
    world.run(500.0)
    assert world.swaps == 2


def test_a_stream_of_small_ones_does_not_starve_a_large_one() -> None:
    small = [Model(name, 5, load_s=1.0) for name in "abcd"]
    requests = [Request(n * 0.2, "abcd"[n % 4]) for n in range(2000)]
    world = World(10, [*small, Model("large", 10)], [*requests, Request(50.0, "large")])
    world.run(200.0)
    assert world.loads["large"] == 1
    assert world.now >= 100.0


def test_three_take_turns() -> None:
    models = [Model(name, 10, load_s=1.0) for name in "abc"]
    world = World(10, models, [Request(n * 0.1, "abc"[n % 3], 0.2) for n in range(3000)])
    world.run(2000.0)
    assert len(world.waits) == 3000
    most = max(world.loads.values())
    assert most - min(world.loads.values()) <= 1


def test_a_sleeper_is_back_sooner() -> None:
    cold, warm = (World(10, pair(sleeps=s), alternating(20, 20.0)) for s in (False, True))
    for world in (cold, warm):
        world.run(1000.0)
    assert cold.swaps == warm.swaps
    assert sum(warm.waits) < 0.4 * sum(cold.waits)


WORLDS = st.integers(0, 2**32)


@pytest.mark.lane("long")
@settings(max_examples=60, deadline=None)
@given(WORLDS)
def test_everybody_is_served_in_bounded_time(seed: int) -> None:
    """The world itself asserts that nobody goes who loads, and nothing is promised twice."""
    chance = random.Random(seed)
    models = [
        Model(
            name,
            chance.randint(1, 10),
            load_s=chance.choice([0.5, 2.0, 10.0]),
            wake_s=0.3,
            sleeps=chance.random() < 0.5,
        )
        for name in "abcd"[: chance.randint(2, 4)]
    ]
    every_s = chance.choice([0.05, 0.5, 5.0])
    names = [one.name for one in models]
    requests = [
        Request(n * every_s, chance.choice(names), chance.choice([0.1, 0.5]))
        for n in range(int(min(400, 60 / every_s)))
    ]
    world = World(10, models, requests)
    world.run(4000.0)
    assert len(world.waits) == len(requests)
    a_turn_s = LONGEST_TURN_S + 20.0 + 5.0  # and the swap, and what runs
    assert max(world.waits) < len(models) ** 2 * a_turn_s


@settings(max_examples=200, deadline=None)
@given(WORLDS)
def test_every_decision_keeps_the_rules(seed: int) -> None:
    chance = random.Random(seed)
    now = 100.0
    facts = [
        replace(
            model(f"m{n}", chance.randint(1, 10)),
            load=chance.choice(["on_demand", "on_demand", "on_start", "manual"]),
            tier=chance.choice(["resident", "asleep", "stopped", "coming", "leaving", "failed"]),
            can_sleep=chance.random() < 0.5,
            since=chance.uniform(0, now),
            used_at=chance.uniform(0, now),
            busy=chance.random() < 0.3,
            waiting_since=chance.choice([None, chance.uniform(0, now)]),
        )
        for n in range(chance.randint(1, 6))
    ]
    free = chance.randint(0, 8) * GIB
    decision = decide(facts, {PLACE: free}, now)
    by_name = {one.name: one for one in facts}
    assert len({step.model for step in decision.steps}) == len(decision.steps)
    taken = 0
    for step in decision.steps:
        one = by_name[step.model]
        if step.kind in ("load", "wake"):
            taken += one.needed_memory[PLACE]
            assert one.waiting_since is not None
        else:
            assert one.tier in ("resident", "asleep")
            assert one.load == "on_demand"
            others = [other for other in facts if other.waiting_since is not None]
            least = min((turn_s(one, other) for other in others), default=math.inf)
            assert not one.busy or now - one.since >= least
            assert one.busy or one.quiet_s(now) >= min(linger_s(one, other) for other in others)
    assert taken <= free
    assert decide(facts, {PLACE: free}, now) == decision
