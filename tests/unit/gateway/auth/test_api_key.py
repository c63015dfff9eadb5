"""What a key's holder may do, and what it has used; through a real router to a real engine."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ContextLengthExceeded, Forbidden, InvalidKey, RateLimited
from servekit.gateway.auth.api_key import FORGET_S, ApiKey, Bucket
from servekit.gateway.auth.authorization import ACTING
from servekit.gateway.generation.generation import Generation, GenerationRequest
from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import AccessRules, KeyRule, KeyUse, SamplingParams
from tests.unit.gateway.collecting import collect_choices
from tests.unit.gateway.conftest import Service, until

DIGEST = b"d" * 32


def caller(**rule: object) -> ApiKey:
    return ApiKey(KeyRule("alice", digest=DIGEST, **rule), time.monotonic())  # type: ignore[arg-type]


def call(tokens: int = 5, *, model: str = "m", priority: int = 0) -> InflightRequest:
    params = SamplingParams(max_tokens=tokens)
    return InflightRequest(model, params, prompt="hello", key="as sent", priority=priority)


def let_in(service: Service, *rules: KeyRule) -> dict[str, ApiKey]:
    service.router.access.apply_rules(AccessRules(rules, salt=b"s" * 32))
    return service.router.access.callers


async def test_tokens_are_charged_at_the_end(service: Service) -> None:
    await service.up()
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=100))["alice"]
    ACTING.set(alice)
    asked = service.router.queue_call(call(20))
    assert (asked.key, asked.caller, alice.active) == ("alice", alice, 1)
    async for _ in asked:
        pass
    assert alice.active == 0
    assert alice.tokens is not None
    assert alice.tokens.level(time.monotonic()) == pytest.approx(100 - 25, abs=1)
    assert alice.use() == KeyUse("alice", 0, 25, 0)
    assert alice.use() is None


async def test_what_is_cancelled_is_charged_as_far_as_it_came(service: Service) -> None:
    await service.up(step_s=0.005)
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    asked = service.router.queue_call(call(8000))
    await until(lambda: len(asked.emitted) >= 10)
    asked.cancel()
    use = alice.use()
    assert alice.active == 0
    assert use is not None
    assert use.tokens == len(asked.emitted) + len("hello"), "as the worker has counted its prompt"


@pytest.mark.parametrize("repeats", [True, False])
async def test_what_the_gateway_runs_again_is_charged_once(service: Service, repeats: bool) -> None:
    """A response in the background, say, that is cut off because servekit ends."""
    await service.up(step_s=0.005)
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    origin = RequestContext({})
    origin.repeats = repeats
    ORIGIN.set(origin)
    asked = service.router.queue_call(call(8000))
    await until(lambda: len(asked.emitted) >= 10)
    service.router.fail_all()
    assert (alice.use() is None) == repeats
    assert origin.calls is not None and (origin.calls[5] == 0) == repeats


async def test_choices_of_one_prompt_pay_for_it_once(service: Service) -> None:
    """As their client is told."""
    await service.up()
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    params = SamplingParams(max_tokens=20)
    asked = GenerationRequest(model="m", params=params, prompts=["hello", "you"], n=3)
    generation = Generation(service.router, asked)
    await collect_choices(generation)
    told = generation.prompt_tokens + generation.completion_tokens
    assert told == len("hello") + len("you") + 6 * 20
    assert alice.use() == KeyUse("alice", 0, told, 0)


@pytest.mark.parametrize("task", ["tokenize", "detokenize"])
async def test_to_count_tokens_costs_none(service: Service, task: str) -> None:
    await service.up()
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    prompt = [104] * 50
    asked = InflightRequest("m", SamplingParams(), prompt=prompt, more={"task": task})
    service.router.queue_call(asked)
    assert (await asked.next_delta()).prompt_tokens == 50
    asked = InflightRequest("m", SamplingParams(), prompt=prompt, more={"task": task})
    service.router.queue_call(asked).cancel()
    assert alice.use() is None


async def test_a_prompt_that_was_not_read_to_its_end_is_estimated(service: Service) -> None:
    await service.up(prompt_token_s=0.05)
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    asked = service.router.queue_call(InflightRequest("m", SamplingParams(), prompt="x" * 400))
    await until(lambda: asked.wire_id > 0)
    asked.cancel()
    assert alice.use() == KeyUse("alice", 0, 100, 0)
    counted = service.router.measures.pop_counts()
    assert counted is not None
    totals = {one.metric: one.figures for one in counted.series}
    assert totals["servekit_prompt_tokens_total"] == [100], "budgets and `servekit usage` count it"


async def test_a_prompt_that_is_refused_costs_none(service: Service) -> None:
    await service.up(max_context=100)
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    asked = service.router.queue_call(InflightRequest("m", SamplingParams(), prompt="x" * 400))
    with pytest.raises(ContextLengthExceeded):
        await asked.next_delta()
    assert asked.wire_id > 0, "its worker has refused it"
    assert alice.use() is None


async def test_what_only_waited_costs_no_tokens(service: Service) -> None:
    await service.up(slots=1, step_s=0.01)
    alice = let_in(service, KeyRule("alice", digest=DIGEST, tokens_per_minute=10_000))["alice"]
    ACTING.set(alice)
    calls = [service.router.queue_call(call(8000)) for _ in range(40)]
    waiting = [asked for asked in calls if asked.replica is None]
    assert waiting
    for asked in waiting:
        asked.cancel()
    assert alice.use() is None
    assert alice.active == len(calls) - len(waiting)
    for asked in calls:
        asked.cancel()
    assert alice.active == 0


async def test_at_once(service: Service) -> None:
    await service.up(step_s=0.01)
    rule = KeyRule("alice", digest=DIGEST, max_concurrent=2)
    ACTING.set(let_in(service, rule)["alice"])
    calls = [service.router.queue_call(call(8000)) for _ in range(2)]
    with pytest.raises(RateLimited, match="2 requests under way") as error:
        service.router.queue_call(call())
    assert error.value.retry_after_s == 1
    calls[0].cancel()
    calls.append(service.router.queue_call(call()))
    for asked in calls:
        asked.cancel()


async def test_a_call_that_is_refused_for_another_reason_is_not_under_way(service: Service) -> None:
    service.max_queue = 1
    service.tell()
    alice = let_in(service, KeyRule("alice", digest=DIGEST, max_concurrent=2))["alice"]
    ACTING.set(alice)
    with pytest.raises(Exception, match="m"):
        service.router.queue_call(call())  # no worker, and none is coming
    assert alice.active == 0


async def test_models(service: Service) -> None:
    await service.up()
    alice = let_in(service, KeyRule("alice", digest=DIGEST, models=("other",)))["alice"]
    ACTING.set(alice)
    for name in ("m", "alias"):
        with pytest.raises(Forbidden, match=f"may not use '{name}'"):
            service.router.queue_call(call(model=name))
    assert alice.active == 0


async def test_nobody_is_not_let_in(service: Service) -> None:
    await service.up()
    let_in(service, KeyRule("alice", digest=DIGEST))
    ACTING.set(None)
    with pytest.raises(InvalidKey):
        service.router.queue_call(call())


@pytest.mark.parametrize(
    ("own", "asked", "found"), [(0, 0, 0), (0, 3, 3), (0, -5, 0), (2, 0, 2), (2, 1, 2), (-3, 0, -3)]
)
def test_priority_is_the_default_and_the_floor(own: int, asked: int, found: int) -> None:
    mine = call(priority=asked)
    caller(priority=own).admit_call(mine, "m")
    assert mine.priority == found


def test_requests_a_minute() -> None:
    alice = caller(requests_per_minute=2)
    assert alice.charge_request() is None
    assert alice.charge_request() is None
    refused = alice.charge_request()
    assert isinstance(refused, RateLimited)
    assert (
        refused.message == "the key 'alice' has used up its 2 requests a minute; try again in 30 s"
    )
    assert refused.retry_after_s == 30
    headers = dict(alice.rate_limit_headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] in (b"1m0s", b"60s")
    assert b"x-ratelimit-limit-tokens" not in headers
    assert caller().rate_limit_headers() == ()


def test_other_gateways_count_too() -> None:
    alice = caller(requests_per_minute=5, tokens_per_minute=50, max_concurrent=3)
    alice.add_usage("gateway/1", KeyUse("alice", 4, 20, 2))
    assert alice.charge_request() is None
    assert isinstance(alice.charge_request(), RateLimited)
    alice.add_usage("gateway/1", KeyUse("alice", 0, 40, 3))
    with pytest.raises(RateLimited):
        alice.admit_call(call(), "m")
    alice.add_usage("gateway/1", KeyUse("alice", 0, 0, 0))
    alice.admit_call(call(), "m")


def test_a_gateway_that_tells_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    alice = caller(max_concurrent=1)
    alice.add_usage("gateway/1", KeyUse("alice", 0, 0, 1))
    now_s += FORGET_S - 0.1
    with pytest.raises(RateLimited):
        alice.admit_call(call(), "m")
    now_s += 0.2
    alice.admit_call(call(), "m")


def test_another_rule_keeps_what_was_used() -> None:
    alice = caller(requests_per_minute=2)
    alice.charge_request()
    alice.set_rule(KeyRule("alice", digest=DIGEST, requests_per_minute=1), time.monotonic())
    assert isinstance(alice.charge_request(), RateLimited)
    alice.set_rule(KeyRule("alice", digest=DIGEST), time.monotonic())
    assert alice.charge_request() is None
    assert not alice.limited


def test_a_minutes_worth_at_once_and_then_at_its_rate() -> None:
    bucket = Bucket(60, 100.0)
    bucket.withdraw(60, 100.0)
    assert bucket.level(100.0) == 0
    assert bucket.level(101.5) == pytest.approx(1.5)
    assert bucket.wait_s(3.0, 101.5) == pytest.approx(1.5)
    assert bucket.level(1000.0) == 60


def test_debts_are_paid_first() -> None:
    bucket = Bucket(600, 0.0)
    bucket.withdraw(1800, 0.0)
    assert bucket.level(0.0) == -1200
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(120.1)
    assert bucket.level(120.0) == pytest.approx(0.0)


def test_another_limit_forgives_nothing_and_takes_nothing() -> None:
    bucket = Bucket(10, 0.0)
    bucket.withdraw(10, 0.0)
    bucket.set_limit(100, 0.0)
    assert (bucket.limit, bucket.level(0.0)) == (100, 90)
    bucket.set_limit(5, 0.0)
    assert bucket.level(0.0) == -5


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=40),
)
def test_never_more_than_a_burst_and_the_rate(limit: int, steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken = Bucket(limit, 0.0), 0.0, 0
    for pause_s, wanted in steps:
        now_s += pause_s
        for _ in range(wanted):
            if bucket.level(now_s) >= 1:
                bucket.withdraw(1, now_s)
                taken += 1
    assert taken <= limit + limit * now_s / 60 + 1e-6
