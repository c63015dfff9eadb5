"""Responses in the background through the openai client, with kills in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.api_keys import new_key
from tests.integration.instance import Instance
from tests.integration.test_command import numbers, odd
from tests.integration.test_images import RED, uri
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama

(ADA, ADA_HASH), (BOB, BOB_HASH) = new_key("ada"), new_key("bob")
FIVE = numbers(5)
MODELS = [odd("m", "--images", "taken", "--step-s", "0.02")]


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("background")
    server = {"store_responses": {}, "gateways": 2}
    keys = [{"name": "ada", "hash": ADA_HASH}, {"name": "bob", "hash": BOB_HASH}]
    with Instance.up(folder, MODELS, server=server, sections={"keys": keys}) as instance:
        instance.until_settled()
        yield instance


def client_of(instance: Instance, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key=key, max_retries=2)


@pytest.fixture
def ada(instance: Instance) -> openai.OpenAI:
    return client_of(instance, ADA)


def start(client: openai.OpenAI, tokens: int = 5, **more: Any) -> Response:
    fields: Any = {"model": "m", "input": "One", "max_output_tokens": tokens} | more
    response: Response = client.responses.create(background=True, **fields)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    return response


def until(client: openai.OpenAI, response: Response, *states: str) -> Response:
    def look() -> Response | None:
        try:
            now = client.responses.retrieve(response.id)
        except openai.APIConnectionError:
            return None
        return now if now.status in states else None

    found = poll(f"the response is {states}", look, 60)
    assert found is not None
    return found


def test_an_answer_is_read_later_and_a_conversation_goes_on(ada: openai.OpenAI) -> None:
    picture: Any = {"type": "input_image", "image_url": uri(RED)}
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "One"}, picture]}]
    first = start(ada, input=asked, instructions="Be short.", metadata={"a": "b"})
    done = until(ada, first, "incomplete", "failed")
    same = {"status", "output", "usage", "incomplete_details", "temperature"}
    assert done.to_dict().keys() == first.to_dict().keys()
    told = {name: value for name, value in done.to_dict().items() if name not in same}
    assert told == {name: first.to_dict()[name] for name in told}
    assert (done.output_text, done.usage and done.usage.output_tokens) == (FIVE, 5)

    second = start(ada, input="Two", previous_response_id=first.id)
    done = until(ada, second, "incomplete", "failed")
    assert (done.output_text, done.previous_response_id) == (FIVE, first.id)
    kinds = [item.type for item in ada.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message"] * 3


def test_it_is_cancelled_or_deleted_while_it_runs(instance: Instance, ada: openai.OpenAI) -> None:
    long = start(ada, 100_000)
    until(ada, long, "in_progress")
    with pytest.raises(openai.BadRequestError, match="is not done"):
        ada.responses.create(model="m", input="Two", previous_response_id=long.id)
    assert [item.type for item in ada.responses.input_items.list(long.id)] == ["message"]
    for _ in range(2):
        cancelled = ada.responses.cancel(long.id)
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert ada.responses.retrieve(long.id) == cancelled
    other = start(ada, 100_000)
    until(ada, other, "in_progress")
    ada.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        ada.responses.retrieve(other.id)
    instance.until("nothing runs", lambda: instance.replica("m/0").running == 0)
    done = until(ada, start(ada), "incomplete")
    assert ada.responses.cancel(done.id) == done
    plain = ada.responses.create(model="m", input="One", max_output_tokens=5)
    with pytest.raises(openai.BadRequestError, match="is not in the background"):
        ada.responses.cancel(plain.id)


def test_it_is_of_its_key(instance: Instance, ada: openai.OpenAI) -> None:
    bob = client_of(instance, BOB)
    response = start(ada, 100_000)
    for attempt in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(response.id)
    ada.responses.cancel(response.id)


def test_what_cannot_run_is_refused_or_fails_with_a_reason(ada: openai.OpenAI) -> None:
    wrong: Any
    for wrong, said in (
        ({"store": False}, "leave out store"),
        (
            {"stream": True, "include": ["message.output_text.logprobs"]},
            "without log probabilities",
        ),
        ({"model": "none"}, "none"),
        ({"previous_response_id": "resp_none"}, "no response"),
    ):
        with pytest.raises(openai.APIStatusError, match=said) as caught:
            ada.responses.create(**{"model": "m", "input": "One", "background": True} | wrong)
        assert caught.value.status_code in (400, 404)
    failed = until(ada, start(ada, tool_choice="required"), "failed", "completed", "incomplete")
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "invalid_request"
    assert "tool_choice" in failed.error.message


def test_kills_of_gateways_and_of_the_worker_lose_none(
    instance: Instance, ada: openai.OpenAI
) -> None:
    started = [start(ada, 50) for _ in range(8)]
    until(ada, started[0], "in_progress")
    for pid in (instance.replica("m/0").pid, *(instance.gateway(at).pid for at in (0, 1))):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for one in started:
        assert until(ada, one, "incomplete", "failed").output_text == numbers(50)


def begin(client: openai.OpenAI, tokens: int, **more: Any) -> Iterator[ResponseStreamEvent]:
    fields: Any = {"model": "m", "input": "One", "max_output_tokens": tokens} | more
    stream: Any = client.responses.create(background=True, stream=True, **fields)
    return iter(stream)


def go_on(client: openai.OpenAI, id: str, after: int | None = None) -> list[ResponseStreamEvent]:
    """The events after this one, to the end of the stream."""
    more: Any = {} if after is None else {"starting_after": after}
    return list(client.responses.retrieve(id, stream=True, **more))


def text_of(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def check(events: list[ResponseStreamEvent], tokens: int) -> None:
    """Check a whole stream: each number once, and the text that the response ends with."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.incomplete", last
    assert text_of(events) == last.response.output_text == numbers(tokens)
    items = {event.item_id for event in events if event.type == "response.output_text.delta"}
    assert items == {item.id for item in last.response.output}
    for once in ("response.output_item.added", "response.output_text.done"):
        assert kinds.count(once) == 1


