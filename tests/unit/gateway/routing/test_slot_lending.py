"""The slots of one worker between two gateways: all for one while the other has nothing to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import ModelStatus, SamplingParams, Topology
from tests.unit.gateway.conftest import until
from tests.unit.gateway.test_two_gateways import SLOTS, Worker

SHARE = SLOTS // 2


async def service(path: Path) -> tuple[Worker, Router, Router]:
    worker = Worker(path / "w0.sock")
    await worker.start()
    model = ModelStatus("m", "echo", "-", 0, (worker.status(),))
    routers = Router("gateway/0"), Router("gateway/1")
    for router in routers:
        router.apply_topology(Topology((model,), gateways=2))
        await until(lambda: router.routes["m"].ready)  # noqa: B023
    return worker, *routers


def ask(router: Router, count: int) -> list[InflightRequest]:
    calls = [
        InflightRequest("m", SamplingParams(max_tokens=50), prompt="abc") for _ in range(count)
    ]
    return [router.queue_call(call) for call in calls]


def running(router: Router) -> int:
    return router.routes["m"].running


def jobs(worker: Worker) -> int:
    return len(worker.engine.runs)


async def settle() -> None:
    """Let all that was said be heard, and answered."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_one_gateway_uses_all_slots(tmp_path: Path) -> None:
    worker, one, _ = await service(tmp_path)
    calls = ask(one, 2 * SLOTS)
    await until(lambda: running(one) == SLOTS)
    await settle()
    assert jobs(worker) == SLOTS and one.routes["m"].waiting == SLOTS
    calls[0].cancel()
    await until(lambda: one.routes["m"].waiting == SLOTS - 1)
    await settle()
    assert jobs(worker) == SLOTS


async def test_the_other_gets_its_half_as_what_runs_ends(tmp_path: Path) -> None:
    worker, one, two = await service(tmp_path)
    first = ask(one, 3 * SLOTS)
    await until(lambda: running(one) == SLOTS)
    ask(two, 3 * SLOTS)
    await until(lambda: jobs(worker) == SLOTS + SHARE)
    await settle()
    for call in first[:SHARE]:
        call.cancel()
    await settle()
    assert (running(one), running(two)) == (SHARE, SHARE), "nobody is lent anything"
    for call in first[SHARE:SLOTS]:
        call.cancel()
        await settle()
        assert (running(one), running(two)) == (SHARE, SHARE)
    assert jobs(worker) == SLOTS


async def test_the_half_comes_back_when_the_other_is_done(tmp_path: Path) -> None:
    worker, one, two = await service(tmp_path)
    theirs = ask(two, SLOTS)
    await until(lambda: running(two) == SLOTS)
    ask(one, 3 * SLOTS)
    await until(lambda: running(one) == SHARE)
    for call in theirs:
        call.cancel()
    await until(lambda: running(one) == SLOTS)
    await settle()
    assert jobs(worker) == SLOTS and not worker.runner.lending._lent.get(
        next(peer for peer in worker.runner.peers if not peer.jobs), 0
    )


async def test_no_slot_is_idle_while_a_call_waits(tmp_path: Path) -> None:
    """Also where both borrow, and one needs most of its half but not all of it."""
    worker, one, two = await service(tmp_path)
    theirs = ask(two, SLOTS + 1)
    await until(lambda: running(two) == SLOTS)
    ask(one, 3 * SLOTS)
    await until(lambda: running(one) == SHARE)
    for call in theirs[SHARE - 1 :]:
        call.cancel()
    await until(lambda: running(two) == SHARE - 1)
    await until(lambda: running(one) == SLOTS - (SHARE - 1))
    await settle()
    assert jobs(worker) == SLOTS


