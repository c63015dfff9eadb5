"""A gateway that does not answer, with a real gateway process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from servekit.config.schema import ServerConfig
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
