"""The items and events of a response, as the parts of an answer come in any order."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.errors import ServekitError
from servekit.gateway.api.openai.responses_encoder import ResponsesEncoder
from servekit.gateway.api.openai.responses_schema import ResponsesRequest, ask_of
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.generation.generation import Choice, GenerationChunk
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import TokenLogprob, ToolCall

LOOK = (ToolCallStart(0, "c1", "look"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"))
SEE = (ToolCallStart(1, "c2", "see"), CallArguments(1, "{}"))
LIKELY = TokenLogprob(b"a", -0.5)


class Run:
    """One request, and the encoder of its answer."""

    def __init__(self, **fields: Any) -> None:
        body = json.dumps({"model": "m", "input": "x", **fields}).encode()
        self.request = decode(ResponsesRequest, body)
        self.encoder = ResponsesEncoder(self.request, 9)
        self.kept: list[Any] = []
        self.generation: Any = SimpleNamespace(
            request=ask_of(self.request, ""), model="m", prompt_tokens=7, completion_tokens=5,
            cached_tokens=3,
        )  # fmt: skip

    def keep(self) -> None:
        self.encoder.keep = lambda data: self.kept.append(json.loads(data))

    def whole(self, choice: Choice) -> Any:
        return json.loads(self.encoder.encode_response(self.generation, [choice]))

    def stream(self, *chunks: GenerationChunk) -> list[Any]:
        data = self.encoder.encode_start(self.generation)
        for chunk in chunks:
            data += self.encoder.encode_chunks(self.generation, [chunk])
        told = []
        for block in data.removesuffix(b"\n\n").split(b"\n\n"):
            name, text = block.split(b"\n")
            told.append(json.loads(text.removeprefix(b"data: ")))
            assert name == b"event: " + told[-1]["type"].encode()
        assert [one["sequence_number"] for one in told] == list(range(len(told)))
        return told


def chunks(*events: Event, finish: Any = "stop") -> list[GenerationChunk]:
    """A chunk for each event, and the end."""
    return [
        *(GenerationChunk(0, [event]) for event in events),
        GenerationChunk(0, [], finish=finish),
    ]


def kinds(events: list[Any]) -> list[str]:
    return [one["type"].removeprefix("response.") for one in events]


def described(output: list[Any]) -> list[tuple[str, str]]:
    """The kind of each item, and its text or arguments."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in output
    ]


# ---------------------------------------------------------------- whole


def test_a_response_repeats_what_was_asked_for() -> None:
    run = Run(
        instructions="be kind", max_output_tokens=9, temperature=0.5, top_p=0.25, user="u",
        metadata={"a": "b"}, parallel_tool_calls=False, reasoning={"effort": "low"},
        tools=[{"type": "function", "name": "look"}], tool_choice="required",
        text={"format": {"type": "json_object"}}, previous_response_id="resp_1",
    )  # fmt: skip
    response = run.whole(Choice(text="a", finish="stop"))
    assert response["id"].startswith("resp_") and response["object"] == "response"
    for name, value in (
        ("instructions", "be kind"), ("max_output_tokens", 9), ("temperature", 0.5),
        ("top_p", 0.25), ("user", "u"), ("metadata", {"a": "b"}), ("parallel_tool_calls", False),
        ("reasoning", {"effort": "low", "summary": None}), ("tool_choice", "required"),
        ("previous_response_id", "resp_1"), ("model", "m"), ("background", False),
        ("store", False), ("error", None), ("truncation", "disabled"),
    ):  # fmt: skip
        assert response[name] == value, name
    assert response["tools"][0]["name"] == "look"
    assert response["text"]["format"]["type"] == "json_object"


