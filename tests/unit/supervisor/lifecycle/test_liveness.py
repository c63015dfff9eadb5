"""The table of stall.py, row by row, with a clock that is only a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servekit.protocol.messages import Pong, WorkerState
from servekit.supervisor.lifecycle.liveness import (
    FORGIVEN_S,
    KV_STEP,
    PARDONED_S,
    Liveness,
    Timeouts,
)

TIMEOUTS = Timeouts(stall_s=10.0, load_s=100.0)


def pulse(age_s: float = 0.0, running: int = 0) -> Liveness:
    one = Liveness(0.0)
    one.answered(Pong(1, age_s, running, 0, 0.0))
    return one


@pytest.mark.parametrize(
    ("state", "age_s", "words"),
    [
        ("ready", 10.0, ""),
        ("ready", 12.34, "stalled: no progress for 12.3 s with 3 requests running"),
        ("loading", 12.34, ""),
        ("loading", 100.1, "stalled: no progress for 100.1 s while loading"),
        ("starting", 100.1, "stalled: no progress for 100.1 s while loading"),
        ("stalled", 1000.0, ""),
        ("draining", 12.34, "stalled: no progress for 12.3 s with 3 requests running"),
        ("asleep", 12.34, "stalled: no progress for 12.3 s with 3 requests running"),
        ("backoff", 1000.0, ""),
    ],
)
def test_no_progress(state: WorkerState, age_s: float, words: str) -> None:
    assert pulse(age_s, running=3).verdict(state, TIMEOUTS, 1.0) == words


@pytest.mark.parametrize(
    ("state", "after_s", "words"),
    [
        ("ready", 10.0, ""),
        ("ready", 10.1, "silent: no answer to a ping for 10.1 s"),
        ("loading", 99.0, ""),
        ("loading", 100.5, "silent: no answer to a ping for 100.5 s while loading"),
        ("draining", 10.1, "silent: no answer to a ping for 10.1 s"),
        ("asleep", 10.1, "silent: no answer to a ping for 10.1 s"),
        ("stalled", 1000.0, ""),
    ],
)
def test_silence(state: WorkerState, after_s: float, words: str) -> None:
    one = pulse()
    one.asked(50.0)
    one.asked(50.0 + after_s / 2)  # the oldest one counts
    assert one.verdict(state, TIMEOUTS, 50.0 + after_s) == words


def test_an_adapter_may_take_as_long_as_a_model_but_pings_are_answered_meanwhile() -> None:
    timeouts = replace(TIMEOUTS, loads_adapter=True)
    assert pulse(99.0).verdict("ready", timeouts, 1.0) == ""
    assert pulse(100.5).verdict("ready", timeouts, 1.0).startswith("stalled: no progress")
    one = pulse(99.0)
    one.asked(50.0)
    assert one.verdict("ready", timeouts, 60.1).startswith("silent: no answer")


def test_who_was_not_asked_owes_nothing() -> None:
    assert pulse().verdict("ready", TIMEOUTS, 1e6) == ""


def test_an_answer_settles_all_pings() -> None:
    one = pulse()
    one.asked(1.0)
    one.asked(2.0)
    one.answered(Pong(1, 0.0, 1, 0, 0.0))
    assert one.silent_s(500.0) == 0.0
    one.asked(500.0)
    assert one.silent_s(501.0) == 1.0


def test_our_own_sleep_is_nobody_elses_fault() -> None:
    one = pulse(age_s=50.0, running=1)  # a container that was frozen: its clock ran on, too
    one.asked(1.0)
    one.restart_timers(60.0)
    assert one.verdict("ready", TIMEOUTS, 60.0 + FORGIVEN_S - 0.1) == ""
    assert one.silent_s(60.5) == 0.5
    assert "stalled" in one.verdict("ready", TIMEOUTS, 60.0 + FORGIVEN_S), "it had time to answer"


def test_who_has_loaded_an_adapter_is_pardoned_for_a_while() -> None:
    one = pulse(age_s=50.0, running=1)
    one.asked(1.0)
    one.reset_deadline(60.0)
    assert one.verdict("ready", TIMEOUTS, 60.0 + PARDONED_S - 0.1) == ""
    assert "stalled" in one.verdict("ready", TIMEOUTS, 60.0 + PARDONED_S)


def test_pings_are_due_by_the_last_one() -> None:
    one = Liveness(0.0)
    assert not one.due(0.9, 1.0)
    assert one.due(1.0, 1.0)
    one.asked(1.0)
    assert not one.due(1.5, 1.0)


def test_one_request_is_one_request() -> None:
    assert pulse(11.0, 1).verdict("ready", TIMEOUTS, 1.0).endswith("with 1 request running")


def test_an_answer_tells_whether_it_is_news() -> None:
    liveness = Liveness(0.0)
    assert not liveness.answered(Pong(1, 0.0, 0, 0, 0.0))
    assert liveness.answered(Pong(2, 0.0, 1, 0, 0.0))
    assert not liveness.answered(Pong(3, 0.7, 1, 0, 0.0))
    assert liveness.answered(Pong(4, 0.7, 1, 0, 0.0, trouble="away"))


def test_how_full_its_cache_is_is_told_in_steps() -> None:
    """Gateways are sent all there is on each change: a cache that fills is told of a few times."""
    one = pulse()
    told: list[float] = []
    for percent in (*range(100), *range(100, -1, -1)):
        one.answered(Pong(1, 0.0, 1, 0, percent / 100))
        assert abs(one.kv_used - percent / 100) < KV_STEP
        told += [one.kv_used] if told[-1:] != [one.kv_used] else []
    assert 18 < len(told) < 23
    assert told[-1] == 0.0, "empty is told exactly"
