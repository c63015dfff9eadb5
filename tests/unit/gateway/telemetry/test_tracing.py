"""The spans of a call, from its arrival to its end, at a receiver of OTLP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import INVALID_SPAN

from servekit.gateway.http.request_context import ORIGIN, RequestContext
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.telemetry.metrics import RequestMetrics
from servekit.gateway.telemetry.tracing import FLUSH_S, apply_rules
from servekit.protocol.access import Tracing
from servekit.protocol.messages import ChatMessage, Delta, SamplingParams
from tests.otlp_receiver import Receiver, attributes
from tests.polling import poll

#: A client's trace, and the span that it is in.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver.open() as receiver:
        yield receiver


class Traced:
    """A gateway's measures, whose calls are traced."""

    def __init__(self, receiver: Receiver, sample: float = 1.0) -> None:
        self.measures = RequestMetrics()
        self.rules = Tracing(receiver.url, sample, "tests")
        apply_rules(self.measures, self.rules, "gateway/0")
        self._receiver = receiver

    def begin(self, sampled: str = "01", context: RequestContext | None = None) -> InflightRequest:
        """A call that the router has taken, of a client that is within a trace."""
        traceparent = f"00-{TRACE}-{PARENT}-{sampled}".encode()
        token = ORIGIN.set(context or RequestContext({b"traceparent": traceparent}))
        call = InflightRequest("m", SamplingParams(seed=7), messages=[ChatMessage("user", "hi")])
        ORIGIN.reset(token)
        route: Any = SimpleNamespace(status=SimpleNamespace(name="m"))
        route.base = route
        self.measures.observe(route, call)
        return call

    def spans(self) -> dict[str, Span]:
        """The spans that have ended, by name."""
        assert self.measures.tracer is not None
        self.measures.tracer._provider.force_flush()
        return {span.name: span for span in self._receiver.of(TRACE)}


def send(call: InflightRequest, worker: str, wire_id: int) -> None:
    replica: Any = SimpleNamespace(name=worker)
    call.replica = replica
    call.request(wire_id)


def end(call: InflightRequest) -> None:
    now_ns = time.time_ns()
    times_ns = (now_ns, now_ns + 1, now_ns + 2, now_ns + 3)
    call.feed(Delta(1, "b", [2], "stop", 7, 2, cached_tokens=4, times_ns=times_ns))


def test_a_call_is_told_from_its_arrival_to_its_end(receiver: Receiver) -> None:
    traced = Traced(receiver)
    call = traced.begin()
    send(call, "m/0", 1)
    call.feed(Delta(1, "a", [1], prompt_tokens=7))
    assert list(traced.spans()) == ["queue"], "the wait ends when a worker gets the call"
    end(call)
    found = traced.spans()
    root, worker, engine = found["chat m"], found["worker m/0"], found["engine"]
    assert root.parent_span_id.hex() == PARENT
    assert worker.parent_span_id == found["queue"].parent_span_id == root.span_id
    assert engine.parent_span_id == worker.span_id
    assert call.trace == f"00-{TRACE}-{worker.span_id.hex()}-01", "the worker continues its span"
    assert found["queue"].start_time_unix_nano == root.start_time_unix_nano
    assert [event.name for event in (*root.events, *engine.events)] == ["first token"] * 2
    told = attributes(root)
    assert told["gen_ai.request.seed"] == 7 and "gen_ai.request.max_tokens" not in told
    assert told["gen_ai.usage.input_tokens"] == 7 and told["gen_ai.usage.output_tokens"] == 2
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert not any("error.type" in attributes(span) for span in found.values())
    assert receiver.services == {"tests"} and receiver.paths == {"/v1/traces"}


