"""What a gateway counts of its requests: each figure where it belongs, once, and told once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from servekit import metrics
from servekit.errors import ClientClosed, ModelNotFound, QueueFull
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing import step_delivery
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.step_delivery import feed_step
from servekit.gateway.telemetry import metrics as measures
from servekit.gateway.telemetry.metrics import MOST_ADAPTERS, OTHER, RequestMetrics, status_of
from servekit.protocol.messages import ChatMessage, Delta, KeyRule, SamplingParams, TokenBatch

KIND = ("chat", "servekit", "m", "m")


class Clock:
    """`time.monotonic`, as the test sets it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for module in (time, measures, step_delivery):
        monkeypatch.setattr(module, "monotonic", clock)
    yield clock


def route(adapter: str = "") -> Any:
    """The route of the model `m`, or of an adapter of it."""
    base = SimpleNamespace(status=SimpleNamespace(name="m"))
    base.base = base
    return SimpleNamespace(status=SimpleNamespace(name=adapter), base=base) if adapter else base


def begun(
    counted: RequestMetrics, clock: Clock, *, stream: bool = True, adapter: str = "", **asked: Any
) -> InflightRequest:
    """A call that the router has just taken."""
    messages = None if "prompt" in asked else [ChatMessage("user", "hi")]
    call = InflightRequest("m", SamplingParams(), messages=messages, stream=stream, **asked)
    call.created_s = clock.now
    counted.observe(route(adapter), call)
    return call


def told(counted: RequestMetrics) -> dict[tuple[str, tuple[str, ...]], list[float]]:
    """All that would be told the supervisor now, each with as many figures as its metric has."""
    found = counted.pop_counts()
    series = () if found is None else found.series
    for one in series:
        metric = metrics.BY_NAME[one.metric]
        assert (len(one.figures), len(one.labels)) == (metric.width, len(metric.labels)), one
    summed: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for one in series:
        have = summed.setdefault((one.metric, one.labels), [0.0] * len(one.figures))
        have[:] = [a + b for a, b in zip(have, one.figures, strict=True)]
    return summed


def observed(figures: list[float], metric: str) -> dict[float, float]:
    """A histogram's counts by the upper bound of their bucket, those that are not 0."""
    bounds = (*metrics.BY_NAME[metric].buckets, float("inf"))
    return {b: n for b, n in zip(bounds, figures, strict=False) if n}


def test_a_streamed_request_from_its_arrival_to_its_end(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock)
    clock.now += 0.2
    call.request(1)
    clock.now += 0.3
    call.feed(Delta(1, "a", [1], prompt_tokens=7, cached_tokens=4))
    for gap_s in (0.02, 0.03, 0.7):
        clock.now += gap_s
        feed_step({1: call}, TokenBatch([1], ["b"], [2]))
    clock.now += 0.25
    call.feed(Delta(1, "", [3], "length", 7, 5, cached_tokens=4))
    found = told(counted)

    assert found["servekit_requests_total", ("m", "", "", "200", "length")] == [1]
    assert found["servekit_prompt_tokens_total", ("m", "", "")] == [7]
    assert found["servekit_cached_prompt_tokens_total", ("m", "", "")] == [4]
    assert found["servekit_completion_tokens_total", ("m", "", "")] == [5]
    wait = found["servekit_queue_wait_seconds", ("m",)]
    assert observed(wait, "servekit_queue_wait_seconds") == {0.25: 1}
    first = "gen_ai_server_time_to_first_token_seconds"
    assert observed(found[first, KIND], first) == {0.5: 1}
    assert found[first, KIND][-1] == pytest.approx(0.5)
    gaps = "servekit_inter_token_seconds"
    assert observed(found[gaps, ("m", "")], gaps) == {0.025: 1, 0.05: 1, 0.3: 1, 0.75: 1}
    assert found[gaps, ("m", "")][-1] == pytest.approx(1.0)
    pace = "gen_ai_server_time_per_output_token_seconds"
    assert observed(found[pace, KIND], pace) == {0.3: 1}  # 1 s for the 4 tokens after the first
    took = "gen_ai_server_request_duration_seconds"
    assert observed(found[took, (*KIND, "")], took) == {2.56: 1}
    assert found[took, (*KIND, "")][-1] == pytest.approx(1.5)
    usage = "gen_ai_client_token_usage"
    assert observed(found[usage, (*KIND, "input")], usage) == {16: 1}
    assert found[usage, (*KIND, "input")][-1] == 7
    assert observed(found[usage, (*KIND, "output")], usage) == {16: 1}
    assert found[usage, (*KIND, "output")][-1] == 5

    assert told(counted) == {}, "what was told is told once"


