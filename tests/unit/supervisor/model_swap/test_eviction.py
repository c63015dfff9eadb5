"""Who makes room for whom: free memory, who may go and when, who sleeps and who stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from servekit.protocol.residency import Residency
from servekit.supervisor.model_swap.eviction import (
    LEAST_LINGER_S,
    LEAST_TURN_S,
    LONGEST_LINGER_S,
    LONGEST_TURN_S,
    CapacityView,
    linger_s,
    make_room,
    relieve,
    remove_model,
    turn_s,
)
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction

GPU, HOST = "gpu", "host"
NOW = 1000.0


def model(name: str, size: int = 10, tier: Residency = "resident", **more: Any) -> PolicyInput:
    return replace(PolicyInput(name, "on_demand", tier, {GPU: size}), **more)


def sleeper(name: str, size: int = 10, host: int = 8, kept: int = 1, **more: Any) -> PolicyInput:
    return model(name, size, asleep={GPU: kept, HOST: host}, can_sleep=True, **more)


def steps_of(
    one: PolicyInput, *others: PolicyInput, free: dict[str, int]
) -> tuple[list[tuple[str, str]], str]:
    steps, waits = make_room(one, others, CapacityView(free, [one, *others]), NOW)
    assert all(step.makes_room for step in steps)
    return [(step.kind, step.model) for step in steps], waits


# ---------------------------------------------------------------- free memory


def test_what_is_leaving_is_free_soon_and_not_now() -> None:
    view = CapacityView({GPU: 5}, [model("a", 10, "leaving"), model("b", 7)])
    assert (view.now, view.soon) == ({GPU: 5}, {GPU: 15})
    assert not view.has_bytes({GPU: 6}) and view.has_bytes({GPU: 5})
    assert view.missing_bytes({GPU: 16, "elsewhere": 99}) == {GPU: 1}


def test_one_that_falls_asleep_keeps_a_part_and_takes_host_memory_now() -> None:
    falling = sleeper("a", 10, host=8, kept=2, tier="leaving", falls_asleep=True)
    view = CapacityView({GPU: 5, HOST: 20}, [falling])
    assert view.now == {GPU: 5, HOST: 12}
    assert view.soon == {GPU: 13, HOST: 12}
    stopping = replace(falling, falls_asleep=False)
    view = CapacityView({GPU: 5, HOST: 20}, [stopping])
    assert (view.now, view.soon) == ({GPU: 5, HOST: 20}, {GPU: 15, HOST: 20})


def test_memory_is_given_away_now_or_kept_for_later() -> None:
    view = CapacityView({GPU: 10}, [])
    given = replace(model("given", 3, "stopped"), claim={GPU: 3, "elsewhere": 1})
    waits = replace(given, name="waits", claim={GPU: 4, "elsewhere": 1}, load="on_start")
    view.subtract(given)
    view.promise(waits)
    assert (view.now, view.soon) == ({GPU: 7}, {GPU: 3})
    assert view.promised == [replace(given, tier="coming")], "the other will stay"


def test_one_with_its_claim_lacks_what_others_hold_or_what_was_claimed_too_much() -> None:
    loading = model("a", 10, "coming", lacks={GPU: 4})
    assert CapacityView({GPU: 0}, [loading]).missing_for_claimed(loading) == {GPU: 4}
    assert CapacityView({GPU: -6}, [loading]).missing_for_claimed(loading) == {GPU: 6}
    assert CapacityView({GPU: 3}, [loading]).missing_for_claimed(replace(loading, lacks={})) == {}
    leaving = CapacityView({GPU: 0}, [model("b", 3, "leaving")])
    assert leaving.missing_for_claimed(loading) == {GPU: 1}, "that will be free"
    assert leaving.missing_for_claimed(replace(loading, lacks={"elsewhere": 9})) == {}


def test_models_can_sleep_where_there_is_host_memory_for_all_of_them() -> None:
    both = [sleeper("a", host=8), sleeper("b", host=8)]
    view = CapacityView({GPU: 0, HOST: 15}, both)
    assert view.can_hold_asleep(both[:1]) and not view.can_hold_asleep(both)
    assert view.lacks_asleep(both) == {HOST: 1}
    assert not view.can_hold_asleep([replace(both[0], can_sleep=False)])
    assert not view.can_hold_asleep([replace(both[0], tier="asleep")])


# ---------------------------------------------------------------- when one may go


@pytest.mark.parametrize(
    ("swap_s", "linger", "turn"),
    [
        (0.01, LEAST_LINGER_S, LEAST_TURN_S),
        (1.0, 0.2, 8.0),
        (100.0, LONGEST_LINGER_S, LONGEST_TURN_S),
    ],
)
def test_the_dearer_a_swap_the_longer_one_stays(swap_s: float, linger: float, turn: float) -> None:
    """Of both: the one that goes has to come back, and the other has to be loaded."""
    one, other = model("a", load_s=swap_s), model("b", tier="stopped", load_s=swap_s)
    assert linger_s(one, other) == pytest.approx(linger)
    assert turn_s(one, other) == pytest.approx(turn)


def test_the_limits_are_those_that_people_were_told() -> None:
    assert (LEAST_TURN_S, LONGEST_TURN_S) == (2.0, 60.0)
    assert (LEAST_LINGER_S, LONGEST_LINGER_S) == (0.05, 1.0)


@pytest.mark.parametrize(
    ("facts", "goes"),
    [
        ({"used_at": NOW - 0.2}, True),
        ({"used_at": NOW - 0.19}, False),
        ({"busy": True, "since": NOW - 8.0, "used_at": NOW}, True),
        ({"busy": True, "since": NOW - 7.9, "used_at": NOW}, False),
    ],
)
def test_one_goes_when_it_is_quiet_or_has_had_its_turn(facts: dict[str, Any], goes: bool) -> None:
    new = model("new", tier="stopped", load_s=1.0)
    steps, waits = steps_of(new, model("old", load_s=1.0, **facts), free={GPU: 0})
    assert steps == ([("stop", "old")] if goes else [])
    assert waits == "10 B needed, 0 B free; it waits for old"


# ---------------------------------------------------------------- who goes


def test_as_few_go_as_free_enough() -> None:
    small = [model(f"s{n}", 4) for n in range(3)]
    steps, waits = steps_of(model("new", 8, "stopped"), *small, model("large", 8), free={GPU: 0})
    assert steps == [("stop", "large")] and waits.endswith("it waits for large")


def test_one_that_a_later_and_larger_one_makes_unnecessary_stays() -> None:
    small = model("small", 3, used_at=NOW - 900)
    large = model("large", 10, used_at=NOW - 10)
    steps, _ = steps_of(model("new", 10, "stopped"), small, large, free={GPU: 0})
    assert steps == [("stop", "large")]


def test_nobody_goes_where_all_together_do_not_free_enough() -> None:
    steps, waits = steps_of(model("new", 30, "stopped"), model("a"), model("b"), free={GPU: 5})
    assert steps == [] and waits == "30 B needed, 5 B free, and the others stay"


def test_one_that_is_loading_is_waited_for() -> None:
    steps, waits = steps_of(
        model("new", 20, "stopped"), model("a"), model("b", tier="coming"), free={GPU: 0}
    )
    assert steps == [] and waits == "20 B needed, 0 B free; it waits for a, b"


def test_what_leaves_already_is_waited_for_by_no_name() -> None:
    leaving = model("a", 10, "leaving")
    steps, waits = steps_of(model("new", 10, "stopped"), leaving, free={GPU: 0})
    assert steps == [] and waits == "10 B needed, 0 B free; it waits for a model that is unloading"


def test_the_place_that_is_shortest_is_named() -> None:
    new = replace(model("new", 10, "stopped"), claim={GPU: 10, HOST: 50, "elsewhere": 999})
    old = replace(model("old"), claim={GPU: 10, HOST: 50})
    _, waits = steps_of(new, old, free={GPU: 8, HOST: 20})
    assert waits.startswith("50 B needed, 20 B free")


def test_what_becomes_free_is_kept_for_the_one_that_waits() -> None:
    new, old = model("new", 10, "stopped"), model("old", 12)
    view = CapacityView({GPU: 0}, [new, old])
    make_room(new, [old], view, NOW)
    assert view.soon == {GPU: 2}


# ---------------------------------------------------------------- sleep or stop


def test_victims_sleep_where_they_can_and_there_is_memory_for_it() -> None:
    new = model("new", 9, "stopped")
    assert steps_of(new, sleeper("a"), free={GPU: 0, HOST: 8})[0] == [("sleep", "a")]
    assert steps_of(new, sleeper("a"), free={GPU: 0, HOST: 7})[0] == [("stop", "a")]


def test_one_that_would_keep_too_much_asleep_is_stopped() -> None:
    new = model("new", 10, "stopped")
    assert steps_of(new, sleeper("a", kept=1), free={GPU: 0, HOST: 99})[0] == [("stop", "a")]


def test_where_not_all_can_sleep_the_quickest_to_load_is_stopped() -> None:
    new = model("new", 18, "stopped")
    both = sleeper("quick", load_s=2.0), sleeper("slow", load_s=20.0)
    steps, _ = steps_of(new, *both, free={GPU: 0, HOST: 8})
    assert sorted(steps) == [("sleep", "slow"), ("stop", "quick")]


def test_a_model_that_is_removed_counts_as_free_soon() -> None:
    one = sleeper("a", 10, host=8, kept=2)
    view = CapacityView({GPU: 0, HOST: 20}, [one])
    assert remove_model(one, view, "idle", sleeps=True) == SwapAction("sleep", "a", "idle")
    assert (view.now, view.soon) == ({GPU: 0, HOST: 12}, {GPU: 8, HOST: 12})
    view = CapacityView({GPU: 0, HOST: 20}, [one])
    assert remove_model(one, view, "idle", sleeps=False) == SwapAction("stop", "a", "idle")
    assert (view.now, view.soon) == ({GPU: 0, HOST: 20}, {GPU: 10, HOST: 20})


# ---------------------------------------------------------------- for one that loads already


def test_others_go_for_one_that_lacks_memory_while_it_loads() -> None:
    loading = model("new", 10, "coming", lacks={GPU: 4})
    old = model("old", 5)
    view = CapacityView({GPU: 0}, [loading, old])
    steps, waits = relieve(loading, [old], view, NOW)
    assert [(one.kind, one.model, one.reason) for one in steps] == [
        ("stop", "old", "evicted for new, which lacks 4 B")
    ]
    assert waits == "it lacks 4 B; it waits for old"


@pytest.mark.parametrize(("lacks", "size"), [({}, 5), ({GPU: 6}, 5)])
def test_nobody_goes_for_one_that_lacks_nothing_or_more_than_all_hold(
    lacks: dict[str, int], size: int
) -> None:
    loading, old = model("new", 10, "coming", lacks=lacks), model("old", size)
    assert relieve(loading, [old], CapacityView({GPU: 0}, [loading, old]), NOW) == ([], "")
