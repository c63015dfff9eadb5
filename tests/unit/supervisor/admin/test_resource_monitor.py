from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.supervisor.admin.resource_monitor import ResourceMonitor
from servekit.supervisor.pace import Pace
from servekit.system import procfs, shared_memory
from servekit.system.shared_memory import Segment, recorded_segments
from tests.polling import poll_async

MINE = Segment("servekit-test", 1)


class BigProcess:
    """A process whose memory map cannot be read before it is `over`."""

    name, pid, here = "m/0", 0, False

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()
        self.holds_the_loop = False
        self.child = self

    def measure(self) -> None:
        pass

    def note_segments(self) -> set[Segment]:
        self.asked.set()
        self.holds_the_loop = not self.over.wait(10)
        return {MINE}


def monitor(folder: Path, *lives: BigProcess) -> ResourceMonitor:
    deployments: Any = SimpleNamespace(gpus=(), replicas=lambda: ())
    run_dir: Any = SimpleNamespace(path=folder)
    found = cast("Any", lives)
    return ResourceMonitor(deployments, lambda: found, run_dir, lambda: None, Pace())


async def test_the_event_loop_does_not_wait_for_a_memory_map(tmp_path: Path) -> None:
    big = BigProcess()
    one = monitor(tmp_path, big)
    running = asyncio.create_task(one.monitor_resources())
    try:
        await poll_async("the map is read", big.asked.is_set)
        await asyncio.wait_for(one.memory(), 10)
        assert recorded_segments(tmp_path) == set()
        big.over.set()
        await poll_async("the segment is recorded", lambda: recorded_segments(tmp_path) == {MINE})
        assert not big.holds_the_loop
    finally:
        big.over.set()
        running.cancel()


async def test_only_a_new_segment_makes_it_read_the_maps_and_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever creates a segment maps it a moment later."""
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    one = monitor(tmp_path)
    looks = [one._has_new_segments()]
    path = tmp_path / secrets.token_hex(6)
    path.write_bytes(b"")
    looks += [one._has_new_segments() for _ in range(3)]
    path.unlink()
    looks += [one._has_new_segments() for _ in range(3)]
    assert looks == [False, True, True, False, False, False, False]


async def test_a_lost_record_is_written_again(tmp_path: Path) -> None:
    big = BigProcess()
    big.over.set()
    one = monitor(tmp_path, big)
    await one._note_segments()
    (tmp_path / shared_memory.SEGMENTS).unlink()
    one.note_segments_anew()
    assert recorded_segments(tmp_path) == {MINE}


async def test_operators_who_ask_often_share_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = BigProcess()
    counted: list[str] = []
    monkeypatch.setattr(big, "measure", lambda: counted.append("measured"))
    one = monitor(tmp_path, big)
    for _ in range(5):
        await one.refresh()
    assert counted == ["measured"]
    monkeypatch.setattr("servekit.supervisor.admin.resource_monitor._FRESH_S", 0.0)
    await one.refresh()
    assert len(counted) == 2


async def test_all_that_is_due_reads_the_processes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a thousand of them that takes ten milliseconds."""
    counted: list[None] = []

    def count() -> Iterator[procfs.Process]:
        counted.append(None)
        yield from ()

    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path / "nobody else's")
    monkeypatch.setattr(procfs, "all_processes", count)
    big = BigProcess()
    big.over.set()
    one = monitor(tmp_path, big)
    await one._measure_due(0.0)
    assert big.asked.is_set() and len(counted) == 1
    counted.clear()
    await one._measure_due(0.1)
    assert counted == [], "nothing is due"


async def test_at_rest_the_maps_are_read_only_if_a_segment_came_or_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = BigProcess()
    big.over.set()
    one = monitor(tmp_path, big)
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path / "nobody else's")
    changed: list[int] = [1]
    monkeypatch.setattr(shared_memory, "changed_at", lambda: changed[-1])
    monkeypatch.setattr(one._pace, "is_at_rest", lambda: True)
    read: list[bool] = []
    for now_s in (0.0, 100.0, 200.0, 300.0):
        big.asked.clear()
        if now_s == 200.0:
            changed.append(2)
        await one._measure_due(now_s)
        read.append(big.asked.is_set())
    assert read == [True, False, True, False]
