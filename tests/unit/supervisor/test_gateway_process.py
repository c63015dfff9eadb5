"""A gateway that does not answer, with a real gateway process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any, cast

import pytest

from servekit.config.schema import ServerConfig
from servekit.protocol.access import KeyBudgets, SpentBudget
from servekit.protocol.messages import Stop
from servekit.supervisor import gateway_process
from servekit.supervisor.gateway_process import Gateway
from tests.unit.supervisor.lifecycle.test_managed_process import Host


class Alone(Host):
    """There is no worker here."""

    def publish_change(self) -> None:
        self._changes.set()


async def test_one_that_is_silent_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_process, "SILENT_S", 1.0)
    host = Alone(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ServerConfig(ui=False)
        gateway = Gateway(0, (listener.fileno(),), server, host, lambda spent: None)
        life = asyncio.create_task(gateway.supervise())
        look = asyncio.create_task(looking(gateway))
        try:
            await host.until(lambda: gateway.state == "ready", 60)
            first = gateway.pid
            os.kill(first, signal.SIGSTOP)
            await host.until(lambda: gateway.stalls == 1, 60)
            await host.until(lambda: gateway.state == "ready" and gateway.pid != first, 60)
            [exit_] = gateway.make_history().exits
            assert exit_.what == "it did not answer for 1 s, killed"
        finally:
            look.cancel()
            gateway.end_child(Stop(), 1.0)
            await life
            host.run_dir.unlock()


async def looking(gateway: Gateway) -> None:
    while True:
        gateway.check_health()
        await asyncio.sleep(0.05)  # as the supervisor's pulse does


SPENT = SpentBudget("ann", "daily", 1000, 0.0)


class Child:
    """Keeps what the gateway's process is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


async def test_budgets_are_told_when_they_change(tmp_path: Path) -> None:
    host = Alone(tmp_path / "run")
    gateway = Gateway(0, (), ServerConfig(ui=False), host, lambda report: None)
    try:
        spent, child = KeyBudgets((SPENT,)), Child()
        gateway.publish_budgets(spent)  # before there is a process
        gateway.child = cast(Any, child)
        gateway.publish_budgets(spent)
        assert child.sent == []
        for budgets in (KeyBudgets(), KeyBudgets(), spent):
            gateway.publish_budgets(budgets)
        assert child.sent == [KeyBudgets(), spent]
    finally:
        host.run_dir.unlock()
