"""Streams in the background: whoever goes on makes the events that are not stored, and no more."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import ModelChanged, ServekitError
from servekit.gateway.api.openai.background_stream import (
    AnswerChanged,
    BackgroundEncoder,
    BackgroundStream,
)
from servekit.gateway.api.openai.responses_encoder import ResponsesEncoder
from servekit.gateway.api.openai.responses_schema import (
    ReasoningOptions,
    ResponsesRequest,
    ask_of,
)
from servekit.gateway.generation.generation import GenerationChunk
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.storage.response_store import StreamPart
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import Continuation, Delta, SamplingParams

Json = dict[str, Any]
REQUEST = ResponsesRequest(input="One", stream=True, background=True)
SUMMARISED = msgspec.structs.replace(REQUEST, reasoning=ReasoningOptions(summary="auto"))
BEGAN = Continuation("generation", 64)
TEXT = st.text(min_size=1, max_size=12)
CALLS = st.tuples(st.sampled_from(["look", "find"]), st.text(max_size=12))
#: Thoughts, text and calls of an answer, in order; two items in a row are of different kinds.
ANSWERS = st.lists(
    st.one_of(TEXT.map(Text), TEXT.map(Reasoning), CALLS), min_size=1, max_size=5
).filter(
    lambda items: all(
        type(one) is tuple or type(one) is not type(next) for one, next in pairwise(items)
    )
)


class Run:
    """A run of the response by some gateway."""

    def __init__(
        self, stored: list[StreamPart], *, exact: bool = True, request: ResponsesRequest = REQUEST
    ) -> None:
        self.asked = ask_of(request, "")
        queued = ResponsesEncoder(request, 0)
        shown = queued.encode_queued(self.asked, "m")
        self.stored = stored or [queued.encode_queue_events(shown)]
        first: Json = json.loads(self.stored[0].data.split(b"\n")[1].removeprefix(b"data: "))
        self.stream = BackgroundStream(first["response"], self.stored, exact)
        self.call = InflightRequest("m", SamplingParams())
        self.stream.resume(self.call)
        self.encoder = BackgroundEncoder(request, 0, self.stream)
        self.generation: Any = SimpleNamespace(
            first=self.call,
            request=self.asked,
            model="m",
            prompt_tokens=3,
            completion_tokens=5,
            cached_tokens=0,
        )
        self.begun = False
        self.began = self.stream.continuation or BEGAN

    def tell(self, event: Event, finish: Any = None) -> None:
        """Take what the model says, a token for each event, and store what becomes of it."""
        if not self.begun:
            self.begun = True
            self.stream.add_events(self.encoder.encode_start(self.generation))
        token = -1 if self.began.by_text else len(self.call.emitted)
        self.call.feed(Delta(0, "", token_ids=[token], continuation=self.began))
        self.call.texts.clear()
        if type(event) is Text and finish is None:
            self.stream.add_events(self.encoder.encode_text(self.generation, event.text))
        else:
            chunk = GenerationChunk(0, [event], finish=finish)
            self.stream.add_events(self.encoder.encode_chunks(self.generation, [chunk]))

    def store(self) -> None:
        if (part := self.stream.take_part()) is not None:
            self.stored.append(part)

    def events(self) -> list[Json]:
        data = b"".join(part.data for part in self.stored)
        lines = [block.split(b"\n")[1] for block in data.split(b"\n\n")[:-1]]
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def split(answer: list[Any], cuts: st.DataObject) -> list[Event]:
    """The answer as events, its texts in pieces."""
    events: list[Event] = []
    calls = 0
    for item in answer:
        kind: Any = type(item)
        text = item[1] if kind is tuple else item.text
        if kind is tuple:
            events.append(ToolCallStart(calls, f"call_{cuts.draw(st.integers(0, 9))}", item[0]))
            calls += 1
        while text:
            size = cuts.draw(st.integers(1, len(text)))
            piece, text = text[:size], text[size:]
            events.append(CallArguments(calls - 1, piece) if kind is tuple else kind(piece))
    return events


def built(events: list[Json]) -> list[Json]:
    """The output that a client builds of the events."""
    output: list[Json] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            output.append(event["item"] | {"text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[-1]["id"]
            output[-1]["text"] += event["delta"]
        elif kind == "response.output_item.done":
            told = event["item"].get("arguments", output[-1]["text"])
            assert (event["item"]["id"], told) == (output[-1]["id"], output[-1]["text"])
    return output


@given(ANSWERS, st.data())
def test_the_events_of_several_runs_are_one_stream(answer: list[Any], data: st.DataObject) -> None:
    request = data.draw(st.sampled_from([REQUEST, SUMMARISED]))
    stored: list[StreamPart] = []
    for _ in range(data.draw(st.integers(0, 3))):
        run = Run(stored, request=request)
        events = split(answer, data)
        for event in events[: data.draw(st.integers(0, len(events)))]:
            run.tell(event)
            if data.draw(st.booleans()):
                run.store()
        stored = run.stored
    run = Run(stored, request=request)
    events = split(answer, data)
    for event in events[:-1]:
        run.tell(event)
    run.tell(events[-1], "stop")
    run.store()
    told = run.events()
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    last = told[-1]
    assert last["type"] == "response.completed" and last["response"] == run.stream.end
    assert last["response"]["id"] == told[0]["response"]["id"]
    output = built(told)
    assert [item["id"] for item in output] == [item["id"] for item in last["response"]["output"]]
    texts = [item[1] if type(item) is tuple else item.text for item in answer]
    assert [item["text"] for item in output] == texts
    for once in ("created", "queued", "in_progress", "completed"):
        assert kinds.count(f"response.{once}") == 1
    assert kinds.count("response.output_item.done") == len(answer)


def test_a_run_goes_on_after_the_tokens_that_are_stored() -> None:
    run = Run([])
    for text in ("a", "b"):
        run.tell(Text(text))
    run.store()
    run.tell(Text("c"))
    run.store()
    again = Run(run.stored)
    assert (again.call.emitted, again.call.continuation) == ([0, 1, 2], BEGAN)
    again.tell(Text("abcd"))
    again.store()
    assert again.events()[-1]["delta"] == "d"
    assert Run(again.stored).call.emitted == [0, 1, 2, 3]
    afresh = Run(again.stored, exact=False)
    assert afresh.call.emitted == []
    afresh.tell(Text("abcde"))  # of the tokens of another answer none is stored
    afresh.store()
    assert afresh.events()[-1]["delta"] == "e"
    assert Run(afresh.stored).call.emitted == [0, 1, 2, 3]


def test_an_engine_without_tokens_goes_on_after_the_text() -> None:
    run = Run([])
    run.began = Continuation("generation", 64, by_text=True)
    for text in ("a", "b"):
        run.tell(Text(text))
    run.store()
    again = Run(run.stored)
    assert again.call.answered == ["ab"]
    assert (again.call.chars, again.call.emitted) == (2, [-1, -1])
    again.tell(Text("cd"))
    again.store()
    assert again.events()[-1]["delta"] == "cd"
    third = Run(again.stored)
    assert (third.call.answered, third.call.emitted) == (["abcd"], [-1] * 3)
    assert third.call.rewind()  # it has to begin anew, and brings the text again
    third.tell(Text("abc"))
    third.tell(Text("de"))
    third.store()
    assert third.events()[-1]["delta"] == "e"

    thinks = Run([])
    thinks.began = run.began
    thinks.tell(Reasoning("hm"))
    thinks.store()
    assert Run(thinks.stored).call.answered == []


@pytest.mark.parametrize("read", [False, True])
def test_an_engine_without_tokens_writes_again_what_no_event_has(read: bool) -> None:
    """Text comes with several tokens, and its events are stored some time after they were made."""
    run = Run([])
    run.began = Continuation("generation", 64, by_text=True)
    run.tell(Text("a"))
    run.call.feed(Delta(0, "bcd", token_ids=[-1, -1, -1]))
    if read:
        run.call.texts.clear()
        events = run.encoder.encode_text(run.generation, "bcd")
    run.store()
    again = Run(run.stored)
    assert (again.call.answered, again.call.emitted) == (["a"], [-1])
    if read:
        run.stream.add_events(events)
        run.store()
        again = Run(run.stored)
        assert (again.call.answered, again.call.emitted) == (["abcd"], [-1] * 4)


@pytest.mark.parametrize(
    ("sent", "then"),
    [
        ([Text("abc")], [Text("abd")]),
        ([Text("abc")], [Reasoning("abc")]),
        ([Text("abc")], [Text("ab"), ToolCallStart(0, "c", "look")]),
        ([Reasoning("a"), Text("b")], [Reasoning("aa")]),
        ([Reasoning("a"), Text("b")], [Reasoning("a"), ToolCallStart(0, "c", "look")]),
        ([ToolCallStart(0, "c", "look")], [ToolCallStart(0, "c", "find")]),
        (
            [ToolCallStart(0, "c", "look"), CallArguments(0, "{}")],
            [ToolCallStart(0, "d", "look"), CallArguments(0, "[]")],
        ),
    ],
)
def test_another_text_ends_the_stream(sent: list[Event], then: list[Event]) -> None:
    run = Run([])
    for event in sent:
        run.tell(event)
    run.store()
    before = run.events()
    other = Run(run.stored)
    with pytest.raises(AnswerChanged) as caught:
        for event in then:
            other.tell(event)
    assert other.stream.take_part() is None
    other.stream.add_events(other.encoder.encode_late_error(caught.value) or b"")
    other.store()
    assert other.events()[:-1] == before
    last = other.events()[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "answer_changed"


def test_an_answer_that_ends_too_early_ends_the_stream() -> None:
    run = Run([])
    run.tell(Text("abc"))
    run.store()
    other = Run(run.stored)
    with pytest.raises(AnswerChanged):
        other.tell(Text("ab"), "stop")


def test_an_error_that_passes_ends_the_run_and_not_the_stream() -> None:
    run = Run([])
    run.tell(Text("abc"))
    assert run.encoder.encode_late_error(ModelChanged("it was replaced")) is None
    assert (run.stream.error or {})["code"] == "model_changed" and run.stream.end is None
    assert run.encoder.encode_late_error(ServekitError("a fault")) is not None
    assert run.stream.end is not None


def test_a_run_without_an_answer_fails_in_the_stream() -> None:
    run = Run([])
    run.tell(Text("abc"))
    run.stream.fail({"code": "c", "message": "m"})
    run.store()
    assert run.events()[-1]["response"] == run.stream.end
    assert msgspec.json.decode(msgspec.json.encode(run.stream.end))["status"] == "failed"
