"""What `servekit up` tells a service manager, over a NOTIFY_SOCKET of this test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.system import procfs
from tests.integration.instance import PROGRAM, Instance, echo, write_config
from tests.polling import poll

#: For systemd's sake a long one would do; the feeding is four times as often.
WATCHDOG_S = 2.0


class Manager:
    """systemd's end of the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.lines: list[str] = []

    def heard(self, within_s: float = 0.0) -> bool:
        """Whether anything has come, at most so late; it is appended to `lines`."""
        self._socket.settimeout(within_s)
        try:
            self.lines += self._socket.recv(65536).decode().splitlines()
        except (TimeoutError, BlockingIOError):
            return False
        return True

    def until(self, line: str, after: int = 0, within_s: float = 60) -> int:
        """The place in `lines` of one that begins with this, once it is there, `after` another."""

        def found() -> int:
            while self.heard():
                pass
            told = enumerate(self.lines[after:], 1 + after)
            return next((count for count, one in told if one.startswith(line)), 0)

        return poll(f"{line} is told", found, within_s) - 1

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.mark.lane("long")
def test_a_life_as_a_service_manager_hears_of_it(tmp_path: Path, manager: Manager) -> None:
    env = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
    }
    slow = [echo("a"), echo("slow", load_s=600)]
    server = {"drain_timeout_s": 300}
    with Instance.up(tmp_path, slow, env=env, server=server) as instance:
        manager.until("READY=1")
        manager.until("WATCHDOG=1")
        poll("a is ready", lambda: instance.replica("a/0").state == "ready", 60)
        manager.until("STATUS=1 of 2 models ready; slow/0 ")
        assert ready(instance) == (1, "slow/0")
        for process in instance.survivors():
            assert b"NOTIFY_SOCKET" not in Path(f"/proc/{process.pid}/environ").read_bytes()

        write_config(tmp_path, [echo("a")], server)
        instance.signal(signal.SIGHUP)
        reloading = manager.until("RELOADING=1")
        assert manager.lines[reloading + 1].startswith("MONOTONIC_USEC=")
        manager.until("READY=1", after=reloading)
        manager.until("STATUS=1 of 1 models ready")

        instance.until("no more is to come", lambda: ready(instance) == (0, ""), 60)
        feeds_stop_while_no_gateway_answers(instance, manager)

        instance.signal(signal.SIGTERM)
        extended = manager.lines[manager.until("STOPPING=1") + 1]
        assert int(extended.removeprefix("EXTEND_TIMEOUT_USEC=")) > 300e6
        assert instance.wait(30) == 0


def ready(instance: Instance) -> tuple[int, str]:
    """What a container's health check says: its exit code, and the first word."""
    run = [*PROGRAM, "ps", "--ready", "--run-dir", str(instance.run_dir)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stdout
    return done.returncode, "".join(done.stderr.split()[:1])


def feeds_stop_while_no_gateway_answers(instance: Instance, manager: Manager) -> None:
    gateway = instance.gateway().pid
    os.kill(gateway, signal.SIGSTOP)
    poll("no feed for long", lambda: not manager.heard(WATCHDOG_S), 25)
    started = procfs.read_process(gateway)
    assert started is not None and started.state == "T", "it was not replaced yet"
    os.kill(gateway, signal.SIGCONT)
    manager.until("WATCHDOG=1", after=len(manager.lines))
