"""A worker that sleeps and wakes: the echo engine behind it, with requests under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import LoadError
from servekit.protocol.messages import SamplingParams
from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.worker.sleep import Answer, SleepControl
from tests.polling import poll_async
from tests.unit.gateway.conftest import ENDLESS, ENDLESS_TOKENS
from tests.unit.worker.serving import Client, serving, spec


class Worker:
    """A worker's inside, and what it answers to orders."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answers: list[Answer] = []
        self.fatal: list[str] = []
        self.probe_error: Exception | None = None
        self.asleep_at_probe: list[bool] = []
        self.control = SleepControl(
            client.runner, self.answers.append, self._probe, self.fatal.append
        )

    async def _probe(self) -> None:
        self.asleep_at_probe.append(self.client.runner.asleep)
        if self.probe_error is not None:
            raise self.probe_error

    async def carry_out(self, order: Sleep | Wake) -> Answer:
        count = len(self.answers)
        self.control.handle_order(order)
        await poll_async("it answers", lambda: len(self.answers) > count)
        return self.answers[-1]


Open = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def worker(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def open_worker(**options: Any) -> AsyncIterator[Worker]:
        async with serving(spec(tmp_path, **options)) as client:
            yield Worker(client)

    return open_worker


async def test_an_idle_worker_sleeps_wakes_and_serves(worker: Open) -> None:
    async with worker() as one:
        assert isinstance(await one.carry_out(Sleep()), Asleep)
        assert one.client.runner.asleep and not one.asleep_at_probe
        assert isinstance(await one.carry_out(Wake()), Awake)
        assert one.asleep_at_probe == [False], "the probe takes the way of requests"
        assert (await one.client.answer(one.client.send(prompt="a b")))[-1].finish
        assert not one.fatal


async def test_it_finishes_its_requests_first_and_takes_no_more(worker: Open) -> None:
    async with worker(**ENDLESS) as one:
        runs = one.client.send(SamplingParams(max_tokens=ENDLESS_TOKENS), prompt="a")
        await poll_async("it runs", lambda: runs in one.client.deltas)
        one.control.handle_order(Sleep())
        await poll_async("it refuses", lambda: one.client.runner.asleep)
        late = one.client.send(prompt="b")
        assert (await one.client.failure(late)).code == "worker_lost"
        assert not one.answers
        one.client.cancel(runs)
        await poll_async("it sleeps", lambda: bool(one.answers))
        assert isinstance(one.answers[0], Asleep)


async def test_an_engine_that_cannot_sleep_serves_on(worker: Open) -> None:
    async with worker(sleep_error="no room in memory") as one:
        assert await one.carry_out(Sleep()) == SleepFailed("no room in memory")
        assert not one.client.runner.asleep and not one.fatal
        assert (await one.client.answer(one.client.send(prompt="a b")))[-1].finish


async def test_an_engine_that_cannot_wake_stays_asleep(worker: Open) -> None:
    async with worker(wake_error="the GPU is full") as one:
        await one.carry_out(Sleep())
        assert await one.carry_out(Wake()) == SleepFailed("the GPU is full")
        assert one.client.runner.asleep and not one.asleep_at_probe and not one.fatal


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [
        (LoadError("no token came", permanent=False), True),
        (OSError("the socket is gone"), True),
        (KeyError("a fault of ours"), False),
    ],
)
async def test_an_engine_that_wakes_without_a_token_is_broken(
    worker: Open, error: Exception, is_broken: bool
) -> None:
    async with worker() as one:
        await one.carry_out(Sleep())
        one.probe_error = error
        answer = await one.carry_out(Wake())
        assert isinstance(answer, SleepFailed) and str(error) in answer.message
        assert one.fatal == ([str(error)] if is_broken else [])


async def test_no_adapter_is_loaded_meanwhile(worker: Open) -> None:
    async with worker() as one:
        async with one.client.runner.engine_turn:
            one.control.handle_order(Sleep())
            await asyncio.sleep(0)
            assert not one.client.runner.asleep
        await poll_async("it sleeps", lambda: bool(one.answers))
