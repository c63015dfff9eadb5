"""The work that a gateway holds: begun once, ended with its lease, and looked for when woken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.gateway.storage import leases
from servekit.gateway.storage.leases import LEASE_S, LOOK_AT_REST_S, LOOK_EVERY_S, LeaseRunner
from servekit.gateway.storage.store_file import ResponsesUnavailable
from tests.passing_time import passing_time
from tests.polling import poll_async


@dataclass(frozen=True)
class Row:
    id: str


class Runner(LeaseRunner[Row]):
    """Holds what `held` says; each row's work lasts until `finish` has its id."""

    def __init__(self, *, has_peers: bool = True) -> None:
        self.rules_changed: list[Callable[[], None]] = []
        access = SimpleNamespace(on_change=self.rules_changed.append)
        self.listeners: list[Callable[[], None]] = []
        sources = SimpleNamespace(has_peers=has_peers)
        router: Any = SimpleNamespace(access=access, listeners=self.listeners, sources=sources)
        super().__init__(router)
        self.held: list[Row] | None = []
        self.fails = False
        self.finish: set[str] = set()
        self.looks = 0
        self.begun: Counter[str] = Counter()
        self.cancelled: list[str] = []

    async def claim(self) -> list[Row] | None:
        self.looks += 1
        if self.fails:
            raise ResponsesUnavailable("the disk is gone")
        return self.held

    async def work(self, row: Row) -> None:
        self.begun[row.id] += 1
        try:
            await poll_async("it is told to finish", lambda: row.id in self.finish)
        except asyncio.CancelledError:
            self.cancelled.append(row.id)
            raise

    async def look(self) -> None:
        """Have it look twice: what it found is then being worked on."""
        for looks in (self.looks, self.looks + 1):
            self.woken.set()
            await poll_async("it has looked", partial(self._has_looked, looks))

    def _has_looked(self, before: int) -> bool:
        return self.looks > before


@pytest.fixture
async def runner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runner]:
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 3600.0)
    runner = Runner()
    running = asyncio.create_task(runner.run_held_rows())
    yield runner
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_each_row_is_begun_once_while_it_is_held(runner: Runner) -> None:
    runner.held = [Row("a"), Row("b")]
    await runner.look()
    await runner.look()
    assert runner.begun == {"a": 1, "b": 1} and not runner.cancelled


async def test_what_has_ended_and_is_still_held_begins_again(runner: Runner) -> None:
    runner.held, runner.finish = [Row("a")], {"a"}

    def has_begun_again() -> bool:
        runner.woken.set()
        return runner.begun["a"] >= 2

    await poll_async("it has begun again", has_begun_again)


async def test_what_another_gateway_holds_is_ended_and_the_rest_goes_on(runner: Runner) -> None:
    runner.held = [Row("a"), Row("b")]
    await runner.look()
    await poll_async("both have begun", lambda: runner.begun.total() == 2)
    runner.held = [Row("b")]
    await runner.look()
    await poll_async("its work has ended", lambda: runner.cancelled == ["a"])
    assert runner.begun["b"] == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_gateway_that_cannot_look_now_goes_on_with_what_it_has(
    runner: Runner, fails: bool
) -> None:
    runner.held = [Row("a")]
    await runner.look()
    await poll_async("it has begun", lambda: runner.begun["a"] == 1)
    runner.held, runner.fails = None, fails
    await runner.look()
    assert not runner.cancelled
    runner.held, runner.fails = [Row("a"), Row("b")], False
    await runner.look()
    await poll_async("the new one has begun", lambda: runner.begun["b"] == 1)


async def test_it_looks_again_when_it_is_woken_and_not_before(runner: Runner) -> None:
    await poll_async("it has looked", lambda: runner.looks == 1)
    await asyncio.sleep(0)
    assert runner.looks == 1
    runner.woken.set()
    await poll_async("it has looked again", lambda: runner.looks == 2)


async def test_without_rows_to_run_it_sleeps_until_the_rules_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 0.001)
    runner = Runner()
    runner.held = None
    running = asyncio.create_task(runner.run_held_rows())
    try:
        await poll_async("the first look", lambda: runner.looks == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert runner.looks == 1
        runner.held = [Row("a")]
        [tell] = runner.rules_changed
        tell()
        await poll_async("looks at each interval", lambda: runner.looks > 5)
        assert runner.begun == {"a": 1}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(("has_peers", "holds"), [(False, False), (True, False), (False, True)])
async def test_a_gateway_alone_that_holds_nothing_looks_seldom(
    has_peers: bool, holds: bool
) -> None:
    with passing_time() as clock:
        runner = Runner(has_peers=has_peers)
        running = asyncio.create_task(runner.run_held_rows())
        await clock.pass_time(2.5 * LEASE_S)
        assert runner.looks >= 2 * LEASE_S / LOOK_EVERY_S, "leases of an earlier life may end yet"
        runner.held = [Row("a")] if holds else []
        await clock.pass_time(LOOK_AT_REST_S)
        runner.looks = 0
        await clock.pass_time(20 * LOOK_AT_REST_S)
        every_s = LOOK_EVERY_S if has_peers or holds else LOOK_AT_REST_S
        assert runner.looks == pytest.approx(20 * LOOK_AT_REST_S / every_s, abs=2)
        [tell] = runner.listeners
        runner.looks = 0
        tell()  # of a request, which may have stored a row
        await clock.pass_time(0.01)
        assert runner.looks == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_end_at_the_moment_of_a_wake_is_an_end() -> None:
    runner = Runner()
    running = asyncio.create_task(runner.run_held_rows())
    await poll_async("it has looked", lambda: runner.looks == 1)
    runner.woken.set()
    await asyncio.sleep(0)  # the waiter's future is done, and its task has not gone on
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=10)
    assert done and running.cancelled()


async def test_its_end_ends_the_work_and_waits_for_it() -> None:
    runner = Runner()
    runner.held = [Row("a")]
    running = asyncio.create_task(runner.run_held_rows())
    await poll_async("it has begun", lambda: runner.begun["a"] == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert runner.cancelled == ["a"]
