"""The work of one client, in this loop, against a real socket."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterable
from itertools import islice, pairwise
from typing import Any

import pytest

from servekit.bench.client.client_protocol import Asking, ClientLoad, Record, Target
from servekit.bench.lengths import Lengths
from servekit.bench.load_generator import PAUSE_S, Driver, poisson_arrivals
from tests.unit.bench.serving import (
    CLOSE,
    EVENTS,
    chunked,
    completion,
    delta,
    serving,
    stream_head,
    whole,
)


def order(target: Target, **changes: Any) -> ClientLoad:
    asked = {"prompt_tokens": 8, "output_tokens": 4, "turns": 1}
    told = {name: changes.pop(name, value) for name, value in asked.items()}
    lengths: dict[str, Any] = {name: Lengths("fixed", value) for name, value in told.items()}
    asking = Asking(
        api=changes.pop("api", "chat"), model="m", stream=changes.pop("stream", True), **lengths
    )
    fields: dict[str, Any] = {
        "index": 0,
        "clients": 1,
        "seed": 1,
        "users": 2,
        "rate": None,
        "requests": None,
        "duration_s": None,
        "warmup": 0,
        "timeout_s": 10.0,
    }
    return ClientLoad(target=target, asking=asking, **{**fields, **changes})


async def drive(told: ClientLoad) -> tuple[list[Record], Driver]:
    driver = Driver(told)
    await driver.warm_up()
    async with asyncio.timeout(20):
        await driver.measure(time.monotonic())
    driver.close()
    return driver.report().records, driver


def streams(_: dict[str, Any]) -> Iterable[bytes]:
    yield chunked(EVENTS)


async def test_a_closed_loop_asks_so_often_with_so_many_at_once() -> None:
    async with serving(streams) as server:
        records, _ = await drive(order(server.target, users=3, requests=10))
    assert [record.outcome for record in records] == ["ok"] * 10
    assert len(server.bodies) == 10
    assert server.connections == 3
    assert {body["max_tokens"] for body in server.bodies} == {4}
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 10


async def test_the_warm_up_is_asked_and_not_counted() -> None:
    async with serving(streams) as server:
        records, _ = await drive(order(server.target, requests=4, warmup=3))
    assert (len(records), len(server.bodies)) == (4, 7)


async def test_an_open_loop_waits_for_nobody() -> None:
    def slow(body: dict[str, Any]) -> Iterable[bytes]:
        yield stream_head("transfer-encoding: chunked")
        for _ in range(60):  # 5 ms each
            yield b"2\r\n:\n\r\n"
        yield chunked(EVENTS).partition(b"\r\n\r\n")[2]

    async with serving(slow) as server:
        began = time.monotonic()
        told = order(server.target, users=None, rate=200.0, requests=40)
        records, driver = await drive(told)
        took_s = time.monotonic() - began
    assert [record.outcome for record in records] == ["ok"] * 40
    assert took_s < 40 * 0.3 / 2, "one after the other it takes twelve seconds"
    assert sum(driver.sum_up().late.values()) == 40


async def test_latencies_are_from_when_it_should_have_been_sent() -> None:
    async with serving(streams) as server:
        driver = Driver(order(server.target, users=None, rate=1000.0, requests=20))
        loop = asyncio.get_running_loop()
        loop.call_later(0.005, time.sleep, 0.2)  # a loop that is held up
        await driver.measure(time.monotonic())
        driver.close()
    slowest = max(record.ended - record.began for record in driver.report().records)
    assert slowest > 0.15
    assert max(driver.sum_up().lags) > 0


async def test_when_time_is_over_nothing_is_asked_and_the_last_answers_are_awaited() -> None:
    def slow(body: dict[str, Any]) -> Iterable[bytes]:
        yield stream_head("transfer-encoding: chunked")
        for _ in range(60):
            event = delta("a")
            yield b"%x\r\n%s\r\n" % (len(event), event)
        event = delta("b", "stop")
        yield b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)

    async with serving(slow) as server:
        records, driver = await drive(order(server.target, users=2, duration_s=0.15))
    assert [record.outcome for record in records] == ["ok", "ok"]
    assert all(0 < record.chunks_in_time < record.chunks == 61 for record in records)
    ended_at = driver.sum_up().ended_at
    assert all(record.ended > ended_at for record in records)


async def test_a_conversation_tells_what_was_said() -> None:
    async with serving(streams) as server:
        records, _ = await drive(order(server.target, users=1, requests=6, turns=3))
    said = [[message["role"] for message in body["messages"]] for body in server.bodies]
    turns = [["user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]]
    assert said == turns * 2
    assert server.bodies[2]["messages"][1] == {"role": "assistant", "content": "abc"}
    assert server.bodies[2]["messages"][0] == server.bodies[0]["messages"][0]
    assert len(records) == 6


async def test_what_takes_too_long_is_a_timeout() -> None:
    async with serving(lambda _: [stream_head("transfer-encoding: chunked")]) as server:
        records, _ = await drive(order(server.target, requests=2, timeout_s=0.2))
    assert [record.outcome for record in records] == ["timeout"] * 2
    assert "no whole answer within 0.2 s" in records[0].message


async def test_a_user_who_got_an_error_waits_a_moment() -> None:
    async with serving(streams) as server:
        target = server.target
    began = time.monotonic()
    records, _ = await drive(order(target, users=1, requests=4))
    assert [record.outcome for record in records] == ["connect"] * 4
    assert time.monotonic() - began > 3 * PAUSE_S


@pytest.mark.parametrize(
    ("status", "outcome"), [("429 Too Many Requests", "http"), ("200 OK", "ok")]
)
async def test_the_status_is_kept(status: str, outcome: str) -> None:
    body = completion() if outcome == "ok" else {"error": {"message": "later"}}
    async with serving(lambda _: [whole(body, status)]) as server:
        records, _ = await drive(order(server.target, requests=2, stream=False))
    assert [(record.outcome, record.status) for record in records] == [
        (outcome, int(status[:3]))
    ] * 2


async def test_a_kept_connection_that_was_just_closed_is_nobodys_fault() -> None:
    count = 0

    def once(_: dict[str, Any]) -> Iterable[bytes]:
        nonlocal count
        count += 1
        yield chunked(EVENTS) if count % 2 else CLOSE

    async with serving(once) as server:
        records, driver = await drive(order(server.target, users=1, requests=3))
    assert [record.outcome for record in records] == ["ok"] * 3
    assert driver.sum_up().resent == 2


async def test_a_stop_leaves_what_is_under_way_unfinished() -> None:
    async with serving(lambda _: [stream_head("transfer-encoding: chunked")]) as server:
        driver = Driver(order(server.target, users=3, requests=50))
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, driver.stop_now)
        await driver.measure(time.monotonic())
        driver.close()
    assert [record.outcome for record in driver.report().records] == ["unfinished"] * 3


async def test_clients_share_the_conversations_without_a_word() -> None:
    async with serving(streams) as server:
        for index in range(2):
            await drive(order(server.target, requests=4, index=index, clients=2))
        mine = [body["messages"][0]["content"] for body in server.bodies]
        await drive(order(server.target, requests=8))
    alone = [body["messages"][0]["content"] for body in server.bodies[8:]]
    assert sorted(mine) == sorted(alone)


def arrivals(rate: float, count: int, seed: str = "1") -> list[float]:
    return list(islice(poisson_arrivals(rate, random.Random(seed)), count))


def test_gaps_are_exponential() -> None:
    times = arrivals(50.0, 20_000)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.03)  # as its mean
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = -math.log(1 - share) / 50.0
        assert sorted(gaps)[int(share * len(gaps))] == pytest.approx(expected, rel=0.08)


def test_gaps_are_independent() -> None:
    gaps = [b - a for a, b in pairwise(arrivals(1.0, 20_000))]
    assert abs(statistics.correlation(gaps[:-1], gaps[1:])) < 0.03


def test_several_clients_make_one_process_of_the_whole_rate() -> None:
    times = sorted(t for n in range(4) for t in arrivals(25.0, 5_000, str(n)) if t < 150)
    counts = [sum(second <= t < second + 1 for t in times) for second in range(150)]
    assert statistics.mean(counts) == pytest.approx(100, rel=0.03)
    assert statistics.variance(counts) == pytest.approx(100, rel=0.35)  # Poisson's is its mean
