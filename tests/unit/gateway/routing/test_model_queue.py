"""Suspects, by the letter: where they are tried, and which deaths are theirs."""

from __future__ import annotations

from msgspec.structs import replace

from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import (
    Generate,
    IsolationEnded,
    IsolationStarted,
    ReplicaStatus,
    SamplingParams,
)
from tests.unit.gateway.conftest import Service, until
from tests.unit.gateway.routing.test_router import answer, ask, scripted
from tests.unit.gateway.scripted import ScriptedWorker


def suspect(service: Service, prompt: str = "ab") -> InflightRequest:
    """A call that has just lost its second worker, and waits for a turn."""
    call = ask(prompt, 6)
    for _ in range(2):
        call.died()
    service.router._begin(route(service), call)
    route(service).take_back(call)
    route(service).dispatch_all()
    return call


def route(service: Service) -> ModelQueue:
    return service.router.routes["m"]


def other(id: int = 99) -> Generate:
    """Another gateway's request."""
    return Generate(id, SamplingParams(max_tokens=9), prompt="other")


def run_for_another(worker: ScriptedWorker) -> None:
    worker.jobs[99] = other()
    worker.done[99] = 0


async def test_a_death_before_its_turn_does_not_count(service: Service) -> None:
    [worker] = await scripted(service)
    run_for_another(worker)
    call = suspect(service)
    await until(lambda: worker.line)
    late = service.router.queue_call(ask("late ", 6))
    assert late.replica is None, "it waits here, from where it may go elsewhere"
    worker.kill()
    await until(lambda: call.replica is None)
    assert (call.deaths, call.deaths_in_all, call.alone_until) == (2, 2, "proven")
    await service.up()
    assert await answer(call) == "ababab"
    assert await answer(late) == "late l"


async def test_a_death_while_alone_does(service: Service) -> None:
    [worker] = await scripted(service)
    call = suspect(service)
    await until(lambda: worker.jobs)
    worker.kill()
    await until(lambda: call.done)
    assert call.deaths == 3
    assert len(service.reports) == 1


async def test_what_was_held_for_another_gateways_suspect_is_innocent(service: Service) -> None:
    [worker] = await scripted(service)
    proven = service.router.queue_call(ask("pr", 6))
    await until(lambda: worker.jobs)
    worker.generate(1, 2)
    await until(lambda: proven.proven)
    held = service.router.queue_call(ask("he", 6))
    worker.peers[-1].send(IsolationStarted())
    [replica] = route(service).replicas.values()
    await until(lambda: replica.alone == 0)
    assert replica.credits <= 0
    worker.kill()
    await until(lambda: held.replica is None)
    assert (proven.deaths, held.deaths, held.deaths_in_all) == (1, 0, 0)
    await service.up()
    assert [await answer(call) for call in (proven, held)] == ["prprpr", "hehehe"]


async def test_a_suspect_that_a_draining_worker_returns_is_one_still(service: Service) -> None:
    [worker] = await scripted(service)
    worker.draining = True
    call = suspect(service)
    await until(lambda: route(service).suspects)
    assert route(service).suspects.order() == [call]
    [worker] = await scripted(service)
    await until(lambda: worker.alone)


async def test_a_suspect_that_is_cancelled_holds_nobody(service: Service) -> None:
    [worker] = await scripted(service)
    run_for_another(worker)
    call = suspect(service)
    late = service.router.queue_call(ask("late ", 6))
    assert late.replica is None
    call.cancel()
    assert late.replica is not None, "before the worker has said a word"
    await until(lambda: len(worker.jobs) == 2)


async def test_a_suspect_goes_where_it_does_the_least_harm(service: Service) -> None:
    """To an empty replica, also one that is coming; other gateways' calls are counted, too."""
    first, second = await scripted(service, 2)
    coming = replace(second.status(), state="loading")
    service.tell(replace(first.status(), running=2), coming)
    call = suspect(service)
    assert call.replica is None, "one that is empty is on its way"
    service.tell(replace(first.status(), running=2), second.status())
    await until(lambda: second.jobs)
    call.cancel()
    service.tell(replace(first.status(), running=2), replace(coming, state="failed"))
    suspect(service)
    await until(lambda: first.jobs)


async def test_a_suspect_spares_the_last_worker_while_another_is_on_its_way(
    service: Service,
) -> None:
    [worker] = await scripted(service)
    coming = replace(worker.status(), name="m/1", socket="coming.sock", state="loading")
    service.tell(worker.status(), coming)
    call = suspect(service)
    assert call.replica is None, "all others would lose their only worker with it"
    service.tell(worker.status(), replace(coming, state="failed"))
    assert call.replica is not None
    call.cancel()


async def test_a_suspect_that_spared_a_worker_in_vain_gets_the_next_one(service: Service) -> None:
    """New deadly calls kill each worker before another has come up."""
    [first] = await scripted(service)
    coming = replace(first.status(), name="m/1", socket="coming.sock", state="loading")
    service.tell(first.status(), coming)
    following, call = suspect(service, "cd"), suspect(service)
    new = service.router.queue_call(ask("new", 6))
    await until(lambda: first.jobs)
    first.kill()
    second = await start_beside(service, coming)
    await until(lambda: second.jobs)
    assert [one.replica is None for one in (call, following, new)] == [False, True, True]
    second.kill()
    await until(lambda: call.done)
    third = await start_beside(service, coming)
    await until(lambda: third.jobs)
    assert following.replica is None, "a suspect has killed the last one, so it waits again"
    assert new.replica is not None
    following.cancel()
    new.cancel()


async def start_beside(service: Service, coming: ReplicaStatus) -> ScriptedWorker:
    """A worker beside one that is being started."""
    service.scripted += 1
    worker = ScriptedWorker(service.folder / f"s{service.scripted}.sock", 4)
    await worker.start()
    service.tell(worker.status(), coming)
    return worker


async def test_suspects_of_two_gateways_do_not_run_on_all_workers(service: Service) -> None:
    first, second = await scripted(service, 2)
    first.peers[-1].send(IsolationStarted())
    await until(lambda: any(one.held for one in route(service).replicas.values()))
    call = suspect(service)
    assert call.replica is None
    first.peers[-1].send(IsolationEnded())
    await until(lambda: call.replica is not None)
    call.cancel()
    assert second.peers
