"""The port and the processes of a supervisor that was killed: taken over, and ended at last."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from servekit.protocol.messages import GatewayStatus, ModelStatus, ReplicaStatus, Status
from servekit.protocol.transport.socket_handover import await_heir, heir_path
from servekit.protocol.types import WorkerState
from servekit.ray.takeover import Takeover, is_serving
from servekit.supervisor.process.run_dir import Record
from servekit.system import procfs
from servekit.system.orphan_cleanup import CHILDREN, MARK, Started
from tests.polling import poll_async

READY = (("ready", ""),)


def make_status(workers: tuple[WorkerState, ...], gateways: tuple[tuple[str, str], ...]) -> Status:
    """The status of a model with these workers, and of gateways by their state and node."""
    replicas = tuple(ReplicaStatus("m/0", state, "s", 1, "cpu") for state in workers)
    ours = tuple(GatewayStatus("g", 1, state, node=node) for state, node in gateways)
    return Status("0", 1, "u", "c", 0.0, 0, (ModelStatus("m", "e", "p", 0, replicas),), ours, False)


@pytest.mark.parametrize(
    ("workers", "gateways", "serves"),
    [
        (("ready",), READY, True),
        (("ready", "failed"), READY, True),
        (("ready", "loading"), READY, False),
        (("ready", "starting"), READY, False),
        (("failed",), READY, False),
        ((), READY, False),
        (("ready",), (("starting", ""),), False),
        (("ready",), (*READY, ("starting", "")), False),
        (("ready",), (*READY, ("starting", "another-node")), True),
    ],
)
def test_the_old_gateways_go_on_until_ours_serve(
    workers: tuple[WorkerState, ...], gateways: tuple[tuple[str, str], ...], serves: bool
) -> None:
    assert set(workers) <= set(get_args(WorkerState))
    assert is_serving(make_status(workers, gateways)) is serves


class Orphans:
    """Two gateways of a dead supervisor, which wait for an heir, and a worker of it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.mark = secrets.token_hex(16)  # all processes that carry it are ended
        record = Record(1, 0.0, "u", "c", self.mark)
        (run_dir / "supervisor.json").write_text(json.dumps(asdict(record)))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        fds = [self.listener.fileno()]
        self.waiting = [
            asyncio.create_task(await_heir(heir_path(run_dir, which), fds, 60.0))
            for which in range(2)
        ]
        environ = os.environ | {MARK: self.mark}
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.worker = subprocess.Popen(command, env=environ, start_new_session=True)
        seen = procfs.read_process(self.worker.pid)
        assert seen is not None
        children = [asdict(Started("m/0", seen.pid, seen.started))]
        (run_dir / CHILDREN).write_text(json.dumps(children))

    async def take_over(self, port: int) -> Takeover | None:
        wait = [heir_path(self.run_dir, which) for which in range(2)]
        await poll_async("they wait", lambda: all(path.exists() for path in wait))
        return await asyncio.to_thread(Takeover.take_over, self.run_dir, port)

    async def heirs(self) -> list[socket.socket]:
        """The connections of the gateways that are told to drain."""
        return [heir for one in self.waiting if (heir := await one) is not None]

    async def end(self) -> None:
        for one in self.waiting:
            one.cancel()
        for heir in await asyncio.gather(*self.waiting, return_exceptions=True):
            if isinstance(heir, socket.socket):
                heir.close()
        self.listener.close()
        if self.worker.poll() is None:
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()


@pytest.fixture
async def orphans(tmp_path: Path) -> AsyncIterator[Orphans]:
    made = Orphans(tmp_path)
    yield made
    await made.end()


def close_all(taken: Takeover) -> None:
    for sock in (*taken.listeners, *taken.previous_gateways):
        sock.close()


@pytest.mark.parametrize("port", [lambda port: port, lambda port: 0], ids=["the same", "any"])
async def test_the_port_is_taken_over_and_no_gateway_is_drained_yet(
    orphans: Orphans, port: Callable[[int], int]
) -> None:
    taken = await orphans.take_over(port(orphans.port))
    assert taken is not None
    assert [sock.getsockname()[1] for sock in taken.listeners] == [orphans.port]
    assert len(taken.previous_gateways) == 2 and taken.mark == orphans.mark
    assert [child.pid for child in taken.children] == [orphans.worker.pid]
    assert not any(one.done() for one in orphans.waiting)
    close_all(taken)


async def test_for_another_port_the_old_gateways_are_drained(orphans: Orphans) -> None:
    assert await orphans.take_over(1) is None
    assert len(await orphans.heirs()) == 2


async def test_there_is_nothing_to_take_over_without_a_record(orphans: Orphans) -> None:
    (orphans.run_dir / "supervisor.json").unlink()
    assert await orphans.take_over(0) is None


async def test_nothing_is_taken_over_where_nobody_waits(tmp_path: Path) -> None:
    assert Takeover.take_over(tmp_path, 0) is None


async def test_the_old_ones_are_drained_once_ours_serve_and_ended_when_they_are_done(
    orphans: Orphans,
) -> None:
    taken = await orphans.take_over(0)
    assert taken is not None
    ours = [make_status(("loading",), READY)]
    draining = asyncio.create_task(taken.drain_previous(lambda: ours[0], 600.0))
    await asyncio.sleep(0)
    assert not any(one.done() for one in orphans.waiting)
    ours[0] = make_status(("ready",), READY)
    one, other = await orphans.heirs()
    one.close()
    assert orphans.worker.poll() is None, "requests of the other gateway may need it"
    assert not draining.done()
    other.close()  # its last request is done
    await draining
    assert orphans.worker.wait(60) == -signal.SIGKILL
    assert all(sock.fileno() == -1 for sock in taken.previous_gateways)
    close_all(taken)


async def test_gateways_that_do_not_end_are_waited_for_so_long(orphans: Orphans) -> None:
    taken = await orphans.take_over(0)
    assert taken is not None
    async with asyncio.timeout(60):
        await taken.drain_previous(lambda: make_status(("ready",), READY), 0.01)
    assert orphans.worker.wait(60) == -signal.SIGKILL
    close_all(taken)
