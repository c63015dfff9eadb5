"""Formats of strings: those that are kept to, and those that say nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from servekit.gateway.api.openai.request import schema_grammar
from servekit.gateway.tool_parsing import parse_tool_choice, tool_grammar, without_unknown_formats
from servekit.gateway.tool_parsing.grammars.schema_formats import FORMATS
from servekit.protocol.messages import Dialect, Grammar

UNKNOWN = ["int32", "password", "path", "uri-reference", "json-pointer", "regex", ""]
BYTES = LLTokenizer("byte")


def error(grammar: Grammar) -> str:
    """What the compiler has against it."""
    if grammar.kind == "lark":
        text = LLMatcher.grammar_from_lark(grammar.text)
    else:
        text = LLMatcher.grammar_from_json_schema(grammar.text)
    return LLMatcher(BYTES, text, log_level=0).get_error()


def of(format: str) -> dict[str, Any]:
    return {"type": "string", "format": format}


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_the_compiler_keeps_to_what_is_said_to_be_kept_to(format: str) -> None:
    grammar = schema_grammar(of(format))
    assert json.loads(grammar.text) == of(format)
    text = LLMatcher.grammar_from_json_schema(grammar.text)
    matcher = LLMatcher(BYTES, text, log_level=0)
    assert not matcher.get_error()
    assert matcher.validate_tokens(BYTES.tokenize_str('"#"')) < 3


@pytest.mark.parametrize("format", UNKNOWN)
def test_any_other_would_be_refused_and_is_an_annotation(format: str) -> None:
    raw = Grammar("json_schema", json.dumps(of(format)))
    assert "Unknown format" in error(raw)
    assert not error(schema_grammar(of(format)))


def test_only_formats_of_schemas_are_annotations() -> None:
    """Not a property of that name, and not what a value is to be."""
    schema = {
        "properties": {
            "format": of("int32") | {"const": {"format": "int32"}, "description": "int32"},
            "when": of("date"),
        },
        "$defs": {"format": {"anyOf": [of("path"), {"items": of("x")}]}},
    }
    bare = {"type": "string"}
    assert without_unknown_formats(schema) == {
        "properties": {
            "format": bare | {"const": {"format": "int32"}, "description": "int32"},
            "when": of("date"),
        },
        "$defs": {"format": {"anyOf": [bare, {"items": bare}]}},
    }
    assert schema["$defs"] == {"format": {"anyOf": [of("path"), {"items": of("x")}]}}
    assert without_unknown_formats(True) is True


def test_the_arguments_of_tools_may_have_any_format() -> None:
    parameters = {"type": "object", "properties": {"n": of("int32")}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = tool_grammar(Dialect("hermes"), parse_tool_choice([tool], "required"))
    assert grammar is not None
    assert not error(grammar)
    assert parameters["properties"] == {"n": of("int32")}, "the template gets it as it came"


def test_a_schema_may_nest_as_deep_as_a_body_is_decoded() -> None:
    schema: dict[str, Any] = of("int32")
    for _ in range(500):
        schema = {"items": schema}
    assert "int32" not in schema_grammar(schema).text