def test_what_was_left_out_is_shown_as_it_was_taken() -> None:
    response = Run().whole(Choice(text="a", finish="stop"))
    assert (response["tool_choice"], response["tools"], response["metadata"]) == ("auto", [], {})
    assert response["reasoning"] == {"effort": None, "summary": None}
    assert response["text"] == {"format": {"type": "text"}}
    assert response["usage"] == {
        "input_tokens": 7, "output_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "output"),
    [
        (Choice(text="a"), [("message", "a")]),
        (Choice(), [("message", "")]),
        (Choice(reasoning="hm"), [("reasoning", "hm"), ("message", "")]),
        (
            Choice(text="a", reasoning="hm", calls=[ToolCall("c1", "look", "{}")]),
            [("reasoning", "hm"), ("message", "a"), ("function_call", "{}")],
        ),
        (Choice(calls=[ToolCall("c1", "look", "{}")]), [("function_call", "{}")]),
    ],
)
def test_the_parts_of_a_whole_answer_are_items(
    choice: Choice, output: list[tuple[str, str]]
) -> None:
    response = Run().whole(choice)
    assert described(response["output"]) == output
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert len({item["id"] for item in response["output"]}) == len(output)


def test_only_the_last_item_of_an_answer_that_was_cut_off_is_incomplete() -> None:
    response = Run().whole(Choice(text="a", reasoning="hm", finish="length"))
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    done = Run().whole(Choice(text="a", finish="stop"))
    assert (done["status"], done["incomplete_details"]) == ("completed", None)


def test_a_response_that_is_kept_is_kept_as_its_client_gets_it() -> None:
    run = Run()
    run.keep()
    response = run.whole(Choice(text="a", finish="stop"))
    assert run.kept == [response] and response["store"] is True


def test_log_probabilities_of_a_message() -> None:
    response = Run().whole(Choice(text="a", logprobs=[LIKELY], finish="stop"))
    [told] = response["output"][0]["content"][0]["logprobs"]
    assert (told["token"], told["logprob"]) == ("a", -0.5)


# ---------------------------------------------------------------- streamed

TEXT_ITEM = ["output_item.added", "content_part.added", "output_text.delta"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]
CALL_ITEM = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
    "function_call_arguments.done", "output_item.done",
]  # fmt: skip


