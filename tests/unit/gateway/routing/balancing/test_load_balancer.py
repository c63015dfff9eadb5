"""Routing against what it is to beat, in simulation; what is owed, by real calls on real workers.

All loads are seeded and all times simulated: the figures are the same on each run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from servekit.gateway.routing.balancing.balancing_policy import (
    DECODE_WEIGHT,
    FULL,
    ReplicaLoad,
    RequestTraits,
    choose_replica,
)
from servekit.gateway.routing.balancing.load_balancer import LOOK, Account, Balancer
from servekit.gateway.routing.balancing.prefix_index import BLOCK_TOKENS, Prompt, hash_prompt
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import ChatMessage, ModelStatus, SamplingParams
from tests.unit.gateway.conftest import EchoWorker, Service, until
from tests.unit.gateway.routing.test_router import answer, ask
from tests.unit.gateway.scripted import ScriptedWorker
from tests.unit.gateway.simulated import (
    SLOTS,
    Outcome,
    Request,
    Router,
    Seen,
    SimulatedReplica,
    balanced,
    conversations,
    heavy,
    hot,
    shortest_queue,
    simulate,
    uniform,
    words,
)

Load = Callable[[int], Sequence[Request]]
SEEDS = (1, 2, 3)


def compare(load: Load, other: Router | None = None, gateways: int = 1) -> tuple[Outcome, Outcome]:
    """Our way and another, by default round robin, over all seeds."""
    ours, theirs = Outcome(), Outcome()
    for seed in SEEDS:
        pairs = (
            (ours, [balanced() for _ in range(gateways)]),
            (theirs, [other or balanced("round_robin") for _ in range(gateways)]),
        )
        for outcome, routers in pairs:
            one = simulate(load(seed), *routers)
            outcome.first_s += one.first_s
            outcome.prompt_tokens += one.prompt_tokens
            outcome.cached_tokens += one.cached_tokens
    assert len(ours.first_s) == len(theirs.first_s)
    return ours, theirs


def busy_conversations(seed: int) -> Sequence[Request]:
    return conversations(seed, rate=5.0, count=300)


# ---------------------------------------------------------------- simulation


@pytest.mark.lane("long")
@pytest.mark.parametrize("load", [conversations, busy_conversations])
@pytest.mark.parametrize("other", [None, shortest_queue], ids=["round robin", "shortest queue"])
def test_conversations_find_their_cache(load: Load, other: Router | None) -> None:
    """Of 0.62 to 0.79 of all prompts' tokens; the first token in 0.6 of the time."""
    ours, theirs = compare(load, other)
    assert ours.hits > theirs.hits + 0.12
    assert ours.mean_s < 0.75 * theirs.mean_s
    assert ours.p99_s < 0.75 * theirs.p99_s


@pytest.mark.parametrize("gateways", [2, 4])
def test_gateways_agree_without_a_word(gateways: int) -> None:
    """Each turn of a conversation by any of them, which know nothing of each other."""
    ours, theirs = compare(conversations, gateways=gateways)
    assert ours.hits > theirs.hits + 0.05
    assert ours.mean_s < 0.9 * theirs.mean_s


@pytest.mark.lane("long")
@pytest.mark.parametrize("load", [uniform, hot, heavy])
def test_other_loads_are_served_as_by_the_shortest_queue_or_better(load: Load) -> None:
    ours, theirs = compare(load, shortest_queue)
    assert ours.mean_s <= 1.02 * theirs.mean_s
    assert ours.p99_s <= 1.02 * theirs.p99_s


@pytest.mark.lane("long")
def test_few_long_requests_hold_up_fewer_short_ones() -> None:
    for other in (shortest_queue, None):
        ours, theirs = compare(heavy, other)
        assert ours.mean_s < 0.8 * theirs.mean_s
        assert ours.p99_s < 0.85 * theirs.p99_s


def test_what_all_prompts_share_is_no_reason_to_crowd_one_replica() -> None:
    outcome = simulate(hot(1, rate=40.0), balanced())
    shares = [outcome.chosen.count(f"m/{index}") / len(outcome.chosen) for index in range(4)]
    assert all(0.2 < share < 0.3 for share in shares), shares