def test_a_stream_goes_on_where_its_client_left(ada: openai.OpenAI) -> None:
    stream = begin(ada, 60, metadata={"a": "b"})
    events = [next(stream) for _ in range(12)]
    stream.close()  # type: ignore[attr-defined]
    first = events[0]
    assert first.type == "response.created" and first.response.status == "queued"
    events += go_on(ada, first.response.id, events[-1].sequence_number)
    check(events, 60)
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response == ada.responses.retrieve(last.response.id)
    assert (last.response.background, last.response.metadata) == (True, {"a": "b"})
    assert last.response.usage is not None and last.response.usage.output_tokens == 60
    # and again, from its begin and from any place, after its end
    assert go_on(ada, last.response.id) == events
    for at in (0, 1, 20, len(events) - 1):
        assert go_on(ada, last.response.id, at) == events[at + 1 :]
    ada.responses.delete(last.response.id)
    with pytest.raises(openai.NotFoundError):
        go_on(ada, last.response.id)


def test_streams_survive_kills_of_gateways_and_of_the_worker(
    instance: Instance, ada: openai.OpenAI
) -> None:
    streams = [begin(ada, 150) for _ in range(4)]
    seen = [[next(stream) for _ in range(20)] for stream in streams]
    for pid in (instance.replica("m/0").pid, *(instance.gateway(at).pid for at in (0, 1))):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    for events in seen:
        first = events[0]
        assert first.type == "response.created"
        last = until(ada, first.response, "incomplete", "failed")
        assert last.output_text == numbers(150), last.error
        check(events + go_on(ada, first.response.id, events[-1].sequence_number), 150)


