"""Many deadlines, one timer: each call ends at its own, in whatever order they come."""

from __future__ import annotations

import asyncio
import time

from servekit.errors import DeadlineExceeded
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.timeouts import Deadlines
from servekit.protocol.messages import SamplingParams


def call(limit_s: float) -> InflightRequest:
    made = InflightRequest("m", SamplingParams())
    made.limit_s = limit_s
    return made


async def test_each_call_expires_at_its_own_deadline_whatever_the_order() -> None:
    calls = {call(limit_s) for limit_s in (0.3, 0.05, 0.15, 60.0)}
    late_s: dict[float, float] = {}
    over = asyncio.Event()

    def expire(expired: InflightRequest) -> None:
        calls.remove(expired)
        expired.fail(DeadlineExceeded("late"))
        late_s[expired.limit_s] = time.monotonic() - expired.created_s - expired.limit_s
        if len(late_s) == 3:
            over.set()

    deadlines = Deadlines(calls, expire)
    for one in sorted(calls, key=lambda one: -one.limit_s):
        deadlines.watch(one)
    async with asyncio.timeout(10):
        await over.wait()
    assert list(late_s) == [0.05, 0.15, 0.3]
    assert all(late >= 0 for late in late_s.values())
    assert [one.limit_s for one in calls] == [60.0]


async def test_a_call_that_ends_in_time_does_not_expire_and_the_next_one_does() -> None:
    calls: set[InflightRequest] = set()
    expired: asyncio.Queue[InflightRequest] = asyncio.Queue()

    def expire(late: InflightRequest) -> None:
        calls.remove(late)
        expired.put_nowait(late)

    deadlines = Deadlines(calls, expire)
    in_time, late = call(0.02), call(0.1)
    for one in (in_time, late):
        calls.add(one)
        deadlines.watch(one)
    calls.remove(in_time)
    async with asyncio.timeout(10):
        assert await expired.get() is late
    again = call(0.02)  # nothing was open: the timer has to start anew
    calls.add(again)
    deadlines.watch(again)
    async with asyncio.timeout(10):
        assert await expired.get() is again
    assert expired.empty()
