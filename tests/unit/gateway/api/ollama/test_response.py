"""Ollama's lines and objects, as the parts of an answer come in any order."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.errors import ContextLengthExceeded, RequestError, ServekitError
from servekit.gateway.api.ollama.response import OllamaEncoder, encode_error, error_object
from servekit.gateway.generation.generation import Choice, GenerationChunk
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import TokenLogprob, ToolCall

LOOK = (ToolCallStart(0, "c1", "look"), CallArguments(0, '{"at"'), CallArguments(0, ": 1}"))
SEE = (ToolCallStart(1, "c2", "see"),)
CALLED = {"id": "c1", "function": {"name": "look", "arguments": {"at": 1}}}
SEEN = {"id": "c2", "function": {"name": "see", "arguments": {}}}
LIKELY = TokenLogprob(b"a", -0.5)


def generation(**times: float) -> Any:
    now = time.monotonic()
    known = {"created_s": now - 4.0, "started_s": now - 3.0, "first_s": now - 1.0} | times
    return SimpleNamespace(prompt_tokens=9, completion_tokens=5, first=SimpleNamespace(**known))


def encoder(**options: bool) -> OllamaEncoder:
    known = {"chat": True, "thoughts": True, "logprobs": False} | options
    return OllamaEncoder("m", **known)


def stream(*events: Event, finish: Any = "stop", told: Any = (), **options: bool) -> Any:
    """Return the lines of a stream whose answer comes in a chunk for each event."""
    encode, made = encoder(**options), generation()
    chunks = [GenerationChunk(0, [event], [*told]) for event in events]
    chunks.append(GenerationChunk(0, [], finish=finish))
    data = b"".join(encode.encode_chunks(made, [chunk]) for chunk in chunks)
    data += encode.encode_end(made)
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(line["model"] == "m" and line["created_at"].endswith("Z") for line in lines)
    return lines


def messages(*events: Event, **options: bool) -> list[Any]:
    return [line["message"] for line in stream(*events, **options)]


def says(text: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], [says()]),
        ([Text("a"), Text('b"')], [says("a"), says('b"'), says()]),
        # a call is told once it is whole: before what follows it, else at the end
        (LOOK, [says(tool_calls=[CALLED]), says()]),
        ([*LOOK, *SEE], [says(tool_calls=[CALLED]), says(tool_calls=[SEEN]), says()]),
        ([*LOOK, Text("b")], [says(tool_calls=[CALLED]), says("b"), says()]),
        ([Text("a"), *SEE], [says("a"), says(tool_calls=[SEEN]), says()]),
        ([Reasoning("hm"), Text("a")], [says(thinking="hm"), says("a"), says()]),
    ],
)
def test_the_parts_of_an_answer_are_lines(events: list[Event], expected: list[Any]) -> None:
    assert messages(*events) == expected


def test_thoughts_that_nobody_asked_for_are_no_line() -> None:
    assert messages(Reasoning("hm"), Text("a"), thoughts=False) == [says("a"), says()]
    choice = Choice(text="a", reasoning="hm", finish="stop")
    for thoughts in (False, True):
        whole = json.loads(encoder(thoughts=thoughts).encode_response(generation(), [choice]))
        assert whole["message"].get("thinking") == ("hm" if thoughts else None)


def test_a_whole_answer_is_one_object() -> None:
    calls = [ToolCall("c1", "look", '{"at": 1}'), ToolCall("c2", "see", "{")]
    choice = Choice(text="a", calls=calls, finish="tool_calls")
    whole = json.loads(encoder().encode_response(generation(), [choice]))
    broken = {"id": "c2", "function": {"name": "see", "arguments": {"INVALID_JSON": "{"}}}
    assert whole["message"] == says("a", tool_calls=[CALLED, broken])
    assert (whole["done"], whole["done_reason"]) == (True, "stop")


def test_an_answer_to_a_prompt_has_its_text_in_another_place() -> None:
    lines = stream(Reasoning("hm"), Text("a"), chat=False)
    assert [line.get("response") for line in lines] == ["", "a", ""]
    assert lines[0]["thinking"] == "hm" and "message" not in lines[0]
    whole = encoder(chat=False).encode_response(generation(), [Choice(text="a", finish="stop")])
    assert json.loads(whole)["response"] == "a"


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "stop"), ("length", "length"), ("tool_calls", "stop")]
)
def test_why_an_answer_ended(finish: Any, reason: str) -> None:
    assert stream(Text("a"), finish=finish)[-1]["done_reason"] == reason


def test_the_end_has_the_counts_and_how_long_it_took() -> None:
    end = stream(Text("a"))[-1]
    assert (end["prompt_eval_count"], end["eval_count"]) == (9, 5)
    spans = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert [end[name] / 1e9 for name in spans] == pytest.approx([4.0, 1.0, 2.0, 1.0], abs=0.9)


def test_a_request_that_never_ran_has_waited_all_the_time() -> None:
    made = generation(started_s=0.0, first_s=0.0)
    end = json.loads(encoder().encode_response(made, [Choice(finish="stop")]))
    assert end["load_duration"] == end["total_duration"] > 0
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (0, 0)


def test_log_probabilities_come_once_with_the_first_line_of_their_tokens() -> None:
    encode, made = encoder(logprobs=True), generation()
    data = encode.encode_chunks(made, [GenerationChunk(0, [Text("a"), Text("b")], [LIKELY])])
    data += encode.encode_chunks(made, [GenerationChunk(0, [LOOK[0]], [LIKELY])])
    first, second, alone = (json.loads(line) for line in data.splitlines())
    assert [one["token"] for one in first["logprobs"]] == ["a"]
    assert "logprobs" not in second
    assert (alone["message"], len(alone["logprobs"])) == (says(), 1), "a call is not told yet"


def test_log_probabilities_that_nobody_asked_for_are_not_told() -> None:
    assert all("logprobs" not in line for line in stream(Text("a"), told=[LIKELY]))
    choice = Choice(text="a", logprobs=[LIKELY], finish="stop")
    for asked in (False, True):
        whole = json.loads(encoder(logprobs=asked).encode_response(generation(), [choice]))
        assert ("logprobs" in whole) == asked


def test_text_while_a_call_is_written_ends_the_call_first() -> None:
    encode, made = encoder(), generation()
    encode.encode_chunks(made, [GenerationChunk(0, [*LOOK])])
    lines = [json.loads(line) for line in encode.encode_text(made, "b").splitlines()]
    assert [line["message"] for line in lines] == [says(tool_calls=[CALLED]), says("b")]


def test_a_name_with_a_percent_sign_is_no_format() -> None:
    encode = OllamaEncoder("50%d", chat=True, thoughts=False, logprobs=False)
    line = json.loads(encode.encode_text(generation(), "100%"))
    assert (line["model"], line["message"]["content"], line["done"]) == ("50%d", "100%", False)


def test_a_request_that_only_loads_or_unloads_is_done_at_once() -> None:
    assert json.loads(encoder().loaded())["done_reason"] == "load"
    gone = json.loads(encoder(chat=False).loaded(goes=True))
    assert (gone["done"], gone["done_reason"], gone["response"]) == (True, "unload", "")


def test_errors_have_ollamas_names_of_parameters() -> None:
    error = RequestError("response_format and repetition_penalty: no")
    assert error_object(error) == {"error": "format and repeat_penalty: no"}
    status, body = encode_error(ContextLengthExceeded("too long"))
    assert (status, json.loads(body)) == (ContextLengthExceeded.status, {"error": "too long"})
    late = encoder().encode_late_error(ServekitError("broken"))
    assert late == b'{"error":"broken"}\n'
