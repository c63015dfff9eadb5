"""What is gone on with where: workers of one generation, with room, and the prompt as it was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engines.echo.run import EchoCodec
from servekit.errors import ContextLengthExceeded, ModelChanged
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import ChatMessage, ReplicaStatus, SamplingParams
from tests.unit.gateway.conftest import EchoWorker, Service, until
from tests.unit.gateway.routing.test_router import answer, ask, echo


async def start(service: Service, generation: str, **options: Any) -> EchoWorker:
    worker = await service.worker(**options)
    worker.runner.info = replace(worker.runner.info, generation=generation)
    return worker


def status(worker: EchoWorker, state: Any = "ready") -> ReplicaStatus:
    return replace(worker.status(state), generation=worker.runner.info.generation)


async def connect(service: Service, *workers: EchoWorker) -> None:
    service.tell(*map(status, workers))
    route = service.router.routes["m"]
    await until(lambda: sum(one.routable for one in route.replicas.values()) == len(workers))


@pytest.mark.parametrize("seen", [True, False])
async def test_another_generation_goes_on_with_nothing(service: Service, seen: bool) -> None:
    old = await start(service, "a.1", step_s=0.002)
    await connect(service, old)
    call = service.router.queue_call(ask(tokens=60, stream=seen))
    task = asyncio.create_task(answer(call))
    await until(lambda: len(call.emitted) > 3)
    await connect(service, old, await start(service, "a.2", step_s=0.002))
    old.kill()
    service.tell(status(service.workers[1]))
    if seen:
        with pytest.raises(ModelChanged, match="another model"):
            await task
    else:
        assert await task == echo("hello ", 60)
    assert service.router.in_flight == 0


async def test_it_waits_for_one_that_may_be_of_its_generation_until_it_is_not(
    service: Service,
) -> None:
    old = await start(service, "a.1", step_s=0.002)
    await connect(service, old)
    call = service.router.queue_call(ask(tokens=60))
    task = asyncio.create_task(answer(call))
    await until(lambda: len(call.emitted) > 3)
    other = await start(service, "b.1")
    old.kill()
    coming = replace(status(old, "loading"), generation="a")
    service.tell(coming, status(other))
    route = service.router.routes["m"]
    await until(lambda: route.choosy)
    assert route.order() == [call] and service.router.position(call) == 0
    await until(lambda: any(one.routable for one in route.replicas.values()))
    assert not task.done() and list(route.choosy) == [call]
    service.tell(replace(coming, state="ready", generation="a.2"), status(other))
    with pytest.raises(ModelChanged):
        await task


async def test_a_smaller_context_ends_it_by_its_length_where_there_is_no_larger(
    service: Service,
) -> None:
    large = await start(service, "a.1", step_s=0.002, max_context=100)
    small = await start(service, "a.1", step_s=0.002, max_context=40)
    await connect(service, large)
    calls = [service.router.queue_call(ask(tokens=80)), service.router.queue_call(ask(tokens=12))]
    tasks = [asyncio.create_task(answer(call)) for call in calls]
    await until(lambda: all(len(call.emitted) > 3 for call in calls))
    await connect(service, large, small)
    large.kill()
    service.tell(status(small))
    assert [await task for task in tasks] == [echo("hello ", 34), echo("hello ", 12)]


async def test_of_a_larger_and_a_smaller_one_the_larger_goes_on(service: Service) -> None:
    first = await start(service, "a.1", step_s=0.002, max_context=100)
    await connect(service, first)
    calls = [service.router.queue_call(ask(tokens=80, stream=n % 2 == 0)) for n in range(4)]
    tasks = [asyncio.create_task(answer(call)) for call in calls]
    await until(lambda: all(len(call.emitted) > 3 for call in calls))
    small = await start(service, "a.1", step_s=0.002, max_context=40)
    large = await start(service, "a.1", step_s=0.002, max_context=100)
    await connect(service, first, small, large)
    first.kill()
    assert [await task for task in tasks] == [echo("hello ", 80)] * 4
    assert not small.steps


async def test_what_is_too_long_for_one_replica_is_run_by_another(service: Service) -> None:
    small = await start(service, "a.1", max_context=40)
    large = await start(service, "a.1", max_context=100)
    await connect(service, small, large)
    texts = await asyncio.gather(
        *(answer(service.router.queue_call(ask(tokens=80))) for _ in range(8))
    )
    assert texts == [echo("hello ", 80)] * 8
    with pytest.raises(ContextLengthExceeded, match="100 tokens"):
        await answer(service.router.queue_call(ask(tokens=200)))


class Clock(EchoCodec):
    """A template that tells the time."""

    now = 0

    def render_chat(self, messages: Any, *args: Any, **more: Any) -> list[int]:
        self.now += 1
        return list(map(ord, f"{self.now}{messages[-1].content}"))


async def test_a_prompt_is_rendered_once(service: Service) -> None:
    first = await start(service, "a.1", step_s=0.002)
    second = await start(service, "a.1", step_s=0.002)
    for worker, now in ((first, 0), (second, 5)):
        worker.engine.codec = Clock()
        worker.engine.codec.now = now
    await connect(service, first)
    messages = [ChatMessage("user", "bcdefg")]
    call = service.router.queue_call(
        InflightRequest("m", SamplingParams(max_tokens=60), messages=messages)
    )
    task = asyncio.create_task(answer(call))
    await until(lambda: len(call.emitted) > 3)
    await connect(service, first, second)
    first.kill()
    assert await task == echo("1bcdefg", 60)
