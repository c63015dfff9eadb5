"""Where a JSON value ends, in whatever pieces it comes, and what is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.gateway.tool_parsing.json_text import (
    JsonReader,
    is_encodable,
    is_json,
    is_strict_json,
    written_as_json,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


def read(text: str, size: int = 10**6) -> tuple[int, bool, bool]:
    """Return where the value in `text` ends, read in pieces, and whether it is done or broken."""
    reader, end = JsonReader(), 0
    for at in range(0, len(text), size):
        piece = text[at : at + size]
        end = at + reader.scan(piece, 0)
        if reader.done or reader.broken:
            break
        assert end == at + len(piece), "it reads as far as it can"
    return end, reader.done, reader.broken


@given(VALUES, st.sampled_from([None, 2]), st.sampled_from([1, 2, 3, 100]))
def test_a_value_ends_where_it_ends_however_it_comes(
    value: Any, indent: int | None, size: int
) -> None:
    text = json.dumps(value, indent=indent)
    assert read(f"{text} rest", size) == (len(text), True, False)
    assert is_json(text) and is_strict_json(text)


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", '""', "0", "-0", "-1.5e+10", "1E5", "true", "false", "null"),
        *(' {"a" : [ 1 , { } ] } ', "[[],{}]", '"\\""', '"\\\\"', '{"a":{"b":[]}}'),
    ],
)
def test_each_kind_of_value_is_read(text: str) -> None:
    assert is_json(text.rstrip())
    for size in (1, 2, 100):
        assert read(f"{text};", size)[1:] == (True, False)


@pytest.mark.parametrize(
    "text",
    [
        *("{a}", "{1:2}", '{"a"}', '{"a":}', '{"a":1,}', "{,}", '{"a":1]', "[1}", "[1,]", "[,]"),
        *("[1 2]", "]", "}", ":", "'a'", "nul", "truex", "01", "1.", ".5", "+1", "--1", "1e", "-"),
        *("[1:2]", '{"a",1}', '{"a" 1}', "[tru]", "NaN", "Infinity"),
    ],
)
def test_what_is_no_json_breaks(text: str) -> None:
    for size in (1, 100):
        end, done, broken = read(f"{text};", size)
        assert (done, broken) == (False, True)
        assert end <= len(text)
    assert not is_json(text)


@pytest.mark.parametrize(
    "text", ["", " ", "{", '{"a', '{"a"', '{"a":', '{"a":1', "[", "[1,", '"a', '"a\\']
)
def test_half_a_value_is_neither_done_nor_broken(text: str) -> None:
    for size in (1, 100):
        assert read(text, size) == (len(text), False, False)
    assert not is_json(text)


def test_a_number_may_go_on_until_something_else_follows() -> None:
    reader = JsonReader()
    assert (reader.scan("12", 0), reader.done) == (2, False)
    assert (reader.scan("3", 0), reader.done) == (1, False)
    assert (reader.scan("] ", 0), reader.done) == (0, True)


def test_nothing_is_read_behind_the_end() -> None:
    reader = JsonReader()
    assert reader.scan("{}{}", 0) == 2
    assert reader.scan("{}{}", 2) == 2
    assert not is_json("{}{}") and not is_json("1 2")


def test_a_string_that_only_a_strict_parser_refuses_is_taken() -> None:
    """There is no doubt about where it ends."""
    for text in ('"a\nb"', r'"\q"'):
        assert is_json(text) and not is_strict_json(text)


def test_a_constant_that_json_lacks_is_not_strict() -> None:
    assert not any(map(is_strict_json, ["NaN", "[Infinity]", "-Infinity", "{", "[" * 99_999]))


def test_a_value_is_written_in_its_own_letters() -> None:
    assert written_as_json({"ä": ["ö", 1, None]}) == '{"ä": ["ö", 1, null]}'


def test_half_a_character_stays_escaped_because_nothing_can_carry_it() -> None:
    assert written_as_json(["\ud800", "ä"]) == '["\\ud800", "\\u00e4"]'
    assert not is_encodable("\ud800") and is_encodable("ä😀")


@pytest.mark.parametrize("value", [math.nan, [math.inf], {1j}, b"x", {"a": {1, 2}}])
def test_a_value_that_json_lacks_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        written_as_json(value)
