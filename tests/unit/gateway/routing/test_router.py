"""The router with real workers behind it: nothing is lost, nothing is answered twice."""

from __future__ import annotations

import asyncio
import functools
import time
from contextvars import copy_context

import pytest
from msgspec.structs import replace

from servekit.engines.echo.engine import SERVES
from servekit.errors import (
    LONGEST_MESSAGE,
    ClientClosed,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RequestError,
    RequestQuarantined,
    SourceQuarantined,
    WorkerLost,
)
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.http.request_context import INCOMPLETE, RequestContext
from servekit.gateway.routing.failures.suspect_sources import Suspect
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import IncompleteRequest, waiting_of
from servekit.protocol.messages import (
    AccessRules,
    ChatMessage,
    DeathReport,
    Delta,
    KeyRule,
    ModelInfo,
    ModelStatus,
    Quarantined,
    SamplingParams,
    SourceReport,
    Topology,
)
from tests.api_keys import new_key
from tests.unit.gateway.conftest import (
    DEADLINE_S,
    ENDLESS,
    ENDLESS_TOKENS,
    EchoWorker,
    Service,
    until,
)
from tests.unit.gateway.scripted import ScriptedWorker


def ask(
    text: str = "hello ", tokens: int = 24, key: str = "", *, stream: bool = True
) -> InflightRequest:
    return InflightRequest(
        "m", SamplingParams(max_tokens=tokens), prompt=text, key=key, stream=stream
    )


def busy(worker: EchoWorker) -> bool:
    return worker.running == 1


