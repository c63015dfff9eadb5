from __future__ import annotations

import socket
from pathlib import Path

import pytest

from servekit.errors import StartError
from servekit.supervisor.startup_resources import StartupResources
from servekit.system.sockets import bind_listener


def test_both_ports_are_taken_before_the_directory(tmp_path: Path) -> None:
    resources = StartupResources.acquire(tmp_path / "run", "127.0.0.1", 0, 0)
    try:
        ports = [sock.getsockname()[1] for sock in resources.listeners]
        assert len(set(ports)) == 2
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(StartError, match=r"server\.legacy_port"):
            StartupResources.acquire(tmp_path / "other", "127.0.0.1", 0, ports[1])
        assert not (tmp_path / "other").exists()
    finally:
        resources.run_dir.unlock()
        for sock in resources.listeners:
            sock.close()


def test_nothing_is_kept_where_the_second_port_or_the_directory_is_taken(tmp_path: Path) -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        busy, free = holder.getsockname()[1], _free_port()
        with pytest.raises(StartError, match="already in use"):
            StartupResources.acquire(tmp_path / "run", "127.0.0.1", free, busy)
    bind_listener("127.0.0.1", free).close()
    held = StartupResources.acquire(tmp_path / "run", "127.0.0.1", 0)
    try:
        with pytest.raises(StartError):
            StartupResources.acquire(tmp_path / "run", "127.0.0.1", free, busy)
        bind_listener("127.0.0.1", free).close()
        bind_listener("127.0.0.1", busy).close()
    finally:
        held.run_dir.unlock()
        held.listeners[0].close()


def _free_port() -> int:
    with bind_listener("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
    return port
