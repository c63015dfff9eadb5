"""Calls within an answer: their numbers and ids, pieces of arguments, and space around them."""

from __future__ import annotations

import re
import string

import pytest

from servekit.gateway.tool_parsing.events import CallArguments, Text, ToolCallStart
from servekit.gateway.tool_parsing.incremental_scanner import (
    MAX_SPACE,
    IncrementalScanner,
    ParseError,
)
from servekit.gateway.tool_parsing.tool_call_parser import Calls
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import all_cuts_agree, read

HERMES = Dialect("hermes")
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
BARE = '{"name": "f", "parameters": {}}'


def test_calls_are_numbered_and_named() -> None:
    scanner = IncrementalScanner()
    calls = Calls(scanner)
    calls.start_call("f")
    calls.start_call("g", "own")
    first, second = scanner.take_events()
    assert isinstance(first, ToolCallStart) and isinstance(second, ToolCallStart)
    assert [(one.index, one.name) for one in (first, second)] == [(0, "f"), (1, "g")]
    assert re.fullmatch("call_[0-9a-f]{24}", first.id) and second.id == "own"
    assert calls.count == 2


def test_an_id_is_short_where_the_template_takes_no_other() -> None:
    scanner = IncrementalScanner()
    Calls(scanner, short_ids=True).start_call("f")
    [first] = scanner.take_events()
    assert isinstance(first, ToolCallStart)
    assert len(first.id) == 9 and set(first.id) <= set(string.ascii_letters + string.digits)


def test_a_call_without_a_name_is_none() -> None:
    scanner = IncrementalScanner()
    with pytest.raises(ParseError):
        Calls(scanner).start_call("")
    assert scanner.take_events() == []


def test_pieces_of_arguments_in_one_step_are_one_event() -> None:
    scanner = IncrementalScanner()
    calls = Calls(scanner)
    calls.start_call("f")
    for piece in ("{", "", "}"):
        calls.argue(piece)
    calls.start_call("g")
    calls.argue("")
    calls.argue("[]")
    events = [one for one in scanner.take_events() if isinstance(one, CallArguments)]
    assert events == [CallArguments(0, "{}"), CallArguments(1, "[]")]
    calls.argue("x")
    assert scanner.take_events() == [CallArguments(1, "x")], "told ones are told"


def test_text_that_may_become_a_call_is_held_until_the_call_begins() -> None:
    scanner = IncrementalScanner()
    scanner.append_text("<tool_call>")
    calls = Calls(scanner)
    scanner.mark()
    calls.record_name("f")
    assert calls.named == "f"
    calls.start_call("f")
    assert (calls.named, scanner.marked()) == ("", "")


def test_a_name_that_the_end_may_have_cut_is_not_known() -> None:
    scanner = IncrementalScanner()
    scanner.append_text("f")
    scanner.at, scanner.ended = 1, True
    calls = Calls(scanner)
    calls.record_name("f")
    assert calls.named == ""
    scanner.append_text("(")
    calls.record_name("f")
    assert calls.named == "f"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f" \n{CALL}", [("f", "{}")]),
        (f"{CALL}\n \n{CALL}\n", [("f", "{}"), ("f", "{}")]),
        (f"a \n{CALL}\n b", [("text", "a"), ("f", "{}"), ("text", "\n b")]),
        (" \n", [("text", " \n")]),
        (f"{CALL} \n b \n", [("f", "{}"), ("text", " \n b \n")]),
    ],
)
def test_white_space_around_calls_belongs_to_them(text: str, said: list[tuple[str, str]]) -> None:
    assert all_cuts_agree(HERMES, text) == said


def test_only_so_much_white_space_is_held_back() -> None:
    much = " " * (MAX_SPACE + 3)
    told = all_cuts_agree(HERMES, f"a{much}{CALL}")
    assert told == [("text", f"a{much[:3]}"), ("f", "{}")]
    [call, text] = all_cuts_agree(HERMES, f"{CALL}{much}")
    assert (call, text[0], text[1].strip()) == (("f", "{}"), "text", "")


def test_a_bare_call_begins_an_answer_and_never_stands_within_one() -> None:
    llama = Dialect("llama3_json")
    assert all_cuts_agree(llama, f" \n{BARE}") == [("f", "{}")]
    assert all_cuts_agree(llama, f"So: {BARE}") == [("text", f"So: {BARE}")]


def test_a_malformed_call_is_text_and_the_next_one_is_found() -> None:
    wrong = '<tool_call>{"nam": 1}</tool_call>'
    assert all_cuts_agree(HERMES, f"{wrong}{CALL}") == [("text", wrong), ("f", "{}")]


def test_a_call_within_the_opening_of_a_malformed_one_is_found() -> None:
    assert all_cuts_agree(HERMES, f"<tool_call>{CALL}") == [("text", "<tool_call>"), ("f", "{}")]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (5, []),  # of the marker
        (12, []),  # the call has no name yet
        (25, [("f", "")]),  # it has, and no arguments
        (CALL.index("{}") + 1, [("f", "{")]),
    ],
)
def test_a_call_that_a_limit_cut_off_leaves_no_markup(
    size: int, said: list[tuple[str, str]]
) -> None:
    assert read(HERMES, CALL[:size], [3], cut=True) == said


def test_text_behind_calls_is_told_as_it_comes() -> None:
    assert read(HERMES, f"{CALL}abc", [1]) == [("f", "{}"), ("text", "abc")]
    assert Text("abc").text == "abc"
