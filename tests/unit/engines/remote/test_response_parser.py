"""What an endpoint's answer says, and what becomes of one that lies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.engines.remote.response_parser import ResponseParser
from servekit.errors import EndpointFailed, RequestError
from servekit.gateway.tool_parsing import (
    CallArguments,
    Event,
    Reasoning,
    Text,
    ToolCallStart,
    parser,
)
from servekit.protocol.messages import UNKNOWN_TOKEN, Dialect, Generate, SamplingParams
from servekit.protocol.tool_formats import FRAMED, MARKS

DIALECT = Dialect(tools=FRAMED, think_begin="<think>", think_end="</think>")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]


def answer(**fields: Any) -> ResponseParser:
    params = fields.pop("params", SamplingParams())
    return ResponseParser(
        Generate(1, params, **{"messages": [], "tools": TOOLS} | fields), 10, 10_000
    )


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> bytes:
    return json.dumps(
        {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish, **more}]}
    ).encode()


def events(one: ResponseParser, *deltas: Any) -> list[Event]:
    """What the gateway makes of these deltas, cut as they are."""
    parse, found = parser(DIALECT, tools=True, reasoning=True), list[Event]()
    for delta in deltas:
        one.add_chunk(chunk(delta))
        found += parse.feed(one.piece(1).text)
    one.add_chunk(chunk(None, "stop"))
    return _joined([*found, *parse.feed(one.piece(1, last=True).text), *parse.end()])


def _joined(found: list[Event]) -> list[Event]:
    """Neighbours of a kind as one."""
    whole: list[Event] = []
    for event in found:
        last = whole[-1] if whole else None
        if isinstance(event, Text) and isinstance(last, Text):
            whole[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            whole[-1] = CallArguments(event.index, last.text + event.text)
        else:
            whole.append(event)
    return whole


def called(
    index: int | None = 0, id: str | None = None, name: str | None = None, args: Any = None
) -> dict[str, Any]:
    return {
        "tool_calls": [{"index": index, "id": id, "function": {"name": name, "arguments": args}}]
    }


# ---------------------------------------------------------------- what it says


def test_thoughts_text_and_calls_each_to_the_last_blank() -> None:
    found = events(
        answer(),
        {"role": "assistant", "content": ""},
        {"reasoning_content": " \n hm"},
        {"reasoning": ", so\n\n"},
        {"content": "\n  Let me "},
        {"content": "see. \n"},
        called(0, "call_1", "f", ""),
        called(0, None, None, ' {"a":'),
        called(0, None, None, " 1} "),
        called(1, "call_2", "g", '{"b": "</tool_call>"}'),
        {"content": " \nThen"},
        {"reasoning_content": "and more"},
    )
    assert found == [
        Reasoning(" \n hm, so\n\n"),
        Text("\n  Let me see. \n"),
        ToolCallStart(0, "call_1", "f"),
        CallArguments(0, ' {"a": 1} '),
        ToolCallStart(1, "call_2", "g"),
        CallArguments(1, '{"b": "</tool_call>"}'),
        Text(" \nThen"),
        Reasoning("and more"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<think>no thought</think>",
        MARKS,
        f"{MARKS[2]}id{MARKS[3]}f{MARKS[4]}{{}}",
    ],
)
def test_data_never_becomes_a_call_or_a_thought(text: str) -> None:
    harmless = text.translate(dict.fromkeys(map(ord, MARKS), "\N{REPLACEMENT CHARACTER}"))
    assert events(answer(), *({"content": piece} for piece in text)) == [Text(harmless)]
    [thought] = events(answer(), {"reasoning_content": text})
    assert thought == Reasoning(harmless)
    begins, arguments = events(answer(), called(0, text, text, text))
    assert begins == ToolCallStart(0, harmless, harmless)
    assert arguments == CallArguments(0, harmless)


def test_arguments_in_other_forms() -> None:
    found = events(answer(), called(0, "a", "f"), called(1, "b", "f", {"n": 1}))
    assert [e.text for e in found if isinstance(e, CallArguments)] == ["{}", '{"n":1}']


def test_several_calls_that_all_claim_the_first_place() -> None:
    found = events(answer(), called(0, "a", "f", "{}"), called(0, "b", "g", "{}"))
    assert [e.name for e in found if isinstance(e, ToolCallStart)] == ["f", "g"]


def test_calls_without_places_or_ids() -> None:
    found = events(answer(), called(None, "a", "f", "{"), called(None, None, None, "}"))
    assert found == [ToolCallStart(0, "a", "f"), CallArguments(0, "{}")]
    begins, _ = events(answer(), called(0, None, "f", "{}"))
    assert isinstance(begins, ToolCallStart)
    assert begins.id.startswith("call_")


def test_parts_of_content() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = {"content": [thinking, {"type": "text", "text": "yes"}, {"type": "image"}, 7]}
    assert events(answer(), parts) == [Reasoning("hm"), Text("yes")]


def test_a_refusal_is_what_it_says() -> None:
    assert events(answer(), {"refusal": "I won't."}) == [Text("I won't.")]


def test_a_whole_answer_where_a_stream_was_asked_for() -> None:
    one = answer()
    message = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    data = {
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    }
    one.add_chunk(json.dumps(data).encode())
    one.close(done=True)
    last = one.piece(1, last=True)
    assert (last.finish, last.prompt_tokens, last.completion_tokens) == ("length", 4, 2)
    assert last.text.endswith("Hi")


def test_an_empty_reason_is_no_end_and_no_place_is_the_first() -> None:
    one = answer()
    for text in ("a", "b"):
        one.add_chunk(
            json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": ""}]}).encode()
        )
    assert (one.piece(1).text, one.finish) == ("ab", None)


def test_a_plain_completion_has_no_frames_and_a_chat_nothing_without() -> None:
    marked = f"{MARKS[2]}id{MARKS[3]}f{MARKS[4]}"
    plain = answer(messages=None, prompt="x")
    plain.add_chunk(chunk({"reasoning_content": "hm"}, text=marked))
    assert plain.piece(1).text == marked
    chat = answer()
    chat.add_chunk(chunk({"content": "a"}, text=marked))
    assert chat.piece(1).text == "a"


def test_other_choices_and_what_follows_the_end_are_not_ours() -> None:
    one = answer()
    one.add_chunk(chunk({"content": "a"}))
    one.add_chunk(json.dumps({"choices": [{"index": 1, "delta": {"content": "b"}}]}).encode())
    one.add_chunk(chunk(None, "stop"))
    one.add_chunk(chunk({"content": "c"}))
    assert one.piece(1).text == "a"


# ---------------------------------------------------------------- counts and ends


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": -1, "completion_tokens": 3}, {"prompt_tokens": 3},
     {"prompt_tokens": "many", "completion_tokens": 1.5},
     {"prompt_tokens": True, "completion_tokens": 1},
     {"prompt_tokens": 2**50, "completion_tokens": 1}],
)  # fmt: skip
def test_counts_that_cannot_be_are_estimated(usage: Any) -> None:
    one = answer()
    one.add_chunk(chunk({"content": "x" * 9}, "stop"))
    one.add_chunk(json.dumps({"choices": [], "usage": usage}).encode())
    last = one.piece(1, last=True)
    assert (last.prompt_tokens, last.completion_tokens, one.counted) == (10, 3, False)


def test_which_stop_string_it_was() -> None:
    params = SamplingParams(stop=("END", "."))
    for told, known in (("END", "END"), ("other", ""), (7, ""), (None, "")):
        one = answer(params=params)
        one.add_chunk(chunk({"content": "a"}, "stop", stop_reason=told))
        assert one.piece(1, last=True).stop == known


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "eos", "whatever"])
def test_any_other_end_is_a_stop(reason: str) -> None:
    one = answer()
    one.add_chunk(chunk({"content": "a"}, reason))
    assert one.piece(1, last=True).finish == "stop"


def test_a_filter_is_no_end() -> None:
    with pytest.raises(RequestError, match="content filter"):
        answer().add_chunk(chunk(None, "content_filter"))


def test_a_stream_that_ends_without_an_end() -> None:
    one = answer()
    one.add_chunk(chunk({"content": "a"}))
    with pytest.raises(EndpointFailed, match="broke off before its end"):
        one.close(done=False)
    one.close(done=True)
    assert one.piece(1, last=True).finish == "stop"
    with pytest.raises(EndpointFailed, match="no choices"):
        answer().close(done=True)


# ---------------------------------------------------------------- lies


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"nothing",
        b"[" * 100_000,
        b"[1]",
        b'{"choices": 7}',
        b'{"choices": [{"delta": {"content": 7}}]}',
        b'{"choices": [{"delta": {"tool_calls": [7]}}]}',
        b'{"usage": 7}',
        b"\xff\xfe",
        json.dumps({"error": {"message": "wrong"}}).encode(),
        json.dumps({"error": "wrong"}).encode(),
        chunk(called(0, "a", None, "{}")),
        chunk({"content": "x" * 10_001}),
    ],
)
def test_lies(data: bytes) -> None:
    with pytest.raises(EndpointFailed) as told:
        answer().add_chunk(data)
    assert told.value.message.isprintable()


def test_a_call_of_what_was_not_offered() -> None:
    with pytest.raises(EndpointFailed, match="was offered none"):
        answer(tools=[]).add_chunk(chunk(called(0, "a", "f", "{}")))


def test_calls_that_are_mixed_up() -> None:
    one = answer()
    one.add_chunk(chunk(called(0, "a", "f", "{")))
    one.add_chunk(chunk(called(1, "b", "g", "{")))
    with pytest.raises(EndpointFailed, match="after the next has started"):
        one.add_chunk(chunk(called(0, None, None, "}")))
    with pytest.raises(EndpointFailed, match="after the next has started"):
        one.add_chunk(chunk(called(0, "a", "f", "}")))


def test_an_answer_without_an_end_is_given_up_by_its_length() -> None:
    one = answer()
    with pytest.raises(EndpointFailed, match="longer than 10000 characters"):
        for _ in range(10_001):
            one.add_chunk(chunk({"content": "xx"}))
            one.piece(1)


# ---------------------------------------------------------------- after another worker


def test_each_piece_is_a_token_whose_id_is_unknown() -> None:
    one = answer()
    for text in ("", "One", " two"):
        one.add_chunk(chunk({"content": text}))
    assert one.piece(1).token_ids == [UNKNOWN_TOKEN] * 2
    assert one.piece(1).token_ids == []


@pytest.mark.parametrize("pieces", [[" \n3"], [" ", "\n", "3"], ["\u00a0", "3"], ["3"]])
def test_the_white_space_before_it_is_not_said_twice(pieces: list[str]) -> None:
    one = answer(answered="1, 2, \n", emitted=[UNKNOWN_TOKEN] * 4)
    for text in pieces:
        one.add_chunk(chunk({"content": text}))
    expected = "".join(pieces)
    assert one.piece(1).text == (expected.lstrip(" \n"))


def test_tokens_of_both_workers_are_counted() -> None:
    one = answer(answered="1, 2,", emitted=[UNKNOWN_TOKEN] * 4)
    one.add_chunk(chunk({"content": " 3"}, "stop"))
    one.add_chunk(b'{"usage": {"prompt_tokens": 14, "completion_tokens": 2}}')
    last = one.piece(1, last=True)
    assert (last.prompt_tokens, last.completion_tokens) == (10, 6)