@pytest.mark.lane("long")
def test_a_sampled_stream_goes_on_after_its_tokens(tmp_path: Path) -> None:
    """Each run draws other tokens, so that a stream that begins again would not be the same."""
    path = write_tiny_llama(tmp_path / "tiny", hidden_size=512)
    options = {"threads": 1, "max_batch_tokens": 64}
    model = {"name": "m", "path": str(path), "device": "cpu", "options": options}
    server: dict[str, Any] = {"store_responses": {}, "gateways": 2}
    (tmp_path / "up").mkdir()
    with Instance.up(tmp_path / "up", [model], server=server) as instance:
        instance.until_settled(120)
        client = client_of(instance)
        streams = [begin(client, 480, temperature=1.0) for _ in range(8)]
        seen = [[*islice(stream, 12)] for stream in streams]  # a few may end before
        for pid in (instance.gateway(0).pid, instance.gateway(1).pid, instance.replica("m/0").pid):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        begun = [events[0].response for events in seen if events[0].type == "response.created"]
        ends = ("incomplete", "completed", "failed")
        now = [until(client, one, "queued", "in_progress", *ends).status for one in begun]
        assert now.count("in_progress") >= 2, now  # they were killed in the midst
        wholes = set()
        for events, one in zip(seen, begun, strict=True):
            last = until(client, one, *ends)
            assert last.status != "failed", last.error
            events += go_on(client, one.id, events[-1].sequence_number)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert text_of(events) == last.output_text
            assert last.usage is not None
            assert last.status == "completed" or last.usage.output_tokens == 480
            wholes.add(last.output_text)
        assert len(wholes) == len(begun)


def test_a_stream_ends_when_it_is_cancelled(ada: openai.OpenAI) -> None:
    stream = begin(ada, 100_000)
    first, *_ = [next(stream) for _ in range(10)]
    assert first.type == "response.created"
    assert ada.responses.cancel(first.response.id).status == "cancelled"
    last = list(stream)[-1]
    assert last.type == "error" and last.code == "response_cancelled"
    assert go_on(ada, first.response.id, last.sequence_number) == []


def test_a_stream_that_is_not_there_is_refused(instance: Instance, ada: openai.OpenAI) -> None:
    plain = until(ada, start(ada), "incomplete")
    with pytest.raises(openai.BadRequestError, match="this response has no stream"):
        go_on(ada, plain.id)
    stream = begin(ada, 5)
    first = next(stream)
    assert first.type == "response.created"
    with pytest.raises(openai.NotFoundError):
        go_on(client_of(instance, BOB), first.response.id)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        go_on(ada, first.response.id, -1)
    failed = list(begin(ada, 5, tool_choice="required"))[-1]
    assert failed.type == "response.failed" and failed.response.error is not None
    assert "tool_choice" in failed.response.error.message
    assert ada.responses.retrieve(failed.response.id) == failed.response


@pytest.mark.lane("long")
def test_a_killed_supervisor_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    server: dict[str, Any] = {"store_responses": {}}
    with Instance.up(tmp_path, MODELS, server=server) as first:
        first.until_settled()
        started = [start(client_of(first), 100) for _ in range(3)]
        stream = begin(client_of(first), 200)
        events = [next(stream) for _ in range(20)]
        until(client_of(first), started[0], "in_progress")
        first.process.kill()
        first.process.wait()
        with Instance.up(tmp_path, MODELS, server=server) as second:
            second.until_settled()
            for one in started:
                done = until(client_of(second), one, "incomplete", "failed")
                assert done.output_text == numbers(100)
            opened = events[0]
            assert opened.type == "response.created"
            after = events[-1].sequence_number
            check(events + go_on(client_of(second), opened.response.id, after), 200)


def test_a_client_that_follows_is_told_where_to_go_on_after_a_shutdown(tmp_path: Path) -> None:
    server: dict[str, Any] = {"store_responses": {}, "drain_timeout_s": 1}
    with Instance.up(tmp_path, MODELS, server=server) as first:
        first.until_settled()
        stream = begin(client_of(first), 200)
        opened = next(stream)
        assert opened.type == "response.created"
        events: list[ResponseStreamEvent] = []
        for event in client_of(first).responses.retrieve(opened.response.id, stream=True):
            events.append(event)
            if len(events) == 20:
                first.process.terminate()
        said, after = events.pop(), events[-1].sequence_number
        assert (said.type, said.sequence_number) == ("error", after + 1)
        assert said.message.endswith(f"go on with starting_after={after}")
        assert list(stream)[-1].type == "error"
        first.process.wait()
        assert "Traceback" not in first.log
        with Instance.up(tmp_path, MODELS, server=server) as second:
            second.until_settled()
            check(events + go_on(client_of(second), opened.response.id, after), 200)