def test_a_step_is_counted_for_each_stream_by_when_its_last_token_came(clock: Clock) -> None:
    counted = RequestMetrics()
    calls = {id: begun(counted, clock) for id in (1, 2, 3)}
    for id, call in calls.items():
        call.request(id)
        clock.now += 0.1
        call.feed(Delta(id, "a", [1]))
    clock.now += 0.02
    feed_step(calls, TokenBatch([1, 2, 3, 4], list("bcde"), [2, 3, 4, 5]))  # 4 was cancelled
    clock.now += 0.03
    feed_step(calls, TokenBatch([3, 1], ["g", "f"], [7, 6]))
    gaps = told(counted)["servekit_inter_token_seconds", ("m", "")]
    found = observed(gaps, "servekit_inter_token_seconds")
    assert found == {0.025: 1, 0.05: 2, 0.15: 1, 0.3: 1}
    assert gaps[-1] == pytest.approx(0.22 + 0.12 + 0.02 + 2 * 0.03)
    assert [call.emitted for call in calls.values()] == [[1, 2, 6], [1, 3], [1, 4, 7]]


def test_what_is_not_streamed_has_no_gaps_but_a_first_token_and_a_pace(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock, stream=False, prompt="x")
    call.request(1)
    clock.now += 0.03
    call.feed(Delta(1, "a", [1], prompt_tokens=2))
    clock.now += 0.5
    feed_step({1: call}, TokenBatch([1], ["b"], [2]))
    call.feed(Delta(1, "c", [3], "stop", 2, 3))
    found = told(counted)
    kind = ("text_completion", "servekit", "m", "m")
    assert not any(metric == "servekit_inter_token_seconds" for metric, _ in found)
    assert observed(found["gen_ai_server_time_to_first_token_seconds", kind], _FIRST) == {0.04: 1}
    pace = found["gen_ai_server_time_per_output_token_seconds", kind]
    assert pace[-1] == pytest.approx(0.25)


_FIRST = "gen_ai_server_time_to_first_token_seconds"


def test_a_stream_goes_on_in_the_same_figures_after_it_was_told_of(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock)
    call.request(1)
    call.feed(Delta(1, "a", [1]))
    told(counted)
    clock.now += 0.02
    feed_step({1: call}, TokenBatch([1], ["b"], [2]))
    found = told(counted)
    assert list(found) == [("servekit_inter_token_seconds", ("m", ""))]
    assert found["servekit_inter_token_seconds", ("m", "")][-1] == pytest.approx(0.02)


def test_failures_are_counted_by_their_codes_and_have_no_pace(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock)
    call.request(1)
    call.feed(Delta(1, "ab", [1, 2], prompt_tokens=7))
    clock.now += 3
    call.fail(ClientClosed("gone"))
    found = told(counted)
    assert found["servekit_requests_total", ("m", "", "", "499", "client_closed")] == [1]
    assert found["servekit_completion_tokens_total", ("m", "", "")] == [2], "they were made"
    took = "gen_ai_server_request_duration_seconds"
    assert observed(found[took, (*KIND, "client_closed")], took) == {5.12: 1}
    metrics_told = {metric for metric, _ in found}
    assert "gen_ai_client_token_usage" not in metrics_told
    assert "gen_ai_server_time_per_output_token_seconds" not in metrics_told


