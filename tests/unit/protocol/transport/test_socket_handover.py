"""Sockets go from a gateway whose supervisor is gone to the next supervisor."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from servekit.protocol.transport.socket_handover import (
    DRAIN,
    await_heir,
    heir_path,
    inherit_sockets,
)


async def taken(path: Path) -> tuple[socket.socket, list[socket.socket]]:
    """What an heir gets, as soon as there is something."""
    async with asyncio.timeout(60):
        while not (found := await asyncio.to_thread(inherit_sockets, [path])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


async def test_the_heir_gets_the_same_sockets_and_ends_the_elder(tmp_path: Path) -> None:
    path = heir_path(tmp_path, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waiting = asyncio.create_task(await_heir(path, [listener.fileno()], 60))
        elder, (same,) = await taken(path)
        assert same.getsockname() == listener.getsockname()
        assert path.stat().st_mode & 0o777 == 0o600
        assert not waiting.done()
        elder.send(DRAIN)
        heir = await asyncio.wait_for(waiting, 60)
        assert heir is not None
        with pytest.raises(BlockingIOError):  # it serves on: its end is still to come
            elder.setblocking(False)
            elder.recv(1)
        heir.close()
        elder.settimeout(60)
        assert elder.recv(1) == b""
    with elder, same, socket.create_connection(same.getsockname()):
        pass


async def test_an_heir_that_fails_is_followed_by_another(tmp_path: Path) -> None:
    path = heir_path(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waiting = asyncio.create_task(await_heir(path, [listener.fileno()], 60))
        first, (one,) = await taken(path)
        first.close()
        second, (other,) = await taken(path)
        second.send(DRAIN)
        heir = await asyncio.wait_for(waiting, 60)
        assert heir is not None
    for sock in (one, other, second, heir):
        sock.close()


async def test_nobody_is_waited_for_longer_than_the_grace(tmp_path: Path) -> None:
    assert not await await_heir(heir_path(tmp_path, 0), [], 0.05)
    assert inherit_sockets([heir_path(tmp_path, 0)]) == []


async def test_an_heir_finds_a_gateway_whose_folder_was_removed_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = heir_path(folder, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waiting = asyncio.create_task(await_heir(path, [listener.fileno()], 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        folder.mkdir()
        elder, (same,) = await taken(path)
        elder.send(DRAIN)
        heir = await asyncio.wait_for(waiting, 60)
        assert heir is not None
    for sock in (same, elder, heir):
        sock.close()


async def test_a_gateway_whose_folder_was_removed_serves_no_longer_than_it_may(
    tmp_path: Path,
) -> None:
    assert await await_heir(heir_path(tmp_path / "run", 0), [], 0.1) is None


def test_a_gateway_that_ends_before_it_hands_over_is_none(tmp_path: Path) -> None:
    path = heir_path(tmp_path, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def end_early() -> None:
            listener.accept()[0].close()

        ending = threading.Thread(target=end_early)
        ending.start()
        assert inherit_sockets([path]) == []
        ending.join()