def test_the_same_load_is_served_the_same_way() -> None:
    for load in (conversations, heavy):
        first, second = (simulate(load(4), balanced()) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("policy", ["auto", "least_loaded"])
def test_of_many_replicas_few_are_looked_at_and_all_are_used(policy: str) -> None:
    """Nobody's first token is later than if the shortest of all queues were looked for."""

    def load(seed: int) -> Sequence[Request]:
        return heavy(seed, rate=9.0 * 32 / 4, count=3000)

    looked: set[int] = set()

    class Watched(Balancer[Seen]):
        def _few(self, replicas: Collection[Seen]) -> Iterable[Seen]:
            few = list(super()._few(replicas))
            looked.add(len(few))
            return few

    balancer = Watched()
    balancer.set_status(ModelStatus("m", "-", "-", 0, (), routing=policy))  # type: ignore[arg-type]
    ours, theirs = (
        simulate(load(1), route, replicas=32, block=0)
        for route in (balancer.choose, shortest_queue)
    )
    assert looked == {LOOK}
    assert ours.mean_s <= theirs.mean_s
    assert ours.p99_s <= theirs.p99_s
    shares = [ours.chosen.count(f"m/{at}") / len(ours.chosen) for at in range(32)]
    assert all(share > 0.01 for share in shares), shares


@given(
    owed=st.lists(st.integers(0, 5), min_size=1, max_size=LOOK),
    kv_used=st.lists(st.sampled_from([0.0, 0.5, FULL, 1.0]), min_size=LOOK, max_size=LOOK),
    room=st.lists(st.integers(0, 2), min_size=LOOK, max_size=LOOK),
    last=st.permutations(range(LOOK)),
)
def test_the_short_way_chooses_as_the_policy_does(
    owed: list[int], kv_used: list[float], room: list[int], last: list[int]
) -> None:
    balancer: Balancer[Seen] = Balancer()
    replicas = [
        Seen(SimulatedReplica(f"m/{at}"), SLOTS // (room[at] or 1)) for at in range(len(owed))
    ]
    facts = []
    for at, one in enumerate(replicas):
        one.routable = room[at] > 0
        one.account = account = Account(one.name, None)
        account.owed, account.kv_used, account.last = float(owed[at]), kv_used[at], last[at]
        account.told = balancer._words
        facts.append(ReplicaLoad(one.credits, account.owed, 0, kv_used[at], last[at]))
    chosen = balancer._least_loaded(replicas)
    found = choose_replica("auto", RequestTraits(), facts)
    assert (chosen and chosen[0]) is (None if found is None else replicas[found])


def test_sessions_stay_where_they_are_also_without_anything_known() -> None:
    """Short prompts have no blocks; the session alone says where."""

    def load(name: str) -> Request:
        message = ChatMessage("user", "hi")
        call = InflightRequest("m", SamplingParams(max_tokens=4), messages=[message], session=name)
        return Request(call, 4, at_s=serial.pop())

    serial = [1.0 * at for at in range(400, 0, -1)]
    names = [f"session {index}" for index in range(40)]
    requests = [load(name) for _ in range(10) for name in names]
    sent: dict[str, set[str]] = {}
    route = balanced()

    def noted(replicas: Sequence[Seen], call: InflightRequest) -> Seen | None:
        chosen = route(replicas, call)
        assert chosen is not None
        sent.setdefault(call.session, set()).add(chosen.name)
        return chosen

    simulate(requests, noted)
    assert all(len(replicas) == 1 for replicas in sent.values())
    assert set.union(*sent.values()) == {f"m/{index}" for index in range(4)}


# ---------------------------------------------------------------- what is owed and held


def seen(name: str = "m/0") -> Seen:
    return Seen(SimulatedReplica(name), 1)


def long_call(text: str, tokens: int = 10, session: str = "") -> InflightRequest:
    return InflightRequest("m", SamplingParams(max_tokens=tokens), prompt=text, session=session)


def text(seed: int, tokens: int = 1024) -> str:
    import random

    return words(random.Random(seed), tokens)


def test_a_call_is_owed_for_until_its_prompt_is_read_and_its_answer_done() -> None:
    balancer: Balancer[Seen] = Balancer()
    one, other = seen("m/0"), seen("m/1")
    call = long_call(text(1))
    chosen = balancer.choose([one, other], call)
    assert chosen is one and one.account is not None
    one.take(Request(call, 10))
    assert one.account.owed == 1024 + 10 * DECODE_WEIGHT
    assert balancer.choose([one, other], ask("x")) is other
    call.emitted.append(1)
    one.account.update_owed(one)
    assert one.account.owed == 10 * DECODE_WEIGHT, "its first token: the prompt has been read"
    one.end(1)
    assert one.account.owed == 0.0


def test_what_ends_unread_is_not_owed_for_either() -> None:
    balancer: Balancer[Seen] = Balancer()
    one = seen()
    for _ in range(2):
        balancer.record_call(one, call := long_call(text(1)))
        one.take(Request(call, 10))
    assert one.account is not None
    one.end(1)
    one.account.update_owed(one)
    assert one.account.owed == 10 * DECODE_WEIGHT, "of the second all is held"
    one.account.remove_call(7, call)  # one that it was never sent
    one.end(2)
    assert one.account.owed == 0.0


def test_what_is_held_is_not_owed_for() -> None:
    balancer: Balancer[Seen] = Balancer()
    one = seen()
    for expected in (1024.0, 0.0):
        call = long_call(text(1))
        balancer.record_call(one, call)
        assert one.account is not None
        owed = one.account.owed
        one.take(Request(call, 10))
        assert owed == expected + 10 * DECODE_WEIGHT
        one.end(one.last_id)


def test_how_long_answers_are_is_learnt() -> None:
    balancer: Balancer[Seen] = Balancer()
    one, other = seen("m/0"), seen("m/1")
    for _ in range(100):
        call = InflightRequest("m", SamplingParams(), prompt="x")
        chosen = balancer.choose([one, other], call)
        assert chosen is not None
        chosen.take(Request(call, 10))
        call.emitted += [1] * 40
        chosen.end(chosen.last_id)
    call = InflightRequest("m", SamplingParams(), prompt="x")
    assert balancer._expected(call) == pytest.approx(40.0, abs=1.0)
    assert balancer._expected(ask("x", 5)) == 5.0
    assert balancer._expected(InflightRequest("m", SamplingParams(), more={"task": "embed"})) == 0.0


def test_calls_from_before_there_was_a_choice_count() -> None:
    balancer: Balancer[Seen] = Balancer()
    alone, new = seen("m/0"), seen("m/1")
    for _ in range(3):
        alone.take(Request(ask("x", 10), 10))
    for _ in range(2):
        chosen = balancer.choose([alone, new], ask("x", 10))
        assert chosen is new
        new.take(Request(ask("x", 10), 10))
    assert alone.account is not None
    assert len(alone.account._answers) == 3


def test_calls_of_other_gateways_count_as_far_as_they_are_known(service: Service) -> None:
    balancer: Balancer[Seen] = Balancer()
    busy, idle = Seen(SimulatedReplica("m/0"), 2), Seen(SimulatedReplica("m/1"), 2)
    told = ScriptedWorker(service.folder / "w", 1).status()
    told = replace(told, socket="m/0", running=5)
    balancer.set_status(ModelStatus("m", "-", "-", 0, (told,)))
    assert [balancer.choose([busy, idle], ask("x")) for _ in range(3)] == [idle] * 3


def test_a_cache_of_larger_blocks_holds_whole_ones() -> None:
    info = seen().info
    assert info is not None
    account = Account("m/0", replace(info, prefix_block=3 * BLOCK_TOKENS))
    prompt = hash_prompt(long_call(text(2)))
    account.prefixes.add_prompt(prompt.blocks[:8])
    assert account.cached_tokens(prompt) == 6 * BLOCK_TOKENS
    assert Account("m/0", replace(info, prefix_block=0)).cached_tokens(prompt) == 0
    assert account.cached_tokens(Prompt(1000)) == 0


def test_no_more_is_remembered_than_the_cache_has() -> None:
    info = seen().info
    assert info is not None
    account = Account("m/0", replace(info, prefix_tokens=10 * BLOCK_TOKENS))
    prompt = hash_prompt(long_call(text(2)))
    account.prefixes.add_prompt(prompt.blocks)
    assert account.cached_tokens(prompt) == 10 * BLOCK_TOKENS


def test_without_affinity_no_prompt_is_looked_at() -> None:
    for policy in ("least_loaded", "round_robin"):
        route = balanced(policy)
        replicas = [seen("m/0"), seen("m/1")]
        for _ in range(4):
            route(replicas, long_call(text(1), session="s"))
        assert all(not len(one.account.prefixes) for one in replicas if one.account)


# ---------------------------------------------------------------- with real workers


def caching(service: Service, count: int = 2) -> list[EchoWorker]:
    """Echo workers that are taken to have a prefix cache."""
    workers = []
    for _ in range(count):
        worker = EchoWorker(service.folder / f"w{len(service.workers)}.sock")
        worker.runner.info = replace(worker.runner.info, prefix_block=32)
        service.workers.append(worker)
        workers.append(worker)
    return workers


async def start(service: Service, workers: Sequence[EchoWorker]) -> None:
    for worker in workers:
        await worker.start()
    service.tell(*(worker.status() for worker in workers))
    route = service.router.routes["m"]
    await until(lambda: sum(one.routable for one in route.replicas.values()) == len(workers))


async def served_by(service: Service, prompt: str, session: str = "") -> str:
    call = service.router.queue_call(long_call(prompt, 4, session))
    assert call.replica is not None
    name = call.replica.name
    await answer(call)
    return name


async def test_a_prefix_is_forgotten_with_the_worker_that_had_it(service: Service) -> None:
    workers = caching(service)
    await start(service, workers)
    first = await served_by(service, text(1))
    assert {await served_by(service, text(1) + word) for word in "abcde"} == {first}
    victim = next(worker for worker in workers if worker.path.stem == first)
    victim.kill()
    route = service.router.routes["m"]
    await until(lambda: sum(one.routable for one in route.replicas.values()) == 1)
    assert await served_by(service, text(1)) != first
    [successor] = caching(service, 1)
    await successor.start()
    rest = [worker.status() for worker in workers if worker is not victim]
    service.tell(*rest, successor.status())
    await until(lambda: sum(one.routable for one in route.replicas.values()) == 2)
    [account] = [one.account for one in route.replicas.values() if one.name != rest[0].name]
    assert account is None, "it knows nothing yet"
    assert {await served_by(service, text(1)) for _ in range(3)} == {rest[0].name}


async def test_a_session_finds_home_again_after_a_restart(service: Service) -> None:
    workers = await service.up(4)
    sessions = [f"s{index}" for index in range(24)]
    before = {name: await served_by(service, "hi", name) for name in sessions}
    assert len(set(before.values())) == 4
    service.tell(*(worker.status() for worker in workers[1:]))
    during = {name: await served_by(service, "hi", name) for name in sessions}
    gone = workers[0].path.stem
    assert {name for name in sessions if during[name] != before[name]} == {
        name for name in sessions if before[name] == gone
    }
    back = replace((await service.worker()).status(), name=gone)
    service.tell(back, *(worker.status() for worker in workers[1:]))
    route = service.router.routes["m"]
    await until(lambda: sum(one.routable for one in route.replicas.values()) == 4)
    assert {name: await served_by(service, "hi", name) for name in sessions} == before


async def test_what_waited_is_noted_where_it_goes(service: Service) -> None:
    workers = caching(service)
    await start(service, workers)
    route = service.router.routes["m"]
    for replica in route.replicas.values():
        replica._open_slots = 0
    waiting = service.router.queue_call(long_call(text(1), 4))
    assert waiting.replica is None
    for replica in route.replicas.values():
        replica._renew()
    chosen = list(route.replicas.values())[1]
    route.dispatch(chosen)
    assert waiting.replica is chosen
    await answer(waiting)
    assert await served_by(service, text(1) + "more") == chosen.name


async def test_one_replica_is_never_weighed(service: Service) -> None:
    await service.up()
    await asyncio.gather(*(served_by(service, text(1), "s") for _ in range(5)))
    [replica] = service.router.routes["m"].replicas.values()
    assert replica.account is None
