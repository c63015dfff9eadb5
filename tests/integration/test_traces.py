"""Spans of real requests, at a receiver of OTLP that the test starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.integration.instance import Instance, echo
from tests.otlp_receiver import Receiver, attributes

pytestmark = pytest.mark.timeout(120)

#: A client's trace, and the span that it is in.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver.open() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Instance]:
    models = [echo("echo", replicas=2, step_s=0.01)]
    tracing = {"endpoint": receiver.url, "service": "tests", "sample": 0.0}
    folder = tmp_path_factory.mktemp("traces")
    with Instance.up(folder, models, sections={"tracing": tracing}) as instance:
        instance.until_settled()
        yield instance


def ask(instance: Instance, trace: str, sampled: str = "01", **fields: object) -> httpx.Response:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 8} | fields
    headers = {"traceparent": f"00-{trace}-{PARENT}-{sampled}", "x-request-id": f"r-{trace[:4]}"}
    return httpx.post(f"{instance.url}/v1/completions", json=body, headers=headers, timeout=60)


def spans(instance: Instance, receiver: Receiver, trace: str, count: int) -> dict[str, Span]:
    instance.until("its spans have come", lambda: len(receiver.of(trace)) >= count)
    found = receiver.of(trace)
    assert len(found) == count, [span.name for span in found]
    return {span.name: span for span in found}


def test_from_the_client_to_the_engine(instance: Instance, receiver: Receiver) -> None:
    assert ask(instance, TRACE, temperature=0.5).status_code == 200
    found = spans(instance, receiver, TRACE, 4)
    root = found["text_completion echo"]
    [worker] = [span for name, span in found.items() if name.startswith("worker echo/")]
    queue, engine = found["queue"], found["engine"]
    assert root.parent_span_id.hex() == PARENT
    assert queue.parent_span_id == worker.parent_span_id == root.span_id
    assert engine.parent_span_id == worker.span_id
    assert (root.kind, worker.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    starts = [span.start_time_unix_nano for span in (root, queue, worker, engine)]
    ends = [span.end_time_unix_nano for span in (queue, engine, worker, root)]
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    [first] = engine.events
    assert engine.start_time_unix_nano < first.time_unix_nano < engine.end_time_unix_nano
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == "echo"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["servekit.request"] == "r-4bf9"
    assert receiver.services == {"tests"}
    assert "hello" not in str(found), "no prompt and no answer is in a span"


def test_what_goes_wrong_is_told(instance: Instance, receiver: Receiver) -> None:
    trace = "1" * 32
    assert ask(instance, trace, prompt="").status_code == 400
    root = spans(instance, receiver, trace, 3)["text_completion echo"]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "invalid_request"


def test_a_worker_that_dies_is_an_attempt_of_its_own(
    instance: Instance, receiver: Receiver
) -> None:
    trace = "2" * 32
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(instance, trace, max_tokens=200, ignore_eos=True))
    )
    asking.start()

    def busy() -> list[int]:
        [model] = instance.status().models
        return [one.pid for one in model.replicas if one.running]

    instance.until("it runs", lambda: bool(busy()))
    os.kill(busy()[0], signal.SIGKILL)
    asking.join()
    assert answers[0].status_code == 200
    instance.until("its spans have come", lambda: len(receiver.of(trace)) >= 6)
    found = receiver.of(trace)
    attempts = [span for span in found if span.name.startswith("worker ")]
    assert len(attempts) == 2
    assert attributes(attempts[0])["error.type"] == "worker_lost"
    assert attributes(attempts[1])["servekit.continued_tokens"] > 0  # type: ignore[operator]
    assert [span.name for span in found].count("queue") == 2
    assert [span.name for span in found].count("engine") == 1


def test_who_is_not_sampled_leaves_nothing(instance: Instance, receiver: Receiver) -> None:
    trace = "3" * 32
    assert ask(instance, trace, "00").status_code == 200
    body = {"model": "echo", "prompt": "hello", "max_tokens": 2}
    assert httpx.post(f"{instance.url}/v1/completions", json=body).status_code == 200
    last = "4" * 32
    assert ask(instance, last).status_code == 200
    spans(instance, receiver, last, 4)
    known = {TRACE, "1" * 32, "2" * 32, last}
    assert {span.trace_id.hex() for span in receiver.spans} <= known


def test_the_choices_of_one_request_are_one_trace(instance: Instance, receiver: Receiver) -> None:
    trace = "5" * 32
    assert ask(instance, trace, n=2).status_code == 200
    instance.until("its spans have come", lambda: len(receiver.of(trace)) >= 8)
    roots = [span for span in receiver.of(trace) if span.name == "text_completion echo"]
    assert len(roots) == 2
