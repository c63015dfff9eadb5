"""Objects of JSON schemas: members that are listed, and others where a schema asks for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from servekit.gateway.api.openai.request import schema_grammar
from servekit.gateway.tool_parsing import close_objects

BYTES = LLTokenizer("byte")
TEXT = {"type": "string"}
A, B = ({"type": "object", "properties": {name: TEXT}} for name in "ab")
CLOSED = A | {"additionalProperties": False}


def accepts(schema: dict[str, Any], text: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(schema_grammar(schema).text)
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.validate_tokens(tokens) == len(tokens))


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}], "description": "pydantic's"},
            {"$defs": {"A": CLOSED}, "allOf": [{"$ref": "#/$defs/A"}], "description": "pydantic's"},
        ),
        (
            {"type": "object", "additionalProperties": A},
            {"type": "object", "additionalProperties": CLOSED},
        ),
    ],
)
def test_objects_have_the_members_that_are_listed(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        A | {"additionalProperties": True},
        A | {"additionalProperties": TEXT},
        A | {"patternProperties": {"^x": TEXT}},
        A | {"required": ["a", "b"]},
        A | {"required": [["a"]]},
        A | {"minProperties": 2},
        {"anyOf": [A, {"type": "null"}], "required": ["b"]},
        {"$ref": "#/$defs/A", "$defs": {"A": A}, "minProperties": 2},
        A | {"anyOf": [B, {"required": ["a"]}]},
        A | {"allOf": [B]},
        A | {"$ref": "#/$defs/B", "$defs": {"B": B}},
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {"if": A, "then": B},
        {"not": A},
        {"const": A},
    ],
)
def test_what_asks_for_others_is_left_as_it_is(schema: Any) -> None:
    assert close_objects(schema) is schema


def test_a_model_cannot_go_on_for_ever() -> None:
    assert accepts(A, '{"a": "x"}')
    assert not accepts(A, '{"a": "x", "b": "y"}')
    assert accepts(A | {"additionalProperties": True}, '{"a": "x", "b": "y"}')
    assert not accepts({"type": "array", "items": A}, '[{"b": "y"}]')
    assert accepts(A | {"required": ["b"]}, '{"b": "y"}')