async def test_a_gateway_keeps_no_lent_slot_for_which_another_waits(tmp_path: Path) -> None:
    """Both borrow, and one needs more than its share, but not all that it is lent."""
    worker, one, two = await service(tmp_path)
    for router in (one, two):
        router.apply_topology(Topology((router.routes["m"].status,), gateways=3))
    theirs = ask(two, SLOTS + 1)
    await until(lambda: running(two) == SLOTS)
    ask(one, 3 * SLOTS)
    await until(lambda: running(one) == SLOTS // 3)
    left = SLOTS // 3 + 1
    for call in theirs[left:]:
        call.cancel()
    await until(lambda: (running(one), running(two)) == (SLOTS - left, left))
    theirs += ask(two, 1)  # it may borrow again, and gives back what it does not use
    await until(lambda: running(two) == left + 1)
    theirs[0].cancel()
    theirs[1].cancel()
    await until(lambda: running(two) == left - 1)
    await settle()
    assert jobs(worker) == SLOTS


async def test_a_gateway_that_dies_leaves_its_slots(tmp_path: Path) -> None:
    _, one, two = await service(tmp_path)
    ask(two, SLOTS)
    await until(lambda: running(two) == SLOTS)
    ask(one, 3 * SLOTS)
    await until(lambda: running(one) == SHARE)
    for replica in two.routes["m"].replicas.values():
        assert replica._connection is not None
        replica.wanted = False
        replica._connection.abort()
    await until(lambda: running(one) == SLOTS)


async def two_workers(path: Path, steps: int) -> tuple[Worker, Worker, Router]:
    """Two workers whose shares one of two gateways uses; each of its requests has had `steps`."""
    first, second, one = Worker(path / "w0.sock"), Worker(path / "w1.sock"), Router("gateway/0")
    await first.start()
    await second.start()
    model = ModelStatus("m", "echo", "-", 0, (first.status(), second.status()))
    one.apply_topology(Topology((model,), gateways=2))
    await until(lambda: len(one.routes["m"]._connected) == 2)
    calls = ask(one, 2 * SHARE)
    await until(lambda: jobs(first) == SHARE == jobs(second))
    for _ in range(steps):
        for worker in (first, second):
            for job in list(worker.engine.runs):
                worker.engine.step(job)
    await until(lambda: all(len(call.emitted) == steps for call in calls))
    return first, second, one


@pytest.mark.parametrize("steps", [0, 1])  # 1: answers that the other worker has to continue
async def test_a_dead_workers_requests_use_the_slots_of_others(tmp_path: Path, steps: int) -> None:
    first, second, one = await two_workers(tmp_path, steps)
    first.die()
    await until(lambda: jobs(second) == SLOTS)
    assert one.routes["m"].waiting == 0


async def test_calls_that_wait_use_free_slots_when_a_gateway_comes(tmp_path: Path) -> None:
    """None of its calls has ended since its share has become smaller, which would ask for more."""
    worker, one, _ = await service(tmp_path)
    ask(one, 2 * SLOTS)
    await until(lambda: running(one) == SLOTS)
    one.apply_topology(Topology((one.routes["m"].status,), gateways=4))
    await settle()
    replica = one.routes["m"].replicas[str(worker.path)]
    assert replica._slots() == SLOTS, "a share of two, and what the others do not use"


async def test_who_needs_no_more_asks_for_no_more(tmp_path: Path) -> None:
    worker, one, _ = await service(tmp_path)
    calls = ask(one, SLOTS + 1)
    await until(lambda: running(one) == SLOTS)
    assert worker.runner.lending.active
    for call in calls:
        call.cancel()
    ask(one, 1)
    await until(lambda: running(one) == 1)
    for job_id in [*worker.engine.runs]:
        for _ in range(60):
            if job_id in worker.engine.runs:
                worker.engine.step(job_id)
    await until(lambda: not worker.runner.lending.active)


async def test_no_word_is_said_with_a_gateway_alone(tmp_path: Path) -> None:
    worker, one, _ = await service(tmp_path)
    one.apply_topology(Topology(tuple(route.status for route in one.routes.values()), gateways=1))
    ask(one, 2 * SLOTS)
    await until(lambda: running(one) == SLOTS)
    await settle()
    assert not worker.runner.lending.active
