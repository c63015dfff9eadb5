"""The policy of scaling: each line of its table, what always holds, and what it does under load."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.supervisor.autoscaling.policy import (
    HOLD_S,
    NEXT,
    SHY_S,
    Limits,
    Past,
    ScalingAction,
    ScalingInput,
    decide,
)
from tests.unit.supervisor.scaled import Model, Outcome, Rate, ramp, sawtooth, steady, step

LIMITS = Limits(1, 8, wait_s=1.0, kv_used=0.9, down_s=100.0)
WAITS = ScalingInput(serving=2, slots=4, queued=6, waited_s=1.5, running=8)
CALM = ScalingInput(serving=3, slots=4, running=1)


def looked(
    facts: ScalingInput, for_s: int, past: Past | None = None
) -> list[tuple[float, ScalingAction]]:
    """The same facts for a while, as if no step came to anything; when each step was."""
    past, steps = past or Past(), []
    for now in range(for_s + 1):
        decided, past = decide(LIMITS, facts, past, float(now))
        if decided is not None:
            steps.append((float(now), decided))
    return steps


def first(facts: ScalingInput) -> tuple[float, int] | None:
    """When the first step is, and which."""
    return next(((at, step.change) for at, step in looked(facts, 300)), None)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (WAITS, (0, 2)),
        (replace(WAITS, queued=1), (0, 1)),
        (replace(WAITS, queued=400), (0, 2)),  # no more than there are
        (replace(WAITS, serving=7, queued=400), (0, 1)),  # no more than `max`
        (replace(WAITS, serving=8), None),
        (replace(WAITS, waited_s=0.9), None),
        (replace(WAITS, coming=1), None),
        (replace(WAITS, failing=1), None),
        (replace(WAITS, serving=0), None),
        (replace(WAITS, serving=0, coming=1), None),
        (replace(CALM, kv_used=0.95, running=9), (HOLD_S, 1)),
        (replace(CALM, held=5, running=9), (HOLD_S, 2)),
        (replace(CALM, kv_used=0.85, running=9), None),
        (CALM, (100, -1)),
        (replace(CALM, coming=1), None),
        (replace(CALM, serving=1), None),
        (replace(CALM, serving=2, failing=1), (100, -1)),
        (replace(CALM, serving=1, failing=1), (100, -1)),  # which serves nobody
        (replace(CALM, running=5), None),  # 5 on average are often more than 8
        (replace(CALM, running=4), (100, -1)),
        (replace(CALM, kv_used=0.5), None),  # two would have 0.75 each
        (replace(CALM, kv_used=0.4), (100, -1)),
        (replace(CALM, queued=1, waited_s=0.6), None),
        (replace(CALM, wanted_elsewhere="b", running=12), (0, -1)),
        (replace(CALM, serving=1, wanted_elsewhere="b"), None),
        (replace(CALM, unborn="no such file"), (0, -1)),
        (replace(CALM, serving=0, unborn="no such file"), (0, -1)),
    ],
)
def test_each_line(facts: ScalingInput, expected: tuple[float, int] | None) -> None:
    assert first(facts) == expected


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (WAITS, "6 waited 1.5 s"),
        (replace(CALM, kv_used=0.95), "KV caches were 95% full for 5 s"),
        (replace(CALM, held=3), "3 waited at workers for 5 s"),
        (CALM, "2 could have carried it for 100 s"),
        (replace(CALM, wanted_elsewhere="b"), "b waits for its memory"),
    ],
)
def test_it_says_why(facts: ScalingInput, reason: str) -> None:
    assert looked(facts, 100)[0][1].reason == reason


@pytest.mark.parametrize(("least", "changes"), [(1, [-1]), (2, [-1]), (3, [])])
def test_what_the_file_wants_at_least_stays(least: int, changes: list[int]) -> None:
    past, steps = Past(), []
    for now in range(110):
        decided, past = decide(replace(LIMITS, least=least), CALM, past, float(now))
        steps += [decided.change] if decided else []
    assert steps == changes


def test_what_will_soon_be_gone_takes_no_replica() -> None:
    def drained(by: int) -> list[int]:
        past, steps = Past(), []
        for look in range(8):
            waiting = 200 - by * look
            facts = replace(WAITS, queued=waiting, coming=look < 3)
            decided, past = decide(LIMITS, facts, past, float(look))
            steps += [decided.change] if decided else []
        return steps

    assert drained(20) == []
    assert drained(2) != []


def test_after_one_has_gone_the_next_goes_sooner() -> None:
    assert [at for at, _ in looked(CALM, 150)] == [100, 100 + 100 * NEXT, 100 + 200 * NEXT]


def test_after_one_that_did_not_come_up_none_is_added_for_longer_each_time() -> None:
    past, waited, now = Past(), [], 0.0
    for _ in range(3):
        gone, past = decide(LIMITS, replace(WAITS, unborn="no"), past, now)
        assert gone == ScalingAction(-1, "it did not come up: no")
        begun, added = now, None
        while added is None:
            now += 1
            added, past = decide(LIMITS, WAITS, past, now)
        waited.append(now - begun)
    assert waited == [SHY_S, 2 * SHY_S, 4 * SHY_S]
    _, past = decide(LIMITS, CALM, past, now + 3000)
    assert past.shy_s == SHY_S, "it is long ago"


# ---------------------------------------------------------------- what always holds

ANY = st.builds(
    ScalingInput,
    serving=st.integers(0, 9),
    coming=st.integers(0, 2),
    failing=st.integers(0, 2),
    slots=st.integers(1, 64),
    queued=st.integers(0, 500),
    waited_s=st.floats(0, 100),
    held=st.integers(0, 50),
    running=st.integers(0, 500),
    kv_used=st.floats(0, 1),
    wanted_elsewhere=st.sampled_from(["", "", "b"]),
    unborn=st.sampled_from(["", "", "", "no"]),
)
GAPS = st.floats(0, 200)


@given(st.lists(st.tuples(ANY, GAPS), max_size=25), st.integers(1, 3), st.integers(3, 9))
@settings(max_examples=60, deadline=None)
def test_whatever_the_facts(seen: list[tuple[ScalingInput, float]], least: int, most: int) -> None:
    own = Limits(least, most, down_s=60.0)
    past, now, up_at = Past(), 0.0, -math.inf
    for facts, gap_s in seen:
        now += gap_s
        decided, past = decide(own, facts, past, now)
        if decided is None:
            continue
        count = facts.living + decided.change
        assert decided.reason
        if decided.change > 0:
            assert count <= most
            assert decided.change <= facts.serving
            assert not facts.coming
            assert not facts.failing
            up_at = now
        elif not facts.unborn:
            assert count >= least
            assert not (facts.coming and not facts.wanted_elsewhere)
            assert facts.wanted_elsewhere or now - up_at >= own.down_s, "it has just been added"


# ---------------------------------------------------------------- under load

CAPACITY = 1.0  # requests a second that one replica serves


def scaled(rate: Rate, most: float, *, load_s: float = 20.0, seed: int = 1) -> Outcome:
    return Model(
        rate, most, Limits(1, 8, down_s=60.0), load_s=load_s, service_s=4.0, seed=seed
    ).run(900)


def fixed(rate: Rate, most: float, count: int) -> Outcome:
    return Model(rate, most, None, begins=count, service_s=4.0, seed=1).run(900)


LOADS: dict[str, tuple[Rate, float]] = {
    "step": (step(0.5 * CAPACITY, 4 * CAPACITY, 200, 500), 4 * CAPACITY),
    "ramp": (ramp(0.3 * CAPACITY, 5 * CAPACITY, 700), 5 * CAPACITY),
    "sawtooth": (sawtooth(0.3 * CAPACITY, 4 * CAPACITY, 300), 4 * CAPACITY),
}


@pytest.mark.parametrize("name", LOADS)
def test_it_waits_little_and_costs_less_than_the_most(name: str) -> None:
    rate, most = LOADS[name]
    found, least, largest = scaled(rate, most), fixed(rate, most, 1), fixed(rate, most, 8)
    assert found.p99_s < 2 * 20.0, "as long as two loads take, for each may double what there is"
    assert found.p99_s < least.p99_s / 10
    assert found.replica_s < 0.8 * largest.replica_s
    assert found.turns <= 2 * 900 / 60


def test_a_quick_load_is_hardly_waited_for() -> None:
    assert scaled(*LOADS["step"], load_s=2.0).p99_s < 3.0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.85, 1.5, 2.5, 6.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_stays_as_it_is_has_no_replica_come_and_go(share: float, seed: int) -> None:
    found = scaled(steady(share * CAPACITY), share * CAPACITY, seed=seed)
    assert found.turns <= 6, "chance may look like a change now and then"
    assert found.ups <= 6
    assert found.most >= share


def test_waves_shorter_than_the_patience_are_ridden_out() -> None:
    rate = sawtooth(0.5 * CAPACITY, 3 * CAPACITY, 15)
    assert scaled(rate, 3 * CAPACITY).turns <= 6, "of 60 waves"


def test_calm_takes_all_but_the_least() -> None:
    found = scaled(step(0.05 * CAPACITY, 4 * CAPACITY, 0, 200), 4 * CAPACITY)
    assert found.changes[-1][1] == 1
    assert 200 < found.changes[-1][0] < 200 + 60 * (2 + 8 * NEXT)
