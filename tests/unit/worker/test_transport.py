"""A worker's socket for gateways: there as long as it serves, though somebody removes it."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.protocol.messages import FromWorker, Hello, Ping, Pong, ToWorker
from servekit.protocol.transport.connection import Connection, adopt_socket
from servekit.worker.transport import InheritedChannel
from tests.polling import poll_async


class Supervisor:
    """The other end of a worker's channel."""

    def __init__(self, theirs: socket.socket) -> None:
        self.heard: list[Any] = []
        self.told: list[ToWorker] = []
        self.ended: list[Exception | None] = []
        self._theirs = theirs

    async def open(self, channel: InheritedChannel) -> None:
        await channel.open(self.told.append, self.ended.append)
        self.connection = Connection[FromWorker](FromWorker, self.heard.append, lambda error: None)
        await adopt_socket(self._theirs, lambda: self.connection)


@pytest.fixture
def ends() -> Any:
    ours, theirs = socket.socketpair()
    return InheritedChannel(ours), Supervisor(theirs)


def make_runner() -> tuple[Any, list[Any]]:
    """The part of a runner that takes gateways, and what they say."""
    said: list[Any] = []

    def connect() -> Connection[Any]:
        return Connection(Hello, said.append, lambda error: None)

    return SimpleNamespace(connect=connect), said


def make_spec(path: Path) -> Any:
    return SimpleNamespace(socket=str(path))


async def greet(channel: InheritedChannel) -> None:
    connection = await channel.dial(lambda: Connection(Hello, lambda _: None, lambda _: None))
    connection.send(Hello(1, "probe", "x"))
    connection.close()


async def test_messages_go_both_ways_until_the_end(tmp_path: Path, ends: Any) -> None:
    channel, supervisor = ends
    await supervisor.open(channel)
    channel.send(Pong(1, 0.0, 0, 0, 0.0))
    supervisor.connection.send(Ping(1))
    await poll_async("both are heard", lambda: supervisor.heard and supervisor.told)
    assert supervisor.told == [Ping(1)]
    channel.send(Pong(2, 0.0, 0, 0, 0.0))
    await channel.close()
    await poll_async("all that was queued is sent", lambda: len(supervisor.heard) == 2)
    assert supervisor.ended == [None]


async def test_gateways_reach_it_while_it_serves(tmp_path: Path, ends: Any) -> None:
    channel, _ = ends
    runner, said = make_runner()
    path = tmp_path / "w.sock"
    with pytest.raises(OSError, match="Invalid argument"):  # it has no path yet
        await greet(channel)
    await channel.serve(make_spec(path), runner)
    assert path.stat().st_mode & 0o777 == 0o600
    await greet(channel)
    await poll_async("it is heard", lambda: said)
    channel.stop_serving()
    path.unlink(missing_ok=True)
    with pytest.raises(OSError, match="No such file"):
        await greet(channel)


async def test_a_socket_that_was_removed_comes_back_with_a_ping_or_a_dial(
    tmp_path: Path, ends: Any
) -> None:
    channel, supervisor = ends
    await supervisor.open(channel)
    runner, said = make_runner()
    path = tmp_path / "w.sock"
    supervisor.connection.send(Ping(0))
    await poll_async("the ping is heard", lambda: supervisor.told)
    assert not path.exists(), "it does not serve yet"
    await channel.serve(make_spec(path), runner)
    for number in (1, 2):
        path.unlink()
        supervisor.connection.send(Ping(number))
        await poll_async("it is back", path.exists)
        await greet(channel)
        await poll_async("and heard", lambda: said)
        said.clear()
    path.unlink()
    await greet(channel)
    await poll_async("without a ping as well", lambda: said)
    channel.stop_serving()
    path.unlink(missing_ok=True)
    supervisor.connection.send(Ping(9))
    await poll_async("the last ping is heard", lambda: Ping(9) in supervisor.told)
    assert not path.exists(), "it serves no more"
    await channel.close()


async def test_a_folder_that_was_removed_is_awaited(tmp_path: Path, ends: Any) -> None:
    channel, _ = ends
    runner, said = make_runner()
    folder = tmp_path / "run"
    folder.mkdir()
    await channel.serve(make_spec(folder / "w.sock"), runner)
    (folder / "w.sock").unlink()
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        await greet(channel)
    folder.mkdir()
    await greet(channel)
    await poll_async("it is heard", lambda: said)
    channel.stop_serving()
