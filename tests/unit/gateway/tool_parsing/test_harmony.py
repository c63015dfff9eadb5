"""gpt-oss' channels: which messages are thoughts, calls or the answer, by their headers."""

from __future__ import annotations

import pytest

from servekit.gateway.tool_parsing import ToolCallStart, parser
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import Said, all_cuts_agree, feed, read

HARMONY = Dialect("harmony")
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>so"


def call(name: str = "f", arguments: str = "{}", head: str = "<|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name} {head}<|message|>{arguments}<|call|>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", [("thought", "hm"), ("text", "so")]),
        # the prompt may have begun the header, or the model leave out its beginning
        (f"{NEXT}{FINAL}", [("text", "so")]),
        ("<|message|>so", [("text", "so")]),
        ("<|channel|> final<|message|>so", [("text", "so")]),
        # a comment is no thought, and meant for the user
        ("<|channel|>commentary<|message|>I look.<|end|>", [("text", "I look.")]),
        (f"{THOUGHT}{NEXT}{THOUGHT}", [("thought", "hmhm")]),
        (
            f"{THOUGHT}{NEXT}{call()}{NEXT}{call('g')}",
            [("thought", "hm"), ("f", "{}"), ("g", "{}")],
        ),
        (call("a.b-c"), [("a.b-c", "{}")]),
        ("<|channel|>commentary to=f<|message|>{}", [("f", "{}")]),
        (" to=functions.f<|channel|>commentary<|message|>{}", [("f", "{}")]),
        # arguments that are none, or more than one object
        (call(arguments=""), [("f", "{}")]),
        (call(arguments=" \n"), [("f", "{}")]),
        (call(arguments="what?"), [("f", "{}"), ("text", "what?")]),
        (call(arguments='{"a": 1}{'), [("f", '{"a": 1}'), ("text", "{")]),
        (call(arguments='{"a": 1} \n'), [("f", '{"a": 1}')]),
        # what is no message is text, and all behind it
        ("plain", [("text", "plain")]),
        (f"{FINAL}<|end|>plain", [("text", "soplain")]),
        (f"{FINAL}<|end|>  {NEXT}{FINAL}", [("text", f"so  {NEXT}{FINAL}")]),
    ],
)
def test_each_message_is_what_its_header_says(text: str, said: Said) -> None:
    assert all_cuts_agree(HARMONY, text) == said


def test_a_message_ends_where_the_next_begins() -> None:
    assert all_cuts_agree(HARMONY, f"{FINAL}{NEXT}{FINAL}") == [("text", "soso")]


def test_thoughts_are_no_part_of_the_answer_also_where_nobody_asked_for_them() -> None:
    text = f"{THOUGHT}{NEXT}{FINAL}"
    assert read(HARMONY, text, reasoning=False) == [("thought", "hm"), ("text", "so")]


def test_without_tools_a_call_is_the_text_of_its_message() -> None:
    assert read(HARMONY, call(arguments='{"a": 1}'), tools=False) == [("text", '{"a": 1}')]


def test_a_header_that_a_limit_cut_off_is_none() -> None:
    assert all_cuts_agree(HARMONY, f"{FINAL}<|end|><|start|>assis", cut=True) == [("text", "so")]
    assert all_cuts_agree(HARMONY, "<|channel|>analysis", cut=True) == []


def test_a_call_that_a_limit_cut_off_has_the_arguments_so_far() -> None:
    text = call(arguments='{"a": [1').removesuffix("<|call|>")
    assert all_cuts_agree(HARMONY, text, cut=True) == [("f", '{"a": [1')]


def test_calls_have_numbers_and_ids_of_their_own() -> None:
    events = feed(parser(HARMONY, tools=True, reasoning=True), f"{call()}{NEXT}{call()}", [4])
    calls = [event for event in events if isinstance(event, ToolCallStart)]
    assert [one.index for one in calls] == [0, 1]
    assert len({one.id for one in calls}) == 2