def test_a_message_has_its_events() -> None:
    run = Run()
    run.keep()
    created, begun, added, part, delta, *end, done = run.stream(*chunks(Text("a")))
    assert kinds([created, begun]) == ["created", "in_progress"]
    assert created["response"] == begun["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert created["response"]["usage"] is None
    assert kinds([added, part, delta, *end]) == TEXT_ITEM + TEXT_END
    assert (added["item"]["content"], added["item"]["status"]) == ([], "in_progress")
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (delta["delta"], delta["content_index"], delta["logprobs"]) == ("a", 0, [])
    assert {one["item_id"] for one in (part, delta, *end[:2])} == {added["item"]["id"]}
    assert end[0]["text"] == end[1]["part"]["text"] == "a"
    assert done["type"] == "response.completed"
    assert done["response"]["output"] == [end[2]["item"]]
    assert run.kept == [done["response"]]


@pytest.mark.parametrize(
    ("events", "output"),
    [
        ((), [("message", "")]),
        ((Text("a"), Text("b")), [("message", "ab")]),
        (LOOK, [("function_call", '{"a": 1}')]),
        ((*LOOK, *SEE), [("function_call", '{"a": 1}'), ("function_call", "{}")]),
        (
            (Reasoning("h"), Reasoning("m"), Text("a"), *LOOK, Text("b")),
            [
                ("reasoning", "hm"),
                ("message", "a"),
                ("function_call", '{"a": 1}'),
                ("message", "b"),
            ],
        ),
    ],
)
def test_the_parts_of_a_stream_are_items(
    events: tuple[Event, ...], output: list[tuple[str, str]]
) -> None:
    told = Run().stream(*chunks(*events))
    assert described(told[-1]["response"]["output"]) == output
    added = [one["output_index"] for one in told if one["type"].endswith("output_item.added")]
    ended = [one["output_index"] for one in told if one["type"].endswith("output_item.done")]
    assert added == ended == list(range(len(output)))
    for index, (_, text) in enumerate(output):
        pieces = [one["delta"] for one in told if "delta" in one and one["output_index"] == index]
        assert "".join(pieces) == text


def test_a_call_has_its_events() -> None:
    told = Run().stream(*chunks(*LOOK))[2:-1]
    assert kinds(told) == CALL_ITEM
    assert (told[0]["item"]["call_id"], told[0]["item"]["name"]) == ("c1", "look")
    assert (told[3]["name"], told[3]["arguments"]) == ("look", '{"a": 1}')
    assert told[4]["item"]["status"] == "completed"


def test_thoughts_have_events_of_their_own() -> None:
    told = Run().stream(*chunks(Reasoning("hm")))[2:-1]
    assert kinds(told) == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert "logprobs" not in told[3] and told[3]["text"] == "hm"


def test_thoughts_are_the_summary_where_one_is_requested() -> None:
    for given in ("auto", "detailed"):
        run = Run(reasoning={"summary": given})
        told = run.stream(*chunks(Reasoning("h"), Reasoning("m"), Text("a")))
        assert kinds(told)[2:9] == [
            "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
            "reasoning_summary_text.delta", "reasoning_summary_text.done",
            "reasoning_summary_part.done", "output_item.done",
        ]  # fmt: skip
        assert [one["summary_index"] for one in told[3:8]] == [0] * 5
        assert (told[2]["item"]["summary"], told[6]["text"]) == ([], "hm")
        assert told[4]["delta"] + told[5]["delta"] == "hm"
        for response in (told[-1]["response"], run.whole(Choice(text="a", reasoning="hm"))):
            thoughts = response["output"][0]
            assert thoughts["summary"] == [{"type": "summary_text", "text": "hm"}]
            assert thoughts["content"] == []
            assert response["reasoning"]["summary"] == given
    [thoughts, _] = Run(reasoning={"summary": "none"}).whole(Choice(reasoning="hm"))["output"]
    assert (thoughts["summary"], thoughts["content"][0]["text"]) == ([], "hm")


def test_a_stream_that_was_cut_off_is_incomplete() -> None:
    *_, item, done = Run().stream(*chunks(Reasoning("hm"), Text("a"), finish="length"))
    assert done["type"] == "response.incomplete"
    assert item["item"]["status"] == "incomplete"
    assert [one["status"] for one in done["response"]["output"]] == ["completed", "incomplete"]


def test_log_probabilities_go_with_the_first_event_of_their_tokens() -> None:
    both = GenerationChunk(0, [Text("a"), Text("b")], [LIKELY])
    told = Run().stream(both, GenerationChunk(0, [Text("c")], [LIKELY], finish="stop"))
    deltas = [one for one in told if one["type"].endswith("text.delta")]
    assert [len(one["logprobs"]) for one in deltas] == [1, 0, 1]
    done = next(one for one in told if one["type"].endswith("text.done"))
    assert len(done["logprobs"]) == 2


def test_new_text_of_an_open_message_is_written_in_the_same_form() -> None:
    run = Run()
    before = run.stream(*chunks(Text("a"))[:1])
    event = run.encoder.encode_text(run.generation, 'b"\n')
    name, text = event.removesuffix(b"\n\n").split(b"\n")
    told = json.loads(text.removeprefix(b"data: "))
    assert name == b"event: response.output_text.delta"
    assert told == before[-1] | {"delta": 'b"\n', "sequence_number": len(before)}


def test_text_before_any_message_begins_one() -> None:
    run = Run()
    told = run.encoder.encode_text(run.generation, "a")
    assert b"response.output_item.added" in told and b'"delta":"a"' in told


def test_an_error_within_a_stream_is_its_last_event() -> None:
    told = Run().encoder.encode_late_error(ServekitError("broken"))
    assert told is not None
    event = json.loads(told.split(b"data: ")[1])
    assert (event["type"], event["message"], event["param"]) == ("error", "broken", None)


# ---------------------------------------------------------------- in the background


def test_a_response_in_the_background_is_shown_before_it_runs() -> None:
    run = Run(background=True)
    shown = run.encoder.encode_queued(run.generation.request, "m")
    queued = json.loads(shown)
    assert (queued["status"], queued["background"], queued["store"]) == ("queued", True, True)
    assert (queued["output"], queued["usage"]) == ([], None)
    part = run.encoder.encode_queue_events(shown)
    blocks = part.data.removesuffix(b"\n\n").split(b"\n\n")
    told = [json.loads(block.split(b"data: ")[1]) for block in blocks]
    assert (part.first, part.last) == (0, 1)
    assert [one["type"] for one in told] == ["response.created", "response.queued"]
    assert [one["sequence_number"] for one in told] == [0, 1]
    assert all(one["response"] == queued for one in told)
