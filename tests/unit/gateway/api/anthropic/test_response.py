"""Anthropic's events and blocks, as the parts of an answer come in any order."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from servekit.errors import RequestError, ServekitError
from servekit.gateway.api.anthropic.response import MessageEncoder, encode_error, error_object
from servekit.gateway.generation.generation import Choice, GenerationChunk
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import ToolCall

CALL = (ToolCallStart(0, "c1", "look"), CallArguments(0, '{"at": 1}'))
CALLED = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}


def generation(tokens: int = 5) -> Any:
    return SimpleNamespace(model="m", prompt_tokens=9, cached_tokens=4, completion_tokens=tokens)


def stream(*events: Event, thoughts: bool = True, finish: Any = "stop", stop: str = "") -> Any:
    """Return the events of a stream whose answer comes in a chunk for each event."""
    encoder, made = MessageEncoder(thoughts=thoughts, max_tokens=10), generation()
    data = encoder.encode_start(made)
    chunks = [GenerationChunk(0, [event]) for event in events] or [GenerationChunk(0, [])]
    chunks[-1].finish, chunks[-1].stop = finish, stop
    for chunk in chunks:
        data += encoder.encode_chunks(made, [chunk])
    data += encoder.encode_end(made)
    parts = [part.split(b"\n") for part in data.removesuffix(b"\n\n").split(b"\n\n")]
    told = [json.loads(line.removeprefix(b"data: ")) for _, line in parts]
    assert [name for name, _ in parts] == [b"event: " + one["type"].encode() for one in told]
    return told


def blocks(*events: Event, **options: Any) -> list[dict[str, Any]]:
    """Return the blocks that a client builds of a stream."""
    built: list[dict[str, Any]] = []
    is_open = False
    for one in stream(*events, **options):
        match one["type"]:
            case "content_block_start":
                assert not is_open and one["index"] == len(built)
                is_open = True
                built.append(one["content_block"] | {"json": ""})
            case "content_block_delta":
                assert is_open and one["index"] == len(built) - 1
                kind, text = one["delta"]["type"], [*one["delta"].values()][1]
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(kind, "json")
                built[-1][name] += text
            case "content_block_stop":
                assert is_open and one["index"] == len(built) - 1
                is_open = False
    assert not is_open
    for block in built:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return built


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def whole(choice: Choice, *, thoughts: bool = True, tokens: int = 5) -> Any:
    encoder = MessageEncoder(thoughts=thoughts, max_tokens=10)
    return json.loads(encoder.encode_response(generation(tokens), [choice]))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], [text("")]),
        ([Text("a"), Text("b")], [text("ab")]),
        (CALL, [CALLED]),
        ([*CALL, *CALL], [CALLED, CALLED]),
        # white space that only calls surround is dropped, and any other is text
        ([Text("\n"), *CALL], [CALLED]),
        ([*CALL, Text("\n"), *CALL], [CALLED, CALLED]),
        ([*CALL, Text(" \n")], [CALLED]),
        ([Text(" "), Text("\n")], [text(" \n")]),
        ([Text(" "), Text("a"), *CALL], [text(" a"), CALLED]),
        ([Text("a"), Text("\n"), *CALL], [text("a\n"), CALLED]),
        ([*CALL, Text("\n"), Text("b")], [CALLED, text("\nb")]),
        (
            [Reasoning("h"), Reasoning("m"), Text("a")],
            [{"type": "thinking", "thinking": "hm", "signature": ""}, text("a")],
        ),
    ],
)
def test_the_parts_of_an_answer_are_blocks(
    events: list[Event], expected: list[dict[str, Any]]
) -> None:
    assert blocks(*events) == expected


def test_thoughts_that_nobody_asked_for_are_no_block() -> None:
    assert blocks(Reasoning("hm"), Text("a"), thoughts=False) == [text("a")]
    choice = Choice(text="a", reasoning="hm", finish="stop")
    assert whole(choice, thoughts=False)["content"] == [text("a")]
    assert [block["type"] for block in whole(choice)["content"]] == ["thinking", "text"]


def test_a_whole_answer_has_the_blocks_of_its_stream() -> None:
    call = ToolCall("c1", "look", '{"at": 1}')
    assert whole(Choice(text="\n", calls=[call]))["content"] == [CALLED]
    assert whole(Choice(text="a", calls=[call]))["content"] == [text("a"), CALLED]
    assert whole(Choice(text=" "))["content"] == [text(" ")]
    broken = ToolCall("c1", "look", '{"at')
    assert whole(Choice(calls=[broken]))["content"][0]["input"] == {"INVALID_JSON": '{"at'}


@pytest.mark.parametrize(
    ("finish", "stop", "called", "tokens", "reason", "sequence"),
    [
        ("stop", "", False, 5, "end_turn", None),
        ("stop", "END", False, 5, "stop_sequence", "END"),
        ("tool_calls", "", True, 5, "tool_use", None),
        # a stop string that ended the text of a call cut it off
        ("stop", "END", True, 5, "stop_sequence", "END"),
        ("tool_calls", "END", True, 5, "tool_use", None),
        # fewer tokens than were allowed: the context was full
        ("length", "", False, 10, "max_tokens", None),
        ("length", "", False, 9, "model_context_window_exceeded", None),
        ("length", "", True, 10, "max_tokens", None),
    ],
)
def test_why_an_answer_ended(
    finish: Any, stop: str, called: bool, tokens: int, reason: str, sequence: str | None
) -> None:
    calls = [ToolCall("c1", "look", "{}")] if called else []
    message = whole(Choice(text="a", calls=calls, finish=finish, stop=stop), tokens=tokens)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_stream_begins_and_ends_with_the_counts() -> None:
    start, ping, *_, last, end = stream(Text("a"), stop="END")
    assert (start["type"], ping, end) == (
        "message_start",
        {"type": "ping"},
        {"type": "message_stop"},
    )
    message = start["message"]
    assert message["id"].startswith("msg_")
    assert (message["content"], message["model"], message["role"]) == ([], "m", "assistant")
    counts = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert message["usage"] == counts | {"output_tokens": 0}
    assert last["usage"] == counts | {"output_tokens": 5}
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_errors_name_anthropics_parameter_and_type() -> None:
    error = error_object(RequestError("response_format: no", param="response_format"))
    assert error["error"] == {
        "type": "invalid_request_error",
        "message": "output_config.format: no",
    }
    status, body = encode_error(ServekitError("broken"))
    assert (status, json.loads(body)["error"]["type"]) == (500, "api_error")
    late = MessageEncoder(thoughts=False, max_tokens=1).encode_late_error(ServekitError("broken"))
    assert late.startswith(b"event: error\ndata: ") and late.endswith(b"\n\n")
