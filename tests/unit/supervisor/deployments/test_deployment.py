"""What a reload changes in a fleet whose workers go on, and what it does at their events.

The workers are real, but no task runs them: each changes its state as the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.config_diff import same_worker
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.deployments.worker_pool import WorkerPool
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import MemoryFreed
from servekit.supervisor.scheduling.memory_requests import least
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpu.gpus import Gpu, Slot
from tests.unit.supervisor.lifecycle.test_managed_process import Host
from tests.unit.supervisor.made_up_deployment import config

GPU = Gpu(0, "GPU-0", "H200", 100, 100)


async def test_new_limits_count_for_the_replicas_that_there_are() -> None:
    deployment = Deployment(
        config(max_queue=5), cast(WorkerPool, SimpleNamespace(host=None, run=None))
    )
    retried: list[bool] = []
    old: Any = SimpleNamespace(
        model=deployment.model, state="ready", ending=False, retry=lambda: retried.append(True)
    )
    deployment.replicas.append(cast(WorkerProcess, old))
    new = config(max_queue=7, timeout_s=7.0, stall_timeout_s=9.0)
    deployment.roll_out(new, deployment.planned, None)
    assert deployment.model is new and old.model is new
    assert retried == [True]
    other = config(path="another")
    deployment.roll_out(other, deployment.planned, None)
    assert deployment.model is other
    assert old.model is new, "it has loaded the one before"


# ---------------------------------------------------------------- events

VERSIONS = [config(load="on_start", path=path) for path in ("old", "new")]


@pytest.fixture
def pool(tmp_path: Path) -> WorkerPool:
    return make_pool(tmp_path)


def make_pool(folder: Path) -> WorkerPool:
    keys = SimpleNamespace(
        gpus=SimpleNamespace(reserve=None), server=SimpleNamespace(drain_timeout_s=1.0)
    )
    plan: Any = SimpleNamespace(
        gpus=(GPU,), config=keys, estimates={}, left_out_by=lambda model: ""
    )
    host = Host(folder / "run")
    host.publish_change = lambda: None  # type: ignore[method-assign]
    return WorkerPool(cast(Plan, plan), host, lambda worker: None)


async def settle() -> None:
    """Let the tasks go on that an event has woken; nothing here waits for time to pass."""
    for _ in range(10):
        await asyncio.sleep(0)


async def update(pool: WorkerPool, slot: Slot = ()) -> tuple[Deployment, WorkerProcess]:
    """Return a deployment with a ready worker of the old version, told to become the new one."""
    deployment = Deployment(VERSIONS[0], pool)
    deployment.roll_out(VERSIONS[0], (slot,), 1)
    await settle()
    (old,) = deployment.replicas
    old.change_state("serve")
    await settle()
    deployment.roll_out(VERSIONS[1], (slot,), 1)
    await settle()
    return deployment, old


async def test_the_old_version_drains_at_the_event_that_the_new_one_is_ready(
    pool: WorkerPool,
) -> None:
    deployment, old = await update(pool)
    _, new = deployment.replicas
    new.change_state("load")
    await settle()
    assert not old.ending
    new.change_state("serve")
    await settle()
    assert (old.ending, new.ending) == (True, False)


async def test_it_is_rolled_back_at_the_event_that_the_new_version_has_failed(
    pool: WorkerPool,
) -> None:
    deployment, old = await update(pool)
    _, new = deployment.replicas
    new.change_state("fail", "no such file")
    await settle()
    assert (old.ending, new.ending) == (False, True)
    assert deployment.model is old.model is VERSIONS[0]
    assert "serves on" in old.reason and "no such file" in old.reason


async def begin(pool: WorkerPool, count: int = 1) -> tuple[Deployment, list[WorkerProcess]]:
    """Return a deployment whose workers of the old version are ready."""
    deployment = Deployment(VERSIONS[0], pool)
    deployment.roll_out(VERSIONS[0], ((),) * count, 1)
    await settle()
    old = list(deployment.replicas)
    for replica in old:
        replica.change_state("serve")
    await settle()
    return deployment, old


async def begin_change(
    pool: WorkerPool,
) -> tuple[Deployment, list[WorkerProcess], WorkerProcess, WorkerProcess]:
    """Return a deployment of two workers, these, and the two that replace them; one is ready."""
    deployment, old = await begin(pool, 2)
    deployment.roll_out(VERSIONS[1], ((), ()), 1)
    await settle()
    first, second = deployment.replicas[2:]
    first.change_state("serve")
    await settle()
    return deployment, old, first, second


@pytest.mark.parametrize("event", ["serve", "fail"])
async def test_a_change_goes_on_with_what_the_one_before_it_has_started(
    pool: WorkerPool, event: Literal["serve", "fail"]
) -> None:
    deployment, old = await update(pool)
    _, new = deployment.replicas
    deployment.roll_out(config(load="on_start", path="new", max_queue=9), ((),), 1)
    await settle()
    assert (old.ending, new.ending) == (False, False), "nothing else serves yet"
    new.change_state(event, "no such file")
    await settle()
    assert (old.ending, new.ending) == (event == "serve", event == "fail")
    assert deployment.model is (new.model if event == "serve" else VERSIONS[0])


async def test_a_change_goes_on_where_the_one_before_it_has_drained_some(pool: WorkerPool) -> None:
    deployment, old, _, second = await begin_change(pool)
    assert [one.ending for one in old] == [True, False]
    deployment.roll_out(VERSIONS[1], ((), ()), 1)
    await settle()
    assert [one.ending for one in old] == [True, False]
    second.change_state("serve")
    await settle()
    assert [one.ending for one in deployment.replicas] == [True, True, False, False]


async def test_a_change_goes_on_with_a_restart(pool: WorkerPool) -> None:
    deployment, [old] = await begin(pool)
    deployment.restart([old])
    await settle()
    _, new = deployment.replicas
    waiting = asyncio.create_task(deployment.until_settled())
    deployment.roll_out(config(load="on_start", path="old", max_queue=9), ((),), 1)
    await settle()
    assert not old.ending and not new.ending and not waiting.done()
    new.change_state("serve")
    assert await waiting == ""
    assert (old.ending, new.ending) == (True, False)


async def test_who_waits_for_a_restart_is_told_that_it_was_unloaded(pool: WorkerPool) -> None:
    deployment, [old] = await begin(pool)
    deployment.restart([old])
    await settle()
    waiting = asyncio.create_task(deployment.until_settled())
    await settle()
    deployment.unload()
    assert await waiting == "it was unloaded meanwhile"


@pytest.mark.parametrize("event", ["serve", "fail"])
async def test_one_that_serves_goes_once_one_that_stays_is_ready(
    pool: WorkerPool, event: Literal["serve", "fail"]
) -> None:
    deployment, [old] = await begin(pool)
    deployment.roll_out(VERSIONS[0], ((), ()), 1)
    await settle()
    deployment.restart([old])
    await settle()
    _, second, _ = deployment.replicas
    deployment.roll_out(VERSIONS[0], ((),), 1)
    await settle()
    assert not old.ending
    second.change_state(event)
    await settle()
    assert old.ending is (event == "serve")


async def test_the_name_of_one_that_has_ended_is_used_again(pool: WorkerPool) -> None:
    deployment, [old] = await begin(pool)
    names = [old.name]
    for _ in range(3):
        deployment.restart([old])
        await settle()
        new = deployment.replicas[-1]
        new.change_state("serve")
        await settle()
        assert old.ending
        old.change_state("stop")
        deployment.remove_replica(old)
        names.append(new.name)
        old = new
    assert names == ["a/0", "a/1", "a/0", "a/1"], "logs and metric series do not grow in number"


@pytest.mark.parametrize(
    ("keys", "is_loaded"),
    [
        ({"path": "new"}, False),
        ({"path": "old", "replicas": 2}, False),
        ({"path": "old", "max_queue": 9}, True),
        ({"path": "new", "load": "on_start"}, True),
    ],
)
async def test_one_on_demand_that_is_asleep_does_not_change_but_stops(
    pool: WorkerPool, keys: dict[str, Any], is_loaded: bool
) -> None:
    model = config(path="old")
    deployment = Deployment(model, pool)
    deployment.roll_out(model, ((),), 1)
    deployment.load(StartReason.from_now("request"))
    await settle()
    [old] = deployment.replicas
    old.change_state("serve")
    old.change_state("sleep")
    new = config(**keys)
    deployment.roll_out(new, ((),) * least(new), 1)
    await settle()
    assert deployment.wanted is is_loaded
    assert len(deployment.living) == int(is_loaded)
    assert old.ending is (not same_worker(model, new) or not is_loaded)


async def test_one_that_has_fallen_asleep_has_come_up(pool: WorkerPool) -> None:
    deployment, old, first, second = await begin_change(pool)
    first.change_state("sleep")
    second.change_state("serve")
    await settle()
    assert all(one.ending for one in old) and not deployment.changing


async def test_the_new_version_starts_at_the_event_that_the_old_one_has_left_its_gpu(
    pool: WorkerPool,
) -> None:
    deployment, old = await update(pool, (GPU,))
    assert old.ending, "there is no room for both"
    old.change_state("drain")
    await settle()
    assert deployment.replicas == [old]
    old.change_state("stop")
    deployment.remove_replica(old)
    await settle()
    (new,) = deployment.replicas
    assert new.model is VERSIONS[1]


@pytest.mark.parametrize(
    "event",
    [
        lambda one: one.change_state("fail"),
        lambda one: one.change_state("sleep") and one.emit(MemoryFreed(one)),
    ],
    ids=["it failed", "it fell asleep"],
)
async def test_another_models_event_may_make_room(
    pool: WorkerPool, event: Callable[[WorkerProcess], object]
) -> None:
    other = Deployment(VERSIONS[0], pool)
    other.roll_out(VERSIONS[0], ((GPU,),), 1)
    await settle()
    (holder,) = other.replicas
    holder.change_state("serve")
    model = ModelConfig.model_validate({"name": "b", "path": "p", "engine": "echo"})
    deployment = Deployment(model, pool)
    deployment.roll_out(model, ((GPU,),), 1)
    await settle()
    assert not deployment.replicas
    event(holder)
    await settle()
    assert [one.name for one in deployment.replicas] == ["b/0"]
