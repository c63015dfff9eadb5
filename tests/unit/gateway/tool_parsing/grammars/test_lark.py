"""The parts that grammars are made of, and what stands before an answer in a form."""

from __future__ import annotations

import json
import time

import pytest

from servekit.gateway.tool_parsing.grammars.lark import (
    Lark,
    after_thoughts,
    join_parts,
    one_of,
    write_thoughts,
)
from servekit.protocol.messages import Dialect, Grammar
from tests.unit.gateway.tool_parsing.grammars.test_tool_grammar import dialect, fits

PLAIN = Dialect()
TOKEN = Dialect(tokens=(("<call>", 7),))


def test_a_rule_that_exists_is_not_added_again() -> None:
    lark = Lark(PLAIN)
    assert [lark.rule('"a"'), lark.rule('"b"'), lark.rule('"a"')] == ["sk_0", "sk_1", "sk_0"]
    assert lark.rule('"a"', "[lazy]") == "sk_2", "its options make it another"
    assert lark.grammar("sk_0").text == 'start: sk_0\nsk_0: "a"\nsk_1: "b"\nsk_2[lazy]: "a"\n'


def test_a_grammar_names_the_parameter_that_it_comes_from() -> None:
    assert Lark(PLAIN).grammar('"a"').param == "response_format"
    made = Lark(PLAIN).grammar('"a"', "more: /x/\n", "tools")
    assert made == Grammar("lark", 'start: "a"\nmore: /x/\n', "tools")


def test_a_marker_that_is_a_token_is_written_as_that_token() -> None:
    """A literal would never match it."""
    assert Lark(TOKEN).literal("<call>", "", 'a"b\n') == '<[7]> "a\\"b\\n"'
    assert Lark(PLAIN).literal("<call>") == '"<call>"'
    assert Lark(PLAIN).literal("") == ""


def test_text_goes_up_to_the_first_marker() -> None:
    lark = Lark(TOKEN)
    assert lark.text_through_marker("<call>") == "sk_0 <[7]>"
    assert lark.text_through_marker("</a>\n") == "sk_1"
    rules = lark.grammar("x").text
    assert "sk_0: /(?s:.*)/\n" in rules
    assert "sk_1[lazy]: /(?s:.*)<\\/a>\\n/\n" in rules


@pytest.mark.parametrize(
    "marker", ["</a>", "[x]", "a.b", "\\", "<|end|>", "\n\n", "a/b\nc", "\t \r"]
)
def test_a_marker_of_any_signs_ends_a_text(marker: str) -> None:
    lark, spoken = Lark(PLAIN), dialect("", own_tokens=False)
    grammar = lark.grammar(f"{lark.text_through_marker(marker)} {lark.literal('end')}")
    assert fits(spoken, grammar, f"text {{ {marker}end")
    assert not fits(spoken, grammar, f"text {marker}more{marker}end"), "it is the first"
    assert not fits(spoken, grammar, "textend")


def test_json_has_little_space_between_its_parts() -> None:
    """Too little to go on with it for ever."""
    lark, spoken = Lark(PLAIN), dialect("", own_tokens=False)
    grammar = lark.grammar(lark.json({"type": "array"}))
    assert fits(spoken, grammar, "[1,\n  2]")
    assert not fits(spoken, grammar, f"[1,{' ' * 9}2]")
    assert not fits(spoken, grammar, "[1,\t2]")


def test_any_json_is_a_schema_that_compilers_accept() -> None:
    lark = Lark(PLAIN)
    assert lark.json(True) == lark.json({})
    schema = {"type": "string", "format": "password"}
    lark.json(schema)
    assert "password" not in lark.grammar("x").text and schema["format"] == "password"


def test_parts_are_joined_and_chosen_among() -> None:
    assert join_parts("a", "b", many=False) == "a"
    assert join_parts("a", "b", many=True) == "a (b a)*"
    assert one_of(["a"]) == "a"
    assert one_of(["a", "b"]) == "(a | b)"


THINKS = {"think_begin": "<think>", "think_end": "</think>"}


def test_thoughts_are_optional_unless_the_prompt_has_begun_them() -> None:
    lark = Lark(PLAIN)
    assert write_thoughts(lark, PLAIN, begun=True) == ""
    spoken = dialect("", own_tokens=False, **THINKS)
    assert write_thoughts(lark, spoken, begun=False).endswith(")?")
    assert not write_thoughts(lark, spoken, begun=True).endswith(")?")


@pytest.mark.parametrize("begun", [False, True])
def test_a_form_keeps_its_parameter_and_comes_after_the_thoughts(begun: bool) -> None:
    spoken = dialect("", own_tokens=False, **THINKS)
    head = "" if begun else "<think>"
    for inner, good, wrong in (
        (Grammar("json_schema", '{"type": "object"}', "text.format"), "{ }", "[]"),
        (Grammar("regex", "a/b\nc|\\/", "guided_regex"), "a/b\nc", "a"),
        (Grammar("regex", "a\\\\/", "guided_regex"), "a\\/", "a/"),
        (
            Grammar("lark", '%llguidance {}\nstart[capture]: "a" restart\nrestart: "b"', "tools"),
            "ab",
            "a",
        ),
    ):
        made = after_thoughts(spoken, inner, begun)
        assert (made.kind, made.param) == ("lark", inner.param)
        if "llguidance" in inner.text:
            assert "sk_start[capture]: " in made.text and "\nrestart: " in made.text
            continue
        assert fits(spoken, made, f"{head}hm</think>{good}"), inner
        assert not fits(spoken, made, f"{head}hm</think>{wrong}"), inner
        assert fits(spoken, made, good) is not begun


def test_without_thoughts_the_form_is_as_it_was() -> None:
    form = Grammar("regex", json.dumps("a"))
    assert after_thoughts(PLAIN, form, begun=False) is form


@pytest.mark.parametrize("space", [" ", "\n", "\t\n"])
def test_much_space_in_a_grammar_takes_little_time(space: str) -> None:
    spoken, many = dialect("", own_tokens=False, **THINKS), space * 200_000
    began_s = time.process_time()
    for text, kept in ((f"start{many}x: y", True), (f"start{many}[lazy]{many}: y", False)):
        made = after_thoughts(spoken, Grammar("lark", text, "guided_grammar"), begun=False)
        assert made.text.endswith(f"\n{text}" if kept else f"\nsk_{text}")
    assert time.process_time() - began_s < 2
