"""Answers whose parts are told apart by marks, however they are cut."""

from __future__ import annotations

import pytest

from servekit.gateway.tool_parsing import ToolCallStart, parser
from servekit.protocol.messages import Dialect
from servekit.protocol.tool_formats import ARGUMENTS, CALL, FRAMED, NAME, TEXT, THOUGHT
from tests.unit.gateway.tool_parsing.reading import all_cuts_agree, feed, read

DIALECT = Dialect(tools=FRAMED, think_begin="<think>", think_end="</think>")
ANSWER = (
    f" a\n{THOUGHT}hm {TEXT}\n b {CALL}c1{NAME}f{ARGUMENTS}{{}} {CALL}c2{NAME}g{ARGUMENTS}"
    f'{{"x": "<think>"}}{TEXT}<tool_call>{THOUGHT}end\n'
)


def test_each_part_is_what_it_is_to_the_last_blank() -> None:
    assert all_cuts_agree(DIALECT, ANSWER) == [
        ("text", " a\n"),
        ("thought", "hm "),
        ("text", "\n b "),
        ("f", "{} "),
        ("g", '{"x": "<think>"}'),
        ("text", "<tool_call>"),
        ("thought", "end\n"),
    ]


def test_thoughts_that_nobody_looks_for_are_text_between_tags() -> None:
    text = f"{THOUGHT}hm{TEXT}yes{THOUGHT}so"
    expected = "<think>\nhm\n</think>\n\nyes<think>\nso\n</think>\n\n"
    assert read(DIALECT, text, tools=False, reasoning=False) == [("text", expected)]


@pytest.mark.parametrize("size", range(1, 6))
def test_a_call_that_is_cut_off_within_its_head_is_none(size: int) -> None:
    assert read(DIALECT, f"a{f'{CALL}c1{NAME}f{ARGUMENTS}'[:size]}") == [("text", "a")]


def test_calls_keep_their_ids_and_one_without_gets_one() -> None:
    events = feed(parser(DIALECT, tools=True, reasoning=True), ANSWER, [3])
    ids = [event.id for event in events if isinstance(event, ToolCallStart)]
    assert ids == ["c1", "c2"]
    [begins] = feed(parser(DIALECT, tools=True, reasoning=True), f"{CALL}{NAME}f{ARGUMENTS}", [9])
    assert isinstance(begins, ToolCallStart)
    assert begins.id.startswith("call_")
