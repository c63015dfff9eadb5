"""The room for one more worker, beside workers that no task runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.deployments.worker_pool import WorkerPool
from servekit.supervisor.lifecycle.managed_process import MemoryFreed
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu
from tests.unit.supervisor.lifecycle.test_managed_process import Host
from tests.unit.supervisor.made_up_deployment import config

GPUS = tuple(Gpu(index, f"GPU-{index}", "H200", 100, 100) for index in range(2))
FIRST, SECOND = (GPUS[0],), (GPUS[1],)


class Scene:
    def __init__(self, folder: Path) -> None:
        self.host = Host(folder / "run")
        self.host.publish_change = lambda: None  # type: ignore[method-assign]
        self.ran: list[object] = []
        self.pool = self.make_pool()

    def make_pool(
        self, reserve: str | None = None, estimates: Mapping[str, object] | None = None
    ) -> WorkerPool:
        keys = SimpleNamespace(
            gpus=SimpleNamespace(reserve=reserve), server=SimpleNamespace(drain_timeout_s=7.0)
        )
        plan: Any = SimpleNamespace(gpus=GPUS, config=keys, estimates=estimates or {})
        return WorkerPool(cast(Plan, plan), self.host, self.ran.append)

    def start(
        self, name: str, *gpus: Gpu, claims: tuple[int, ...] = (), memory: str | None = None
    ) -> WorkerProcess:
        place = Assignment(name, 0, gpus, 1, claims)
        adapters = cast(Adapters, None)  # it never comes so far as to load any
        worker = WorkerProcess(
            config(name=name, memory=memory), place, GPUS, self.host, None, adapters
        )
        self.pool.start_worker(worker)
        return worker


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_worker_is_run_and_its_name_taken_until_it_has_ended(scene: Scene) -> None:
    worker = scene.start("a")
    assert scene.ran == [worker]
    assert scene.pool.is_taken("a/0") and not scene.pool.is_taken("a/1")
    scene.pool.remove_worker(worker)
    assert not scene.pool.is_taken("a/0")


async def test_the_plan_in_force_counts(scene: Scene) -> None:
    assert scene.pool.gpus == GPUS
    assert scene.pool.drain_timeout_s == 7.0


@pytest.mark.parametrize(
    ("memory", "reserve", "claims"),
    [(None, None, (100,)), (None, "10%", (90,)), ("30%", "10%", (30,))],
)
async def test_a_model_claims_its_memory_or_all_but_the_reserve(
    scene: Scene, memory: str | None, reserve: str | None, claims: tuple[int, ...]
) -> None:
    assert scene.make_pool(reserve).claims(config(memory=memory), FIRST) == claims


async def test_what_must_be_free_is_the_claim_or_the_known_weights(scene: Scene) -> None:
    known = {"a": SimpleNamespace(on_each_floor_bytes=40)}
    pool = scene.make_pool(estimates=known)
    assert pool.needed_bytes(config(memory="30%"), GPUS) == (30, 30)
    assert pool.needed_bytes(config(), GPUS) == (40, 40)
    assert pool.needed_bytes(config(name="unknown"), GPUS) == (0, 0)


@pytest.mark.parametrize(("share", "fits"), [("60%", True), ("61%", False)])
async def test_one_more_fits_beside_the_claims_of_the_others(
    scene: Scene, share: str, fits: bool
) -> None:
    scene.start("a", *FIRST, claims=(15,))
    scene.start("b", *reversed(GPUS), claims=(90, 25))
    assert scene.pool.has_room(config(memory=share), FIRST) is fits
    assert not scene.pool.has_room(config(memory="60%"), GPUS), "the second GPU is full"
    assert scene.pool.has_room(config(), ()), "the CPU has room for all"


async def test_the_reserve_is_no_room(scene: Scene) -> None:
    scene.pool = scene.make_pool("20%")
    scene.start("a", *FIRST, claims=(50,))
    assert scene.pool.has_room(config(memory="30%"), FIRST)
    assert not scene.pool.has_room(config(memory="31%"), FIRST)


async def test_a_failed_worker_takes_nothing_and_a_sleeping_one_what_it_kept(
    scene: Scene,
) -> None:
    worker = scene.start("a", *FIRST, claims=(100,))
    assert not scene.pool.has_room(config(memory="10%"), FIRST)
    worker.state = "failed"
    assert scene.pool.has_room(config(), FIRST)
    worker.state = "asleep"
    scene.pool.gate.ledger.reserve("a/0", {"GPU-0": 40})
    assert scene.pool.has_room(config(memory="60%"), FIRST)
    assert not scene.pool.has_room(config(memory="61%"), FIRST)


async def test_on_the_cpu_claims_of_the_file_fit_in_the_machines_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "total_memory_bytes", lambda: 100 * 2**30)
    old = scene.start("m", memory="60%")
    assert scene.pool.has_room(config(memory="40%"), ())
    assert not scene.pool.has_room(config(memory="41%"), ())
    assert scene.pool.has_room(config(memory="60%"), (), without=[old])
    assert scene.pool.has_room(config(), ()), "it claims nothing"
    assert scene.pool.has_room(config(memory="90%"), FIRST), "a GPU has memory of its own"
    old.state, old.rss_bytes = "asleep", 10 * 2**30
    assert scene.pool.has_room(config(memory="90%"), ())
    old.state = "failed"
    assert scene.pool.has_room(config(memory="100%"), ())
    monkeypatch.setattr(cgroup, "total_memory_bytes", lambda: 0)
    assert scene.pool.has_room(config(memory="60GiB"), ()), "how much there is is unknown"


async def test_a_name_is_taken_while_its_memory_is_not_free(scene: Scene) -> None:
    scene.pool.gate.ledger.reserve("gone/0", {"GPU-0": 40})
    assert scene.pool.is_taken("gone/0")


async def test_who_waits_for_room_looks_again_at_each_event(scene: Scene) -> None:
    worker = scene.start("a", *FIRST, claims=(100,))
    waiting = asyncio.create_task(scene.pool.wait_for_room(config(), FIRST))
    await asyncio.sleep(0)
    worker.emit(MemoryFreed(worker))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done(), "the event has freed nothing"
    scene.pool.remove_worker(worker)
    await asyncio.wait_for(waiting, 5)


async def test_an_event_of_a_worker_ends_the_wait_that_it_made_room_for(scene: Scene) -> None:
    worker = scene.start("a", *FIRST, claims=(100,))
    waiting = asyncio.create_task(scene.pool.wait_for_room(config(), FIRST))
    await asyncio.sleep(0)
    worker.state = "failed"
    worker.emit(MemoryFreed(worker))
    await asyncio.wait_for(waiting, 5)