def test_a_worker_that_is_lost_is_an_attempt_and_another_wait(receiver: Receiver) -> None:
    traced = Traced(receiver)
    call = traced.begin()
    send(call, "m/0", 1)
    call.feed(Delta(1, "a", [1]))
    for observer in call.observers:
        observer.on_requeued(call)
    send(call, "m/1", 2)
    end(call)
    traced.spans()
    found = receiver.of(TRACE)
    assert [span.name for span in found].count("queue") == 2
    lost, again = (span for span in found if span.name.startswith("worker"))
    assert attributes(lost)["error.type"] == "worker_lost"
    assert lost.status.code == Status.STATUS_CODE_ERROR
    assert attributes(again)["servekit.continued_tokens"] == 1
    assert "error.type" not in attributes(again)


def test_a_call_that_fails_as_it_waits_says_why(receiver: Receiver) -> None:
    traced = Traced(receiver)
    call = traced.begin()
    for observer in call.observers:
        observer.on_ended(call, "queue_timeout", None)
    found = traced.spans()
    assert set(found) == {"chat m", "queue"}
    assert {attributes(span)["error.type"] for span in found.values()} == {"queue_timeout"}
    assert "gen_ai.response.finish_reasons" not in attributes(found["chat m"])


def test_the_calls_of_one_request_share_its_trace(receiver: Receiver) -> None:
    traced = Traced(receiver)
    first = traced.begin()
    second = traced.begin(context=first.origin)
    for call in (first, second):
        for observer in call.observers:
            observer.on_ended(call, "stop", None)
    traced.spans()
    roots = [span for span in receiver.of(TRACE) if span.name == "chat m"]
    one, other = sorted(roots, key=lambda span: span.parent_span_id.hex() != PARENT)
    assert other.parent_span_id == one.span_id


@pytest.mark.parametrize(("sampled", "sample"), [("00", 1.0), ("01", 0.0)])
def test_the_client_decides_whether_it_is_traced(
    receiver: Receiver, sampled: str, sample: float
) -> None:
    call = Traced(receiver, sample).begin(sampled)
    assert len(call.observers) == (2 if sampled == "01" else 1)


def test_rules_are_taken_over_where_they_change(receiver: Receiver) -> None:
    traced = Traced(receiver)
    before = traced.measures.tracer
    apply_rules(traced.measures, traced.rules, "gateway/0")
    assert traced.measures.tracer is before
    apply_rules(traced.measures, Tracing(f"{receiver.url}/v1/traces"), "gateway/0")
    assert traced.measures.tracer is not before
    call = traced.begin()
    for observer in call.observers:
        observer.on_ended(call, "stop", None)
    assert traced.spans() and receiver.paths == {"/v1/traces"}
    apply_rules(traced.measures, Tracing(), "gateway/0")
    assert traced.measures.tracer is None
    assert len(traced.begin().observers) == 1


def test_an_exporter_ends_with_the_last_call_of_its_rules(receiver: Receiver) -> None:
    traced, before = Traced(receiver), set(threading.enumerate())
    call = traced.begin()
    for number in range(3):
        apply_rules(traced.measures, Tracing(receiver.url, 1.0, f"s{number}"), "gateway/0")
    apply_rules(traced.measures, Tracing(), "gateway/0")
    poll("the others have ended", lambda: not set(threading.enumerate()) - before)
    for observer in call.observers:
        observer.on_ended(call, "stop", None)
    exporters = {one for one in before if one.name.startswith("Otel")}
    call.observers = ()
    del observer
    poll("its own has ended", lambda: not exporters & set(threading.enumerate()))
    poll("its spans are there", lambda: len(receiver.of(TRACE)) == 2)


def test_a_receiver_that_never_answers_holds_up_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        measures = RequestMetrics()
        apply_rules(measures, Tracing(url, 1.0, "tests"), "gateway/0")
        assert measures.tracer is not None
        measures.tracer.span("one", INVALID_SPAN).end()
        began = time.monotonic()
        measures.tracer.close()
        assert FLUSH_S <= time.monotonic() - began < 6, "an export may take 10 s"
