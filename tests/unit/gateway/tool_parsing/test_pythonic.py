"""Calls written as Python: which values they may have, and what is a list and no call."""

from __future__ import annotations

import json

import pytest

from servekit.gateway.tool_parsing.incremental_scanner import MAX_HELD
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import all_cuts_agree, read

BARE = Dialect("pythonic")
OWN = Dialect("pythonic", tool_begin="<py>", tool_end="</py>")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        # what is JSON already stays as the model wrote it
        ("1.50", "1.50"),
        ('"a\\u00e4"', '"a\\u00e4"'),
        ('{"a":1}', '{"a":1}'),
        ("true", "true"),
        # and Python becomes JSON
        ("True", "true"),
        ("None", "null"),
        ("'it\\'s'", '"it\'s"'),
        ("'a' 'b'", '"ab"'),
        ("(1, 2)", "[1, 2]"),
        ("[1, {'a': None}]", '[1, {"a": null}]'),
        ("-1", "-1"),
        ("1_000", "1000"),
        ("'ä'", '"ä"'),
        ('"x, )]} = \'"', '"x, )]} = \'"'),
        ("'\\\\'", '"\\\\"'),
        ("'two\nlines\r'", '"two\\nlines\\r"'),
        ('"two\nlines"', '"two\\nlines"'),
        ("'\\d'", '"\\\\d"'),  # Python keeps an escape that it does not know
    ],
)
def test_a_value_is_a_literal_of_python_or_json(value: str, written: str) -> None:
    assert all_cuts_agree(BARE, f"[f(a={value}, b=1)]") == [("f", f'{{"a": {written}, "b": 1}}')]
    json.loads(written)


def test_keys_may_have_letters_of_any_language() -> None:
    text = "[f(größe=1, 城市='北京')]"
    assert all_cuts_agree(BARE, text) == [("f", '{"größe": 1, "城市": "北京"}')]


@pytest.mark.parametrize(
    "value",
    [
        *("x", "f()", "1 + y", "{1, 2}", "b'x'", "1j", "float('nan')", "NaN", ""),
        *("[1", "(1]", "{1: [}", "'a", "lambda: 1", "__import__('os')", "..."),
    ],
)
def test_what_is_no_literal_is_no_call(value: str) -> None:
    text = f"[f(a={value})]"
    assert all_cuts_agree(BARE, text) == [("text", text)]


def test_arguments_that_err_after_others_end_there() -> None:
    call, rest = all_cuts_agree(BARE, "[f(a=1, b=x)]")
    assert (call, rest[0]) == (("f", '{"a": 1'), "text")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[f()]", [("f", "{}")]),
        ("[ f( ) ]", [("f", "{}")]),
        ("[f(a=1,)]", [("f", '{"a": 1}')]),
        ("[f(a = 1)]", [("f", '{"a": 1}')]),
        ("[f(a=1),g()]", [("f", '{"a": 1}'), ("g", "{}")]),
        ("\n [f()]\n", [("f", "{}")]),
        ("[f()] done", [("f", "{}"), ("text", " done")]),
        ("[f()  done", [("f", "{}"), ("text", "  done")]),
    ],
)
def test_space_does_not_matter(text: str, said: list[tuple[str, str]]) -> None:
    assert all_cuts_agree(BARE, text) == said


def test_a_list_within_the_answer_needs_a_marker() -> None:
    assert all_cuts_agree(BARE, "So: [f()]") == [("text", "So: [f()]")]
    for begin, end in (
        ("<|python_start|>", "<|python_end|>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ):
        said = all_cuts_agree(BARE, f"So: {begin}[f()]{end} there")
        assert said == [("text", "So:"), ("f", "{}"), ("text", " there")]


def test_the_markers_of_the_template_are_known_beside_the_usual_ones() -> None:
    assert all_cuts_agree(OWN, "So: <py>[f()]</py>") == [("text", "So:"), ("f", "{}")]
    assert all_cuts_agree(OWN, "So: <|python_start|>[f()]<|python_end|>")[1] == ("f", "{}")
    assert all_cuts_agree(BARE, "So: <py>[f()]</py>") == [("text", "So: <py>[f()]</py>")]


def test_a_value_that_never_ends_is_given_up() -> None:
    text = f'[f(a="{"x" * (MAX_HELD + 10)}")]'
    assert read(BARE, text, [1000]) == [("text", text)]
    short = f'[f(a="{"x" * (MAX_HELD // 2)}")]'
    assert read(BARE, short, [1000])[0][0] == "f"


def test_a_limit_leaves_the_arguments_that_are_whole() -> None:
    assert read(BARE, '[f(a=1, b="x', [2], cut=True) == [("f", '{"a": 1')]
    assert read(BARE, "[f(a=", [2], cut=True) == [("f", "")]
    assert read(BARE, "[f", [2], cut=True) == []
