"""Which arguments are text by the schemas of tools: those whose values are not read as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.gateway.tool_parsing.tagged_calls import list_kinds, properties_of, text_arguments
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import all_cuts_agree

TEXT, OTHER = {"text"}, {"other"}
BOTH = TEXT | OTHER
ROOT = {
    "$defs": {
        "name": {"type": "string"},
        "a/b": {"type": "integer"},
        "c~d": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "far": {"$ref": "#/$defs/name"},
    },
    "list": [{"type": "string"}],
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, TEXT),
        ({"type": "integer"}, OTHER),
        ({"type": ["string"]}, TEXT),
        ({"type": ["string", "null"]}, BOTH),
        ({"enum": ["a", "b"]}, TEXT),
        ({"enum": [1, None]}, OTHER),
        ({"enum": ["a", 1], "type": "string"}, BOTH),
        ({"enum": []}, BOTH),
        ({"enum": "malformed"}, BOTH),
        ({"const": "a"}, TEXT),
        ({"const": None}, OTHER),
        ({"$ref": "#/$defs/name"}, TEXT),
        ({"$ref": "#/$defs/far"}, TEXT),
        ({"$ref": "#/$defs/a~1b"}, OTHER),
        ({"$ref": "#/$defs/c~0d"}, TEXT),
        ({"$ref": "#/$defs/none"}, BOTH),
        ({"$ref": "#/list/0"}, BOTH),
        ({"$ref": "https://example.com/schema"}, BOTH),
        ({"$ref": 3}, BOTH),
        ({"$ref": "#/$defs/loop"}, BOTH),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, TEXT),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, BOTH),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, OTHER),
        ({"anyOf": []}, BOTH),
        ({"anyOf": [], "oneOf": [{"type": "string"}]}, TEXT),
        ({"anyOf": "malformed"}, BOTH),
        ({}, BOTH),
        (True, BOTH),
        (None, BOTH),
    ],
)
def test_the_kinds_of_values_that_a_schema_allows(schema: Any, kinds: set[str]) -> None:
    assert list_kinds(schema, ROOT, {}) == kinds


def test_references_are_followed_to_a_depth() -> None:
    def chain(length: int) -> dict[str, Any]:
        defs: dict[str, Any] = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(length)}
        return {"$defs": defs | {str(length): {"type": "string"}}}

    assert list_kinds({"$ref": "#/$defs/0"}, chain(7), {}) == TEXT
    assert list_kinds({"$ref": "#/$defs/0"}, chain(8), {}) == BOTH


def test_references_to_each_other_are_followed_once() -> None:
    """Else a thousand of them, twenty kilobytes, would take longer than anybody lives."""
    again = [{"$ref": "#/$defs/a"}] * 1000
    root = {"$defs": {"a": {"anyOf": again}, "b": {"anyOf": [{"type": "string"}, *again]}}}
    assert list_kinds({"$ref": "#/$defs/a"}, root, {}) == BOTH
    assert list_kinds({"$ref": "#/$defs/b"}, root, {}) == BOTH


def tool(name: str, properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_arguments_that_are_always_text_by_tool() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}
    bare = {"type": "function", "function": {"name": "g"}}
    assert text_arguments([tool("f", properties), bare, tool("h", None)]) == {
        "f": frozenset("a"),
        "g": frozenset(),
        "h": frozenset(),
    }
    assert text_arguments([]) == {}
    assert properties_of({"properties": []}) == properties_of({}) == {}


QWEN = Dialect("qwen3_coder")


def called(*arguments: tuple[str, str]) -> Any:
    """What is read of a call of a tool that is not known."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    [(name, written)] = all_cuts_agree(QWEN, text)
    assert name == "f"
    return written


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("3", "3"),
        ("[1, 2]", "[1, 2]"),
        ("True", "true"),
        ("False", "false"),
        ("None", "null"),
        ("{'a': [1, True, None], 'b': 'it'}", '{"a": [1, true, null], "b": "it"}'),
        ("['x', \"y's\"]", '["x", "y\'s"]'),
        ("[x]", '"[x]"'),
        ("{1, 2}", '"{1, 2}"'),
        ("Truely", '"Truely"'),
        ("a text", '"a text"'),
        ('"quoted"', '"\\"quoted\\""'),
        ("", '""'),
    ],
)
def test_a_value_that_may_be_anything_is_json_if_it_can_be(value: str, written: str) -> None:
    assert called(("a", value)) == f'{{"a": {written}}}'


def test_several_arguments_and_none_are_one_object() -> None:
    assert called(("a", "1"), ("b", "x")) == '{"a": 1, "b": "x"}'
    assert called() == "{}"
