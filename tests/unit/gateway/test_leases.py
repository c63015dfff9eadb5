"""Runners of leased rows: they look each second only where they may run any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from servekit.gateway.leases import LeaseRunner
from tests.polling import poll_async


@dataclass(frozen=True)
class Row:
    id: str


class Runner(LeaseRunner[Row]):
    def __init__(self, router: Any) -> None:
        super().__init__(router)
        self.allowed = False
        self.looks = 0
        self.ran: list[str] = []

    async def claim(self) -> Sequence[Row] | None:
        self.looks += 1
        return [Row("one")] if self.allowed else None

    async def work(self, row: Row) -> None:
        self.ran.append(row.id)
        await asyncio.Event().wait()


async def test_a_runner_without_rows_to_run_sleeps_until_the_rules_change(monkeypatch: Any) -> None:
    monkeypatch.setattr("servekit.gateway.leases.LOOK_EVERY_S", 0.001)
    told: list[Callable[[], None]] = []
    runner = Runner(SimpleNamespace(access=SimpleNamespace(on_change=told.append)))
    running = asyncio.create_task(runner.run())
    try:
        await poll_async("the first look", lambda: runner.looks == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert runner.looks == 1
        runner.allowed = True
        [tell] = told
        tell()
        await poll_async("looks at each interval", lambda: runner.looks > 5)
        assert runner.ran == ["one"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
