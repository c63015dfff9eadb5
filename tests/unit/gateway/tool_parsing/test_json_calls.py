"""Calls as JSON objects: Hermes and Qwen, and markers that a template has told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.gateway.tool_parsing import Text, ToolCallStart, parser
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import CUTS, all_cuts_agree, feed, read

HERMES = Dialect(tools="hermes")
OWN = Dialect(tools="template", tool_begin="<TOOLCALL>", tool_end="</TOOLCALL>")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["</tool_call>", '"', "\\", "}", "<tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)


def call(name: str, arguments: Any) -> str:
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


def test_text_then_calls_in_a_row() -> None:
    text = f"Let me look.\n{call('f', {'a': 1})}\n{call('g', {})}\n"
    assert all_cuts_agree(HERMES, text) == [
        ("text", "Let me look."),
        ("f", '{"a": 1}'),
        ("g", "{}"),
    ]


def test_text_between_and_after_calls_stays() -> None:
    text = f"a {call('f', {})}\n\nb <tool {call('g', {})} c\n"
    said = [("text", "a"), ("f", "{}"), ("text", "\n\nb <tool"), ("g", "{}"), ("text", " c\n")]
    assert all_cuts_agree(HERMES, text) == said


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"name":"f","arguments":{"n":1.50,"e":1E5}}', [("f", '{"n":1.50,"e":1E5}')]),
        ('{"arguments": {"a": "b"}, "name": "f"}', [("f", '{"a": "b"}')]),
        ('{"id": 7, "name": "f", "parameters": { } , "type": "x"}', [("f", "{ }")]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', [("f", '{"a": "\\n"}')]),
        ('[{"name":"f","arguments":{}},{"name":"g","arguments":{}}]', [("f", "{}"), ("g", "{}")]),
        ('{"name":"f","arguments":{}}\n{"name":"g"}', [("f", "{}"), ("g", "{}")]),
        ('{"name":"f","arguments":{"s":"</tool_call>"}}', [("f", '{"s":"</tool_call>"}')]),
    ],
)
def test_ways_to_write_a_call(written: str, said: list[tuple[str, str]]) -> None:
    assert all_cuts_agree(HERMES, f"<tool_call>{written}</tool_call>") == said
    assert all_cuts_agree(OWN, f"<TOOLCALL>{written}</TOOLCALL>") == said


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call",
        "the marker <tool_call> opens a call",
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        ' \n<tool_call>{"name" "f"}</tool_call>\n ',
    ],
)
def test_what_is_no_call_is_text_to_the_letter(text: str) -> None:
    assert all_cuts_agree(HERMES, text) == [("text", text)]


def test_a_call_may_follow_what_is_none() -> None:
    text = '<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert all_cuts_agree(HERMES, text) == [("text", "<tool_call>oops"), ("f", "{}")]


def test_arguments_end_where_they_err_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": tru, "b": 1}}</tool_call>'
    said = [("f", '{"a": tru'), ("text", ', "b": 1}}</tool_call>')]
    assert all_cuts_agree(HERMES, text) == said


def test_arguments_cut_short_by_the_limit_are_what_was_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x'
    assert all_cuts_agree(HERMES, text) == [("f", '{"a": "x')]


def test_a_closing_marker_cut_short_is_markup() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}\n</tool'
    assert all_cuts_agree(HERMES, text) == [("f", "{}")]


def test_arguments_go_out_as_they_come() -> None:
    parse = parser(HERMES, tools=True, reasoning=False)
    begun = parse.feed('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert isinstance(begun[0], ToolCallStart)
    assert re.fullmatch(r"call_[0-9a-f]{24}", begun[0].id)
    assert [getattr(event, "text", "") for event in begun[1:]] == ['{"a": "lo']
    assert [getattr(event, "text", "") for event in parse.feed("ng")] == ["ng"]


def test_plain_text_is_held_back_no_longer_than_needed() -> None:
    parse = parser(HERMES, tools=True, reasoning=True)
    assert parse.feed("a <b") == [Text("a <b")]
    assert parse.feed(" <tool") == []
    assert parse.feed("s") == [Text(" <tools")]
    assert parse.feed(".\n") == [Text(".")]
    assert parse.end() == [Text("\n")]


def test_without_tools_a_call_is_text() -> None:
    text = call("f", {})
    assert read(HERMES, text, tools=False) == [("text", text)]


def test_a_name_that_never_comes_is_given_up() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "x" * 70_000 + '"}, "name": "f"}</tool_call>'
    for size in (len(text), 4096):
        assert read(HERMES, text, [size]) == [("text", text)]


@pytest.mark.lane("long")
@given(
    parts=st.lists(
        st.text(max_size=20) | st.tuples(st.text(max_size=5).map("f{}".format), OBJECTS)
    ),
    sizes=CUTS,
)
@settings(deadline=None, max_examples=300)
def test_calls_come_back_as_they_were_written(
    parts: list[str | tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    text = "".join(part if isinstance(part, str) else call(*part) for part in parts)
    said = read(HERMES, text, sizes)
    assert said == read(HERMES, text, [len(text) or 1])
    calls = [part for part in said if part[0] not in ("text", "thought")]
    wanted = [part for part in parts if not isinstance(part, str)]
    assert [(name, json.loads(given)) for name, given in calls] == wanted
    spoken = "".join(words for kind, words in said if kind == "text")
    assert "".join(spoken.split()) == "".join(
        "".join(p for p in parts if isinstance(p, str)).split()
    )


SOUP = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', "{", "}", '"', "\\", ",",
         "[", "]", " ", "\n", "x", "<think>", "</think>", '{"name":"f","arguments":{}}', "1", ":"]
    ),
    max_size=25,
).map("".join)  # fmt: skip


@given(text=SOUP, sizes=CUTS)
@settings(deadline=None, max_examples=500)
def test_however_it_is_cut_the_same_is_said(text: str, sizes: list[int]) -> None:
    dialect = Dialect(tools="hermes", think_begin="<think>", think_end="</think>")
    assert read(dialect, text, sizes) == read(dialect, text, [len(text) or 1])


@given(text=SOUP)
@settings(deadline=None, max_examples=300)
def test_no_character_of_what_is_no_call_is_lost(text: str) -> None:
    events = feed(parser(HERMES, tools=True, reasoning=False), text, [3])
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert "".join(getattr(event, "text", "") for event in events) == text
