"""How often an endpoint is asked: the account, and those who wait for it."""

from __future__ import annotations

import asyncio

import pytest

from servekit.engines.remote import rate_limiter
from servekit.engines.remote.rate_limiter import RateLimiter, Window


def test_as_many_requests_as_allowed_in_any_minute() -> None:
    window, now_s, sent = Window(5, None), 0.0, list[float]()
    while len(sent) < 50:
        wait_s = window.wait_s(1, now_s)
        now_s += wait_s
        if not wait_s:
            window.add(1, now_s)
            sent.append(now_s)
            now_s += 0.7
    for at_s in sent:
        assert sum(at_s <= other < at_s + 60 for other in sent) <= 5
    assert sent[-1] < 9.1 * 60  # and hardly fewer


def test_tokens_count_as_they_were_told_in_the_end() -> None:
    window = Window(None, 100)
    first = window.add(90, 0.0)
    assert window.wait_s(20, 10.0) == 50.0
    first.tokens = 30
    assert window.wait_s(20, 10.0) == 0.0
    window.add(70, 10.0)
    assert window.wait_s(1, 59.0) == 1.0
    assert window.wait_s(1, 60.0) == 0.0


def test_a_request_that_would_never_fit_goes_alone() -> None:
    window = Window(None, 100)
    assert window.wait_s(1000, 0.0) == 0.0
    window.add(1000, 0.0)
    assert window.wait_s(1, 1.0) == 59.0
    assert window.wait_s(1000, 60.0) == 0.0


def test_without_limits_nothing_is_kept() -> None:
    window = Window(None, None)
    window.add(10**9, 0.0)
    assert window.wait_s(10**9, 0.0) == 0.0
    assert not window._sent


async def test_who_waits_goes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limiter, "WINDOW_S", 0.1)
    gate, order = RateLimiter(2, None), list[int]()

    async def ask(number: int) -> None:
        await gate.await_turn(1)
        order.append(number)

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(*map(ask, range(7)))
    assert order == list(range(7))
    assert loop.time() - began_s >= 0.3
    assert gate.waiting == 0


async def test_one_who_gives_up_lets_the_next_one_go() -> None:
    gate = RateLimiter(1, None)
    await gate.await_turn(1)
    first, second = (asyncio.ensure_future(gate.await_turn(1)) for _ in range(2))
    await asyncio.sleep(0)
    assert gate.waiting == 2
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert gate.waiting == 1
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert gate.waiting == 0


async def test_tokens_that_were_not_needed_are_free_at_once() -> None:
    gate = RateLimiter(None, 100)
    sent = await gate.await_turn(100)
    waiting = asyncio.ensure_future(gate.await_turn(50))
    await asyncio.sleep(0)
    gate.correct_estimate(sent, 10)
    async with asyncio.timeout(60):
        await waiting


async def test_all_wait_while_the_endpoint_wants_to_be_left_alone() -> None:
    gate = RateLimiter(None, None)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    gate.pause_for(0.05)
    await asyncio.gather(gate.await_turn(1), gate.await_turn(1))
    assert loop.time() - began_s >= 0.05


async def test_a_pause_counts_as_waiting() -> None:
    gate = RateLimiter(None, None)
    pause = asyncio.ensure_future(gate.pause(60.0))
    await asyncio.sleep(0)
    assert gate.waiting == 1
    pause.cancel()
    await asyncio.gather(pause, return_exceptions=True)
    assert gate.waiting == 0