def echo(text: str, tokens: int) -> str:
    return (text * (tokens // len(text) + 1))[:tokens]


async def answer(call: InflightRequest, within_s: float = DEADLINE_S) -> str:
    async with asyncio.timeout(within_s):
        return "".join([delta.text async for delta in call])


async def test_streamed_and_whole_answers_are_the_same(service: Service) -> None:
    await service.up(step_s=0.001)
    calls = [service.router.queue_call(ask(stream=stream)) for stream in (True, False)]
    assert [await answer(call) for call in calls] == [echo("hello ", 24)] * 2
    assert service.router.in_flight == 0


async def test_a_chat_by_its_alias(service: Service) -> None:
    await service.up()
    call = InflightRequest(
        "alias", SamplingParams(max_tokens=2), messages=[ChatMessage("user", "hi")]
    )
    assert await answer(service.router.queue_call(call)) == "hi"


async def test_a_worker_holds_only_what_it_has_slots_for(service: Service) -> None:
    [worker] = await service.up(step_s=0.005, slots=2)
    calls = [service.router.queue_call(ask(tokens=10)) for _ in range(6)]
    route = service.router.routes["m"]
    assert (route.running, len(route.queue)) == (2, 4)
    assert [service.router.position(call) for call in calls] == [None, None, 0, 1, 2, 3]
    await until(lambda: worker.running == 2)
    assert await asyncio.gather(*map(answer, calls)) == [echo("hello ", 10)] * 6


async def test_load_goes_to_the_replica_with_the_most_room(service: Service) -> None:
    workers = await service.up(3, step_s=0.005, slots=8)
    calls = [service.router.queue_call(ask(tokens=40)) for _ in range(9)]
    await until(lambda: sum(worker.running for worker in workers) == 9)
    assert [worker.running for worker in workers] == [3, 3, 3]
    for call in calls:
        call.cancel()


async def test_gateways_share_the_slots_of_a_worker(service: Service) -> None:
    worker = await service.worker(step_s=0.005, slots=8)
    service.tell(worker.status(), gateways=4)
    await until(lambda: service.router.routes["m"].ready)
    calls = [service.router.queue_call(ask()) for _ in range(5)]
    assert service.router.routes["m"].running == 2
    for call in calls:
        call.cancel()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_goes_on_elsewhere_when_its_worker_dies(
    service: Service, stream: bool
) -> None:
    first, second = await service.up(2, step_s=0.002)
    calls = [service.router.queue_call(ask(tokens=60, stream=stream)) for _ in range(8)]
    answers = [asyncio.create_task(answer(call)) for call in calls]
    await until(lambda: all(len(call.emitted) > 3 for call in calls))
    first.kill()
    assert await asyncio.gather(*answers) == [echo("hello ", 60)] * 8
    assert service.router.in_flight == 0
    assert sum(call.deaths_in_all for call in calls) == 4
    # the survivor did only what was missing
    assert sum(len(step.token_ids) for step in second.steps) < 8 * 60


async def test_a_seeded_answer_is_the_same_after_a_death(service: Service) -> None:
    first, _ = await service.up(2, step_s=0.002)
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=4)
    call = service.router.queue_call(InflightRequest("m", params, prompt="abcdef"))
    task = asyncio.create_task(answer(call))
    await until(lambda: len(call.emitted) > 3)
    first.kill()
    assert await task == echo("efabcd", 50)


async def test_requests_wait_for_the_worker_that_replaces_a_dead_one(service: Service) -> None:
    [worker] = await service.up(step_s=0.002)
    call = service.router.queue_call(ask(tokens=40))
    task = asyncio.create_task(answer(call))
    await until(lambda: len(call.emitted) > 3)
    worker.kill()
    service.tell(worker.status("backoff"))
    late = service.router.queue_call(ask(tokens=3))
    replacement = await service.worker()
    service.tell(replacement.status())
    assert await task == echo("hello ", 40)
    assert await answer(late) == "hel"


async def test_a_request_that_no_worker_survives_is_quarantined(service: Service) -> None:
    poison = ask("poison", tokens=5000)
    router = service.router
    for deaths in range(3):
        [worker] = await service.up(step_s=1000.0)
        if not deaths:
            router.queue_call(poison)
        await until(functools.partial(busy, worker))
        assert not poison.done
        worker.kill()
        await until(lambda: poison.replica is None)
    with pytest.raises(RequestQuarantined, match="refused for 600 s"):
        await answer(poison)
    [report] = service.reports
    assert (report.model, len(report.fingerprint)) == ("m", 64)
    [worker] = await service.up(step_s=0.001)
    with pytest.raises(RequestQuarantined, match=report.fingerprint[:16]):
        router.queue_call(ask("poison", tokens=5000))
    assert await answer(router.queue_call(ask("poison", tokens=4))) == "pois"
    assert router.in_flight == 0


async def test_a_draining_worker_finishes_what_it_has(service: Service) -> None:
    first, second = await service.up(2, step_s=0.002)
    calls = [service.router.queue_call(ask(tokens=40)) for _ in range(4)]
    first.runner.draining = True  # before the gateway hears of it
    late = [service.router.queue_call(ask(tokens=8)) for _ in range(4)]
    tasks = [asyncio.create_task(answer(call)) for call in [*calls, *late]]
    await until(lambda: late[0].emitted)
    service.tell(second.status())
    assert [len(text) for text in await asyncio.gather(*tasks)] == [40] * 4 + [8] * 4
    assert sum(call.deaths_in_all for call in [*calls, *late]) == 0


async def test_cancelling_frees_the_engine_and_the_queue(service: Service) -> None:
    [worker] = await service.up(slots=1, **ENDLESS)
    running, waiting = (service.router.queue_call(ask(tokens=ENDLESS_TOKENS)) for _ in range(2))
    await until(lambda: worker.running == 1)
    waiting.cancel()
    assert len(service.router.routes["m"].queue) == 0
    running.cancel()
    await until(lambda: worker.running == 0)
    assert service.router.in_flight == 0
    with pytest.raises(ClientClosed):
        await running.next_delta()
    assert await answer(service.router.queue_call(ask(tokens=4))) == "hell"


async def test_leaving_the_answer_early_cancels_it(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    call = service.router.queue_call(ask(tokens=ENDLESS_TOKENS))
    async for _ in call:
        break
    await until(lambda: worker.running == 0)


async def test_a_reload_changes_how_many_may_wait_and_for_how_long(service: Service) -> None:
    service.max_queue = 1
    [worker] = await service.up(slots=1, **ENDLESS)
    running, waiting = (service.router.queue_call(ask(tokens=ENDLESS_TOKENS)) for _ in range(2))
    with pytest.raises(QueueFull):
        service.router.queue_call(ask())
    service.max_queue, service.timeout_s = 2, 0.1
    service.tell(worker.status())
    late = service.router.queue_call(ask())
    assert late.limit_s == 0.1
    with pytest.raises(QueueFull):
        service.router.queue_call(ask())
    with pytest.raises(DeadlineExceeded, match="waiting"):
        await answer(late)
    assert not running.done and not waiting.done, "they came under another limit"


async def test_a_client_may_ask_for_less_time_than_the_models_and_not_for_more(
    service: Service,
) -> None:
    service.timeout_s = 30.0
    await service.up(**ENDLESS)
    asked = {None: 30.0, 5.0: 5.0, 90.0: 30.0}
    for timeout_s, limit_s in asked.items():
        call = service.router.queue_call(ask(tokens=ENDLESS_TOKENS), timeout_s)
        assert call.limit_s == limit_s
        call.cancel()


async def test_what_waits_for_a_model_that_is_removed_is_told(service: Service) -> None:
    [worker] = await service.up(slots=1, **ENDLESS)
    running, waiting = (service.router.queue_call(ask(tokens=ENDLESS_TOKENS)) for _ in range(2))
    await until(lambda: worker.running == 1)
    service.router.apply_topology(Topology(()))
    with pytest.raises(ModelUnavailable):
        await answer(waiting, within_s=10.0)
    assert not running.done
    running.cancel()


async def test_requests_wait_while_a_reload_leaves_no_worker_for_a_time(service: Service) -> None:
    [old] = await service.up(slots=1, **ENDLESS)
    running = service.router.queue_call(ask(tokens=ENDLESS_TOKENS))
    await until(lambda: old.running == 1)
    waiting = service.router.queue_call(ask())
    service.tell(old.status("draining"), changing=True)
    service.tell(changing=True)
    late = service.router.queue_call(ask())
    running.cancel()
    old.kill()
    new = await service.worker()
    service.tell(new.status())
    assert await answer(waiting) == await answer(late)
    service.tell()
    with pytest.raises(ModelUnavailable, match="stopped"):
        service.router.queue_call(ask())


async def test_deadlines_count_waiting_and_running(service: Service) -> None:
    [worker] = await service.up(step_s=0.002, slots=1)
    running = service.router.queue_call(ask(tokens=8000), timeout_s=0.6)
    waiting = service.router.queue_call(ask(), timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="waiting"):
        await answer(waiting)
    with pytest.raises(DeadlineExceeded, match="running"):
        await answer(running)
    await until(lambda: worker.running == 0)


async def test_a_full_queue_is_429(service: Service) -> None:
    service.max_queue = 2
    await service.up(step_s=0.01, slots=1)
    calls = [service.router.queue_call(ask()) for _ in range(3)]
    with pytest.raises(QueueFull) as refused:
        service.router.queue_call(ask())
    assert refused.value.retry_after_s
    for call in calls:
        call.cancel()


async def test_errors_of_the_worker_reach_their_own_request_only(service: Service) -> None:
    await service.up(max_context=32)
    router = service.router
    with pytest.raises(ContextLengthExceeded, match="32 tokens"):
        await answer(router.queue_call(ask("x" * 40)))
    with pytest.raises(RequestError, match="empty"):
        await answer(router.queue_call(ask("")))
    bad_ids = InflightRequest("m", SamplingParams(max_tokens=2), prompt=[1, 2**31 - 1])
    with pytest.raises(RequestError, match="token ids"):
        await answer(router.queue_call(bad_ids))
    assert await answer(router.queue_call(ask(tokens=4))) == "hell"
    assert router.in_flight == 0


async def test_what_cannot_cross_the_wire_is_refused_and_holds_nothing(service: Service) -> None:
    [worker] = await service.up(slots=1)
    for value in (2**64, "\ud800"):
        call = InflightRequest("m", SamplingParams(), prompt="x", more={"template": {"a": value}})
        with pytest.raises(RequestError, match="cannot be passed on") as error:
            await answer(service.router.queue_call(call))
        assert error.value.status == 400
    assert await answer(service.router.queue_call(ask(tokens=4))) == echo("hello ", 4)
    assert not service.router.in_flight
    assert not worker.running


@pytest.mark.lane("long")
async def test_many_long_requests_at_once_do_not_cost_the_worker(service: Service) -> None:
    """More than may be unsent, were all sent at once: they go one after the other."""
    await service.up(max_context=10)
    [replica] = service.router.routes["m"].replicas.values()
    calls = [service.router.queue_call(ask("x" * 4_000_000, 2)) for _ in range(40)]
    assert len(replica.calls) < 10
    waiting = [answer(call, 240.0) for call in calls]  # 160 MB to encode, and to read
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in answers} == {ContextLengthExceeded}
    assert all(not call.deaths for call in calls)
    assert replica.credits > 0


async def test_what_a_client_sent_does_not_come_back_whole(service: Service) -> None:
    await service.up()
    with pytest.raises(ModelNotFound) as error:
        service.router.find("x" * 100_000)
    assert "the models are: m" in error.value.message
    assert len(error.value.message) < 300
    assert len(RequestError("é" * 100_000).message) == LONGEST_MESSAGE


async def test_what_is_not_served_is_404_or_503(service: Service) -> None:
    with pytest.raises(ModelNotFound, match="none yet"):
        service.router.queue_call(ask())
    worker = await service.worker()
    service.tell(worker.status("loading"))
    with pytest.raises(ModelUnavailable, match="not ready yet"):
        service.router.queue_call(ask())
    service.tell(worker.status("failed", "no such file"))
    with pytest.raises(ModelUnavailable, match="no such file"):
        service.router.queue_call(ask())
    with pytest.raises(ModelNotFound, match="the models are: m"):
        service.router.queue_call(InflightRequest("other", SamplingParams(), prompt="x"))


async def test_a_new_gateway_waits_for_a_model_that_has_served_before(service: Service) -> None:
    worker = await service.worker()
    service.tell(worker.status("loading"))
    status = service.router.routes["m"].status
    service.router.apply_topology(Topology((replace(status, has_served=True),)))
    call = service.router.queue_call(ask())
    service.tell(worker.status())
    assert (await answer(call)).startswith("hello hello")


def two_models(*rules: KeyRule, default: str = "") -> Topology:
    models = tuple(ModelStatus(name, "echo", "-", 0, (), aliases=(name * 2,)) for name in "ab")
    return Topology(models, access=AccessRules(keys=rules, default_model=default))


async def test_a_request_without_a_model_gets_the_default_one(service: Service) -> None:
    router = service.router
    router.apply_topology(two_models())
    assert router.find("").status.name == "a"
    router.apply_topology(
        Topology(two_models().models[::-1])
    )  # the file has them in another order now
    assert router.find("").status.name == "b"
    router.apply_topology(two_models(default="b"))
    assert router.find("").status.name == "b"
    router.apply_topology(two_models(default="bb"))  # an alias
    assert router.find("").status.name == "b"


async def test_a_key_that_may_not_use_the_default_model_gets_one_of_its_own(
    service: Service,
) -> None:
    only_b = KeyRule("alice", digest=b"x", models=("b",))
    service.router.apply_topology(two_models(only_b, default="a"))
    ACTING.set(service.router.access.callers["alice"])
    assert service.router.find("").status.name == "b"


async def test_what_waits_is_told_when_nothing_will_come(service: Service) -> None:
    [worker] = await service.up(step_s=0.01, slots=1)
    running, waiting = (service.router.queue_call(ask(tokens=500)) for _ in range(2))
    service.tell(worker.status("failed", "gave up"))
    worker.kill()
    for call in (running, waiting):
        with pytest.raises(ModelUnavailable, match="cannot serve"):
            await answer(call)


async def test_draining_lets_what_is_in_flight_finish(service: Service) -> None:
    [worker] = await service.up(step_s=0.002)
    call = service.router.queue_call(ask(tokens=20))
    service.tell(worker.status(), draining=True)
    with pytest.raises(ModelUnavailable, match="shutting down"):
        service.router.queue_call(ask())
    assert not service.router.idle.is_set()
    assert await answer(call) == echo("hello ", 20)
    assert service.router.idle.is_set()


async def test_what_is_incomplete_before_the_drain_is_served_and_what_comes_later_is_not(
    service: Service,
) -> None:
    [worker] = await service.up(step_s=0.002)
    router = service.router
    router.hold_incomplete(before := IncompleteRequest(1, lambda error: None))
    service.tell(worker.status(), draining=True)
    with pytest.raises(ModelUnavailable, match="shutting down"):
        router.hold_incomplete(IncompleteRequest(1, lambda error: None))
    assert not router.idle.is_set()
    call = copy_context().run(lambda: (INCOMPLETE.set(True), router.queue_call(ask(tokens=2)))[1])
    router.release_incomplete(before)
    assert await answer(call) == echo("hello ", 2)
    assert router.idle.is_set()


async def test_a_stop_string_across_steps_ends_the_job_in_the_engine(service: Service) -> None:
    [worker] = await service.up(**ENDLESS)
    params = SamplingParams(max_tokens=ENDLESS_TOKENS, stop=("lo he",))
    call = service.router.queue_call(InflightRequest("m", params, prompt="hello "))
    assert await answer(call) == "hel"
    await until(lambda: worker.running == 0)


# ---------------------------------------------------------------- deaths, by the letter


async def scripted(service: Service, count: int = 1, **options: bool) -> list[ScriptedWorker]:
    """Workers that wait to be told what to answer, connected; those before them are gone."""
    workers = []
    for _ in range(count):
        service.scripted += 1
        path = service.folder / f"s{service.scripted}.sock"
        workers.append(ScriptedWorker(path, 4, **options))
        await workers[-1].start()
    service.tell(*(worker.status() for worker in workers))
    route = service.router.routes["m"]
    await until(lambda: sum(r.routable for r in route.replicas.values()) == count)
    return workers


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_that_straddles_the_break(
    service: Service, at: int, stream: bool
) -> None:
    """The worker dies after `at` tokens, before, amid and after the string's beginning."""
    [first] = await service.up(step_s=0.001)
    params = SamplingParams(max_tokens=100, stop=("efghab",))
    call = service.router.queue_call(InflightRequest("m", params, prompt="abcdefgh", stream=stream))
    replica = call.replica
    assert replica is not None
    await until(lambda: len(call.emitted) >= at)
    first.kill()
    await until(lambda: call.replica is not replica)
    if not call.done:  # this process may have been late to notice
        await service.up(step_s=0.001)
    deltas: list[Delta] = []
    async with asyncio.timeout(DEADLINE_S):
        while not deltas or deltas[-1].finish is None:
            deltas.append(await call.next_delta())
    assert "".join(delta.text for delta in deltas) == "abcd"
    assert (deltas[-1].finish, deltas[-1].completion_tokens) == ("stop", 10)
    assert [delta.finish for delta in deltas].count("stop") == 1


async def test_the_last_answers_of_a_dead_worker_are_taken(service: Service) -> None:
    """It finished them and died; and the gateway, not having read yet, writes to it."""
    [worker] = await scripted(service)
    calls = [service.router.queue_call(ask(tokens=6)) for _ in range(3)]
    await until(lambda: len(worker.jobs) == 3)
    cancelled, *rest = calls
    for job in list(worker.jobs):
        worker.generate(job, 6)
    for peer in worker.peers:
        peer.close()  # what it has sent is in our socket
    cancelled.cancel()  # a write to a dead worker
    assert await asyncio.gather(*map(answer, rest)) == ["hello "] * 2
    assert [call.deaths_in_all for call in rest] == [0, 0]


async def test_what_cannot_be_resumed_ends_with_an_error_or_begins_anew(service: Service) -> None:
    [worker] = await scripted(service, resumes=False)
    begun = service.router.queue_call(ask(tokens=6))
    whole = service.router.queue_call(ask(tokens=6, stream=False))
    fresh = service.router.queue_call(ask(tokens=6))
    await until(lambda: len(worker.jobs) == 3)
    for job in list(worker.jobs)[:2]:
        worker.generate(job, 3)
    assert (await begun.next_delta()).text == "hel"
    await until(lambda: len(whole.emitted) == 3)
    worker.kill()
    with pytest.raises(WorkerLost, match="cannot continue it"):
        await answer(begun)
    await service.up()
    assert await answer(whole) == await answer(fresh) == "hello "


async def test_half_an_answer_is_an_error_not_an_answer(service: Service) -> None:
    [worker] = await scripted(service)
    call = service.router.queue_call(ask(tokens=6, stream=False), timeout_s=0.2)
    await until(lambda: worker.jobs)
    worker.generate(1, 3)
    with pytest.raises(DeadlineExceeded, match="running"):
        await answer(call)


async def test_suspects_are_tried_one_at_a_time_and_away_from_the_others(
    service: Service,
) -> None:
    router = service.router
    suspects = [ask("ab", 6), ask("cd", 6), ask("ef", 6)]
    for deaths in range(2):
        [worker] = await scripted(service)
        if not deaths:
            for call in suspects:
                router.queue_call(call)
        await until(lambda: len(worker.jobs) == 3)  # noqa: B023
        worker.kill()
        await until(lambda: suspects[0].replica is None)
    ward, other = await scripted(service, 2)
    await until(lambda: ward.jobs or other.jobs)
    if other.jobs:
        ward, other = other, ward
    innocents = [router.queue_call(ask("x", 6)) for _ in range(5)]
    await until(lambda: len(other.jobs) == 4)
    assert (len(ward.jobs), router.routes["m"].waiting) == (1, 3), "nothing joins the suspect"
    assert [router.position(call) for call in suspects] == [None, 0, 1]
    ward.generate(1, 1)
    await until(lambda: len(suspects[0].emitted) == 1)
    assert len(ward.jobs) == 1, "a prefill alone proves nothing"
    ward.generate(1, 1)
    await until(lambda: len(ward.jobs) == 2)
    ward.kill()  # the second one's third death; the first one was proven
    await until(lambda: suspects[1].done)
    with pytest.raises(RequestQuarantined):
        await answer(suspects[1])
    assert [call.deaths for call in suspects] == [1, 3, 2]
    other.kill()
    await service.up(2)
    assert [await answer(call) for call in (*innocents, suspects[0], suspects[2])] == [
        *["xxxxxx"] * 5,
        "ababab",
        "efefef",
    ]


async def test_a_stalled_worker_gets_nothing_new_and_the_model_is_not_ready(
    service: Service,
) -> None:
    [worker] = await scripted(service)
    call = service.router.queue_call(ask(tokens=6))
    await until(lambda: worker.jobs)
    worker.state = "stalled"
    service.tell(worker.status())
    route = service.router.routes["m"]
    assert not route.ready and not route.is_permanently_down
    late = service.router.queue_call(ask(tokens=6))
    assert (route.running, route.waiting) == (1, 1), "one waits for the end of the other's worker"
    worker.kill()
    await until(lambda: call.replica is None)
    await service.up()
    assert await answer(call) == await answer(late) == "hello "
    assert (call.deaths_in_all, late.deaths_in_all) == (1, 0)


async def test_an_open_breaker_is_503_with_retry_after_at_once(service: Service) -> None:
    [worker] = await service.up()
    worker.kill()
    service.tell(worker.status("failed", "it died 5 times in a minute"))
    with pytest.raises(ModelUnavailable, match="5 times") as refused:
        service.router.queue_call(ask())
    assert refused.value.retry_after_s


async def test_a_gateway_that_has_just_started_waits_for_its_connections(
    service: Service,
) -> None:
    worker = await service.worker()
    service.tell(worker.status())
    assert not service.router.routes["m"].ready
    assert await answer(service.router.queue_call(ask(tokens=3))) == "hel"


async def test_identical_requests_that_wait_are_quarantined_too(service: Service) -> None:
    router = service.router
    poison: InflightRequest | None = None
    for _ in range(3):
        [worker] = await scripted(service)
        poison = poison or router.queue_call(ask("poison"))
        await until(lambda: len(worker.jobs) == 1)  # noqa: B023
        worker.kill()
        await until(lambda: poison.replica is None)  # noqa: B023
        if poison.deaths == 2:
            worker.state = "backoff"
            service.tell(worker.status())
            waiting = router.queue_call(ask("poison", key="another"))
            other = router.queue_call(ask("other "))
    assert poison is not None
    for call in (poison, waiting):
        with pytest.raises(RequestQuarantined):
            await answer(call)
    assert len(service.reports) == 1
    await service.up()
    assert await answer(other) == echo("other ", 24)


async def test_a_full_queue_keeps_out_only_those_who_filled_it(service: Service) -> None:
    service.max_queue = 4
    await service.up(step_s=0.002, slots=1)
    crowd = [service.router.queue_call(ask(key="crowd")) for _ in range(5)]
    light = service.router.queue_call(ask("light ", key="light"))
    with pytest.raises(QueueFull):
        service.router.queue_call(ask(key="crowd"))
    with pytest.raises(QueueFull):
        await answer(crowd[-1])
    assert await answer(light) == echo("light ", 24)
    assert [await answer(call) for call in crowd[:-1]] == [echo("hello ", 24)] * 4


async def test_a_request_that_never_fits_takes_nobodys_place(service: Service) -> None:
    service.max_queue = 4
    await service.up(step_s=0.002, slots=1, max_context=1000)
    crowd = [service.router.queue_call(ask(key="crowd")) for _ in range(5)]
    route = service.router.routes["m"]
    route.set_status(replace(route.status, info=INFO))
    long = InflightRequest("m", SamplingParams(), prompt=list(range(1001)), key="light")
    with pytest.raises(ContextLengthExceeded):
        service.router.queue_call(long)
    assert [await answer(call) for call in crowd] == [echo("hello ", 24)] * 5


# ---------------------------------------------------------------- a line for suspected sources

ADDRESS = "10.0.0.1"


def ask_from_address(text: str = "hello ", key: str = "", tokens: int = 24) -> InflightRequest:
    call = ask(text, tokens, key)
    call.origin = RequestContext({}, (ADDRESS, 5))
    return call


def charge_address(service: Service, deaths: int = 2, *, sure: bool = False) -> None:
    """Hold deaths of workers against the address that all clients have."""
    for _ in range(deaths):
        killer = Suspect((f"address:{ADDRESS}",))
        service.router.sources.add_death([killer], sure=sure, now_s=time.monotonic())
        service.router.sources.charge_suspect(killer)


async def test_only_one_of_several_gateways_reports_deaths_to_others(service: Service) -> None:
    [worker] = await service.up()
    charge_address(service)
    assert service.news == []
    service.tell(worker.status(), gateways=2)
    charge_address(service, 3)
    await until(lambda: service.news)
    [news] = service.news
    assert [death.charged for death in news.deaths] == [{f"address:{ADDRESS}": 1}] * 3


def news_of_another(service: Service, deaths: int) -> SourceReport:
    """Return another gateway's report of deaths that are charged to the address."""
    charged = {f"address:{ADDRESS}": 1}
    parts = [DeathReport(f"w{n}.sock", False, 0.0, 1, charged) for n in range(deaths)]
    return SourceReport("gateway/other", tuple(parts))


async def test_deaths_at_another_gateway_isolate_what_waits_and_what_comes(
    service: Service,
) -> None:
    await service.up(step_s=0.002, slots=1)
    running, waiting = (service.router.queue_call(ask_from_address()) for _ in range(2))
    service.router.add_source_report(news_of_another(service, 2))
    assert waiting.alone_until
    new, stranger = service.router.queue_call(ask_from_address()), service.router.queue_call(ask())
    assert new.alone_until and not stranger.alone_until
    for call in (running, waiting, new, stranger):
        assert await answer(call) == echo("hello ", 24)


async def test_what_waits_is_refused_with_its_source_by_another_gateway(service: Service) -> None:
    [worker] = await service.up(step_s=0.002, slots=1)
    running, waiting = (service.router.queue_call(ask_from_address()) for _ in range(2))
    stranger = service.router.queue_call(ask())
    entry = Quarantined(f"address:{ADDRESS}", "m", 0.0, 60.0)
    status = service.router.routes["m"].status
    service.router.apply_topology(Topology((status,), gateways=2, quarantined=(entry,)))
    with pytest.raises(SourceQuarantined):
        await answer(waiting)
    with pytest.raises(SourceQuarantined):
        service.router.queue_call(ask_from_address())
    assert await answer(running) == await answer(stranger) == echo("hello ", 24)
    assert worker.running == 0


async def test_a_whole_answer_that_waits_again_is_refused_with_its_source(
    service: Service,
) -> None:
    """Its client has nothing of it, whatever a worker has computed before it died."""
    await service.up(step_s=0.002, slots=1)
    running = service.router.queue_call(ask())
    whole, stream = (ask_from_address() for _ in range(2))
    whole.stream, stream.stream = False, True
    for call in (whole, stream):
        service.router.queue_call(call)
        call.emitted = [ord("h")]
    found = waiting_of(service.router.routes["m"], f"address:{ADDRESS}")
    assert found == [whole]
    for call in (running, whole, stream):
        call.cancel()


async def test_an_answer_under_way_speaks_for_its_address(service: Service) -> None:
    [worker] = await service.up(step_s=0.002)
    service.tell(worker.status(), gateways=2)
    long = service.router.queue_call(ask_from_address(tokens=5000))
    await until(lambda: long.proven)
    news = news_of_another(service, 3)
    sure = tuple(replace(death, sure=True) for death in news.deaths)
    service.router.add_source_report(replace(news, deaths=sure))
    await until(lambda: service.news)
    assert service.news[0].passed == {f"address:{ADDRESS}": 0}
    call = service.router.queue_call(ask_from_address())
    assert call.alone_until and call.not_before_s > time.monotonic(), "it waits, it is not refused"
    for one in (call, long):
        one.cancel()


async def test_a_crowd_of_a_suspected_address_keeps_out_only_itself(service: Service) -> None:
    service.max_queue = 4
    await service.up(step_s=0.002, slots=1)
    charge_address(service)
    crowd = [service.router.queue_call(ask_from_address(key="crowd")) for _ in range(5)]
    assert all(call.alone_until for call in crowd)
    light = service.router.queue_call(ask_from_address("light ", "light"))
    assert [service.router.position(call) for call in (crowd[1], light)] == [0, 1], "it has a turn"
    with pytest.raises(QueueFull):
        service.router.queue_call(ask_from_address(key="crowd"))
    with pytest.raises(QueueFull):
        await answer(crowd[-1])
    assert await answer(light) == echo("light ", 24)
    assert [await answer(call) for call in crowd[:-1]] == [echo("hello ", 24)] * 4


async def test_an_unknown_name_is_told_with_what_may_have_been_meant(service: Service) -> None:
    await service.up()
    with pytest.raises(ModelNotFound) as error:
        service.router.find("aliass")
    assert error.value.message.endswith("the models are: m, alias; did you mean 'alias'?")


async def test_no_name_is_suggested_that_the_key_may_not_use(service: Service) -> None:
    await service.up()
    rule = KeyRule("none", new_key("none")[1], models=("other",))
    service.router.access.apply_rules(AccessRules((rule,)))
    with pytest.raises(ModelNotFound, match=r"the models are: none yet$"):
        service.router.find("aliass")


# ---------------------------------------------------------------- bytes of what waits

MIB = 2**20
INFO = ModelInfo(1000, 1, True, "echo", "none", "cpu")


def limit_queue(service: Service, size_bytes: int) -> None:
    service.router.access.apply_rules(AccessRules(max_queue_bytes=size_bytes))


def large(key: str = "", mib: int = 1) -> InflightRequest:
    return InflightRequest("m", SamplingParams(max_tokens=2), prompt="x" * (mib * MIB), key=key)


async def test_what_waits_is_bounded_in_bytes(service: Service) -> None:
    await service.up(step_s=0.01, slots=1, max_context=100 * MIB)
    limit_queue(service, 4 * MIB)
    running = service.router.queue_call(ask())
    waiting = [service.router.queue_call(large()) for _ in range(3)]
    with pytest.raises(QueueFull, match="hold 4 MiB already") as refused:
        service.router.queue_call(large())
    assert refused.value.retry_after_s
    small = service.router.queue_call(ask())
    waiting[0].cancel()
    waiting.append(service.router.queue_call(large()))
    for call in (running, small, *waiting):
        call.cancel()
    assert service.router.routes["m"].queue.size_bytes == 0


async def test_bytes_keep_out_only_those_who_filled_the_queue(service: Service) -> None:
    await service.up(step_s=0.002, slots=1, max_context=100 * MIB)
    limit_queue(service, 4 * MIB)
    running = service.router.queue_call(ask())
    crowd = [service.router.queue_call(large("crowd")) for _ in range(3)]
    light = service.router.queue_call(large("light"))
    with pytest.raises(QueueFull):
        await answer(crowd[-1])
    with pytest.raises(QueueFull):
        service.router.queue_call(large("crowd"))
    for call in (running, light, *crowd[:-1]):
        await answer(call)
    assert service.router.routes["m"].queue.size_bytes == 0


async def test_nobody_leaves_for_one_that_is_refused_all_the_same(service: Service) -> None:
    service.max_queue = 6
    await service.up(step_s=0.01, slots=1, max_context=100 * MIB)
    limit_queue(service, 7 * MIB)
    running = service.router.queue_call(ask())
    waiting = [service.router.queue_call(large("a", 2)) for _ in range(2)]
    waiting += [service.router.queue_call(large("b")) for _ in range(2)]
    with pytest.raises(QueueFull, match="hold 7 MiB already"):
        service.router.queue_call(large("c", 3))
    waiting += [service.router.queue_call(ask(key="a")) for _ in range(2)]
    with pytest.raises(QueueFull, match="hold 7 MiB already"):
        service.router.queue_call(large("c", 3))
    assert not any(call.done for call in waiting)
    for call in (running, *waiting):
        call.cancel()


async def test_one_that_leaves_makes_room_in_both_limits(service: Service) -> None:
    service.max_queue = 3
    await service.up(step_s=0.01, slots=1, max_context=100 * MIB)
    limit_queue(service, 4 * MIB)
    running = service.router.queue_call(ask())
    crowd = [service.router.queue_call(large("crowd")) for _ in range(3)]
    light = service.router.queue_call(large("light"))
    assert [call.done for call in (*crowd, light)] == [False, False, True, False]
    for call in (running, light, *crowd[:-1]):
        call.cancel()


async def test_bytes_of_a_suspected_address_count_too(service: Service) -> None:
    await service.up(step_s=0.01, slots=1, max_context=100 * MIB)
    limit_queue(service, 4 * MIB)
    charge_address(service)
    route = service.router.routes["m"]
    running = service.router.queue_call(ask_from_address())
    waiting = [service.router.queue_call(ask_from_address("x" * MIB, "crowd", 2)) for _ in range(3)]
    assert route.suspects.size_bytes > 3 * MIB
    with pytest.raises(QueueFull, match="hold 4 MiB already"):
        service.router.queue_call(ask_from_address("x" * MIB, "crowd", 2))
    light = service.router.queue_call(ask_from_address("x" * MIB, "light", 2))
    with pytest.raises(QueueFull):
        await answer(waiting[-1])
    for call in (running, light, *waiting[:-1]):
        call.cancel()
    assert route.suspects.size_bytes == 0


async def test_what_cannot_fit_is_refused_before_it_waits(service: Service) -> None:
    await service.up(step_s=0.01, slots=1, max_context=1000)
    route = service.router.routes["m"]
    status = replace(
        route.status, info=replace(INFO, max_context=1000, token_bytes=4, serves=SERVES)
    )
    route.set_status(status)
    running = service.router.queue_call(ask())
    for prompt in ("é" * 3000, [1] * 1001):
        with pytest.raises(
            ContextLengthExceeded, match="maximum context length is 1000 tokens"
        ) as refused:
            service.router.queue_call(InflightRequest("m", SamplingParams(), prompt=prompt))
        assert refused.value.param == "prompt"
    fits: list[InflightRequest] = [
        InflightRequest("m", SamplingParams(), prompt="x" * 3999),
        InflightRequest("m", SamplingParams(), prompt="x y" + " " * 99_999),
        InflightRequest("m", SamplingParams(), prompt=[1] * 999),
        InflightRequest("m", SamplingParams(), messages=[ChatMessage("assistant", "x" * 9999)]),
        InflightRequest("m", SamplingParams(), prompt="x" * 9999, more={"task": "tokenize"}),
    ]
    for call in [running, *(service.router.queue_call(call) for call in fits)]:
        call.cancel()
