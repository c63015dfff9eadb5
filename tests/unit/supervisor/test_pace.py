"""The pace of the supervisor's looks: few at rest, and at once when something happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.supervisor import pace
from servekit.supervisor.pace import TICK_AT_REST_S, TICK_S, Pace
from servekit.supervisor.supervisor import OWED_S, SLEPT_S, Supervisor, ticking
from tests.passing_time import Clock, passing_time


@pytest.fixture
async def clock() -> AsyncIterator[Clock]:
    with passing_time() as clock:
        yield clock


async def count_looks(clock: Clock, one: Pace, for_s: float) -> list[tuple[float, bool]]:
    looks: list[tuple[float, bool]] = []
    task = asyncio.create_task(ticking(lambda slept: looks.append((clock(), slept)), one))
    await clock.pass_time(for_s)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return looks


async def test_at_rest_the_looks_are_few(clock: Clock) -> None:
    looks = await count_looks(clock, Pace(), pace.REST_AFTER_S + 100 * TICK_AT_REST_S)
    assert len(looks) == pytest.approx(pace.REST_AFTER_S / TICK_S + 100, abs=5)
    assert not any(slept for _, slept in looks)


@pytest.mark.parametrize("is_activity", [True, False])
async def test_what_happens_ends_the_rest_at_once(clock: Clock, is_activity: bool) -> None:
    one = Pace()
    looks: list[float] = []
    task = asyncio.create_task(ticking(lambda slept: looks.append(clock()), one))
    await clock.pass_time(pace.REST_AFTER_S + 2 * TICK_AT_REST_S)
    looks.clear()
    await clock.pass_time(TICK_AT_REST_S / 2)
    at_s, before = clock(), len(looks)
    (one.note_activity if is_activity else one.rouse)()
    await clock.pass_time(1.0)
    assert looks[before] - at_s <= 1.1 * TICK_S + 0.001
    assert len(looks) - before in ((5, 6) if is_activity else (1, 2))
    task.cancel()


async def test_the_rest_is_no_longer_than_a_timeout_allows(clock: Clock) -> None:
    looks = await count_looks(clock, Pace(lambda: 1.0), pace.REST_AFTER_S + 100)
    assert len(looks) == pytest.approx(pace.REST_AFTER_S / TICK_S + 100, abs=5)


async def test_a_suspension_is_noticed_at_rest_too(clock: Clock) -> None:
    one = Pace()
    looks: list[bool] = []
    task = asyncio.create_task(ticking(looks.append, one))
    await clock.pass_time(pace.REST_AFTER_S + 2 * TICK_AT_REST_S)
    assert True not in looks
    clock.now_s += TICK_AT_REST_S + 2 * SLEPT_S
    await clock.pass_time(TICK_AT_REST_S)
    assert looks.count(True) == 1
    task.cancel()


@pytest.mark.parametrize(("silent_s", "rests"), [(0.0, True), (0.5, True), (OWED_S + 0.1, False)])
async def test_a_process_that_does_not_answer_ends_the_rest(
    clock: Clock, silent_s: float, rests: bool
) -> None:
    """Else its end would be found later than its timeout says."""
    one = Pace()
    clock.now_s += pace.REST_AFTER_S + 1
    some: Any = SimpleNamespace(
        _gateways=[],
        _deployments=SimpleNamespace(replicas=list),
        _lives=lambda: [SimpleNamespace(silent_s=0.0), SimpleNamespace(silent_s=silent_s)],
        _requests_seen=0,
        _pace=one,
    )
    Supervisor._note_activity(some)
    assert one.is_at_rest() == rests
