"""YAML as the file has it: what plain words mean, where things stand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from servekit.config.yaml.loader import MAX_DEPTH, MAX_NODES, parse_document
from servekit.config.yaml.nodes import DocumentError, Mark, Node, plain_value


def value_of(text: str) -> Any:
    return plain_value(parse_document(f"key: {text}\n"))["key"]  # type: ignore[call-overload, index]


def refusal(text: str) -> tuple[Mark | None, str]:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    return caught.value.mark, str(caught.value)


# ---------------------------------------------------------------- plain words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("On", True),
        ("TRUE", True),
        ("no", False),
        ("Off", False),
        ("false", False),
        ("y", "y"),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("1_000", 1000),
        ("12_345_678", 12345678),
        ("1_00", "1_00"),
        ("0x10", 16),
        ("0xfF", 255),
        ("-0x10", "-0x10"),
        ("0o17", "0o17"),
        ("007", "007"),
        ("-012", "-012"),
        ("1:30", "1:30"),
        ("2026-11-24", "2026-11-24"),
        ("1.5", 1.5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e3", -1500.0),
        ("1e-3", 0.001),
        ("01.5", 1.5),
        ("1e99999", "1e99999"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("9223372036854775807", 2**63 - 1),
        ("-9_223_372_036_854_775_808", float(-(2**63))),
        ("0x8000000000000000", float(2**63)),
        ("1" * 41, float("1" * 41)),
        ("1" * 42, float("1" * 42)),
        ("'12'", "12"),
        ('"yes"', "yes"),
        ("'~'", "~"),
        ("! 12", "12"),
        ("!!str 12", "12"),
        ("a b", "a b"),
    ],
)
def test_a_plain_word_means_what_it_looks_like(text: str, value: object) -> None:
    found = value_of(text)
    assert found == value and type(found) is type(value)


def test_what_is_no_number_is_one_for_a_computer() -> None:
    assert math.isnan(value_of(".nan"))


@pytest.mark.parametrize("text", ["", "~", "null", "NULL"])
def test_nothing_counts_as_not_written(text: str) -> None:
    root = parse_document(f"key: {text}\nother: 1\n")
    assert plain_value(root) == {"other": 1}


def test_a_key_is_always_text() -> None:
    root = parse_document("{NO: 1, 12: 2, 1.5: 3, null: 4}")
    assert isinstance(root.value, dict)
    assert list(root.value) == ["NO", "12", "1.5", "null"]


# ---------------------------------------------------------------- places


def test_each_value_and_key_has_its_place_and_its_words() -> None:
    root = parse_document("a: 0x10\nlist:\n  - x\n  - {b: yes}\n")
    assert isinstance(root.value, dict)
    assert (root.keys["list"], root.value["a"].mark) == (Mark(2, 1), Mark(1, 4))
    assert root.value["a"].text == "0x10"
    items = root.value["list"].value
    assert isinstance(items, list)
    assert [one.mark for one in items] == [Mark(3, 5), Mark(4, 5)]
    assert items[1].keys == {"b": Mark(4, 6)}
    assert (root.value["list"].size, root.size) == (4, 6)


def test_an_alias_stands_where_it_is_written_with_all_that_it_means() -> None:
    root = parse_document("a: &x {b: 0x10}\nc: *x\n")
    assert isinstance(root.value, dict)
    first, second = root.value["a"], root.value["c"]
    assert (first.mark, second.mark) == (Mark(1, 4), Mark(2, 4))
    assert second.value is first.value and second.keys == first.keys
    assert (second.size, root.size) == (2, 5)


# ---------------------------------------------------------------- merges


def test_a_merge_fills_up_what_is_not_written() -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz: {b: 9, <<: [*x, *y]}\nw: {<<: *x, <<: *y}\n"
    found = plain_value(parse_document(text))
    assert isinstance(found, dict)
    assert found["z"] == {"a": 1, "b": 9, "c": 4}
    assert found["w"] == {"a": 1, "b": 2, "c": 4}


def test_what_is_merged_has_the_place_of_its_source() -> None:
    root = parse_document("x: &x {a: 1}\nz:\n  <<: *x\n")
    merged = root.value["z"]  # type: ignore[call-overload, index]
    assert isinstance(merged, Node) and merged.keys == {"a": Mark(1, 8)}


@pytest.mark.parametrize(("what", "column"), [("5", 5), ("[1]", 6), ("text", 5)])
def test_only_a_mapping_can_be_merged(what: str, column: int) -> None:
    mark, said = refusal(f"<<: {what}\n")
    assert (mark, said) == (Mark(1, column), "`<<` merges a mapping, such as *name.")


# ---------------------------------------------------------------- limits


def test_a_file_may_be_nested_so_deep_and_no_deeper() -> None:
    deep = MAX_DEPTH - 1  # below the mapping and its key
    parse_document("a: " + "[" * deep + "1" + "]" * deep)
    mark, said = refusal("a: " + "[" * (deep + 1) + "1" + "]" * (deep + 1))
    assert said == f"nested more than {MAX_DEPTH} deep." and mark is not None


def test_a_file_may_have_so_many_values_and_no_more() -> None:
    for count in (MAX_NODES - 2, MAX_NODES - 1):
        text = "a: [" + "1," * count + "]"
        if count == MAX_NODES - 2:
            assert parse_document(text).size == MAX_NODES
        else:
            assert refusal(text)[1] == f"more than {MAX_NODES} values, aliases expanded."


# ---------------------------------------------------------------- syntax


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("a: 1\nb:2\n", (2, 1), "a blank is missing after the colon: write `b: 2`."),
        (
            "a:\n  b: 1\n  c:d/e\n  f: 2\n",
            (3, 3),
            "a blank is missing after the colon: write `c: d/",
        ),
        (
            "a: 1\nurl:http://b\nc: 2\n",
            (3, 1),
            "there is no ':' after this key. It began on line 2.",
        ),
        ("a: 1\nb c\nd: 2\n", (3, 1), "there is no ':' after this key. It began on line 2."),
        ("- name:a\n  path: b\n", (1, 3), "a blank is missing after the colon: write `name: a`."),
        ("a: b: c\n", (1, 5), "': ' is not allowed here; the indentation is off, or a text that"),
        ("a: [1\nb: 2\n", (2, 2), "a ',' or the closing bracket is missing. It began on line 1."),
        ("a: 'b\n", (2, 1), "a quote or bracket is never closed. It began on line 1."),
        ("a:\n\t- b\n", (2, 1), "a tab is used for indentation; YAML wants spaces."),
        ("a: %b\n", (1, 4), "a text that begins with % needs quotes."),
        ("a: `b`\n", (1, 4), "a text that begins with ` needs quotes."),
        ("a: *\n", (1, 5), "a text that begins with * or & needs quotes."),
        ("a: !x!y 1\n", (1, 4), "a text that begins with ! needs quotes."),
        (
            'a: "\\q"\n',
            (1, 5),
            "unknown escape in a double-quoted text; write \\\\ for a backslash",
        ),
        ("a: !!binary x\n", (1, 4), "the tag !!binary is not supported."),
        ("a: 1\n---\nb: 2\n", (2, 1), "a second document begins here; a file holds one."),
    ],
)
def test_a_mistake_is_told_with_its_place_and_its_remedy(
    text: str, place: tuple[int, int], said: str
) -> None:
    mark, found = refusal(text)
    assert (mark, found[: len(said)]) == (Mark(*place), said)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~\n"])
def test_a_file_without_a_value_is_empty(text: str) -> None:
    assert refusal(text) == (None, "the file is empty.")