def test_retries_and_continuations_are_told_apart(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock)
    call.request(1)
    call.request(2)  # its worker died before it had said anything
    call.feed(Delta(2, "a", [1]))
    call.request(3)
    found = told(counted)
    assert found["servekit_retries_total", ("m",)] == [1]
    assert found["servekit_continuations_total", ("m",)] == [1]
    wait = found["servekit_queue_wait_seconds", ("m",)]
    assert sum(wait[:-1]) == 1, "it waited once"


def test_the_label_of_a_key_is_its_name_and_never_the_key(clock: Clock) -> None:
    counted = RequestMetrics()
    unknown = begun(counted, clock, key="Bearer sk-secret")
    unknown.feed(Delta(1, "a", [1], "stop", 1, 1))
    known = begun(counted, clock, key="team-a")
    known.caller = ApiKey(KeyRule("team-a"), clock.now)
    known.feed(Delta(1, "a", [1], "stop", 1, 1))
    keys = {labels[2] for metric, labels in told(counted) if metric == "servekit_requests_total"}
    assert keys == {"", "team-a"}


def test_an_adapter_is_a_label_and_the_name_that_was_asked_for(clock: Clock) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock, adapter="polite")
    call.feed(Delta(1, "a", [1], "stop", 1, 1))
    found = told(counted)
    assert ("servekit_requests_total", ("m", "polite", "", "200", "stop")) in found
    took = "gen_ai_server_request_duration_seconds"
    assert (took, ("chat", "servekit", "polite", "m", "")) in found


def test_adapters_without_end_share_a_label(clock: Clock) -> None:
    counted = RequestMetrics()
    for number in range(MOST_ADAPTERS + 5):
        for _ in range(2):
            call = begun(counted, clock, adapter=f"a{number}")
            call.feed(Delta(1, "a", [1], "stop", 1, 1))
    requests = {labels[1]: n for (m, labels), n in told(counted).items() if m.endswith("ts_total")}
    assert len(requests) == MOST_ADAPTERS + 1
    assert requests[OTHER] == [10]


@pytest.mark.parametrize(
    ("task", "operation"),
    [("embed", "embeddings"), ("tokenize", "tokenize"), ("detokenize", "detokenize")],
)
@pytest.mark.parametrize(
    "asked",
    [{"prompt": "x"}, {}],  # the other is a chat, as of Anthropic's count_tokens
    ids=["prompt", "chat"],
)
def test_operations_have_the_names_of_the_convention(
    clock: Clock, task: str, operation: str, asked: dict[str, Any]
) -> None:
    counted = RequestMetrics()
    call = begun(counted, clock, **asked, more={"task": task})
    call.feed(Delta(1, "", finish="stop", prompt_tokens=3))
    kinds = {labels[0] for metric, labels in told(counted) if metric.startswith("gen_ai_server")}
    assert kinds == {operation}


async def test_what_a_router_does_not_take_is_counted_without_the_name_it_was_given() -> None:
    router = Router("test")
    with pytest.raises(ModelNotFound):
        router.queue_call(InflightRequest("made-up-by-a-client", SamplingParams(), prompt="x"))
    found = told(router.measures)
    key = "servekit_requests_total", ("", "", "", "404", "model_not_found")
    assert found == {key: [1]}


def test_the_statuses_of_outcomes() -> None:
    found = [status_of(one) for one in ("stop", "length", "cancelled", QueueFull.code, "new")]
    assert found == ["200", "200", "499", "429", "500"]


def test_answers_are_told_by_path_and_status() -> None:
    counted = RequestMetrics()
    counted.answers[b"/v1/completions", 200] += 2
    counted.answers["/livez", 200] += 1
    found = told(counted)
    assert found["servekit_http_requests_total", ("/v1/completions", "200")] == [2]
    assert found["servekit_http_requests_total", ("/livez", "200")] == [1]
    assert counted.pop_counts() is None
