"""Schemas and answers, judged: truly, in time, and without asking anybody else."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.ui.widgets.schema_check import (
    check_schema,
    json_of,
    judge_answer,
    problem_of,
    without_patterns,
)

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "size": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"city": "Paris", "size": 2}', ""),
        ('{"city": 3}', "at ['city']: 3 is not of type 'string'"),
        ('{"size": 2}', "'city' is a required property"),
        ('{"city": "x", "more": 1}', "Additional properties are not allowed"),
        ('{"city": "Par', "it is not JSON: Unterminated string"),
        ("", "it is not JSON: Expecting value"),
        ("[" * 100_000, "it is not JSON: "),
        ("NaN", "it is not JSON: NaN"),
    ],
)  # fmt: skip
def test_answers(text: str, problem: str) -> None:
    assert judge_answer(CITY, text).startswith(problem)
    assert bool(judge_answer(CITY, text)) == bool(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the schema is not valid JSON: Expecting property name"),
        ("[1]", "the schema: expected a JSON object"),
        ('{"type": "objekt"}', "the schema is not a JSON schema: at ['type']"),
        ('{"minimum": "x"}', "the schema is not a JSON schema: at ['minimum']"),
        ("x" * 70_000, "the schema: at most 64,000 characters"),
        ("[" * 60_000, "the schema"),
        ('{"description": "\\ud83d"}', "the schema is nested too deeply, or has numbers or char"),
        ('{"maximum": NaN}', "the schema is nested too deeply, or has numbers or characters"),
    ],
)
def test_schemas_that_are_none(text: str, message: str) -> None:
    with pytest.raises(RequestError) as told:
        check_schema(json_of(text, "the schema"), "the schema")
    assert told.value.message.startswith(message)


def doubling(depth: int) -> dict[str, Any]:
    """A schema whose references double at each step: 2 ** depth looks."""
    steps = {f"s{at}": {"allOf": [{"$ref": f"#/$defs/s{at + 1}"}] * 2} for at in range(depth)}
    return {"$defs": {**steps, f"s{depth}": {"type": "string"}}, "$ref": "#/$defs/s0"}


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"multipleOf": 0.1}, "1" + "0" * 400, "it cannot be checked"),
        ({"type": "object", "$ref": "#/type"}, "{}", "it cannot be checked"),
        ({"type": "object", "$ref": "#/type/x"}, "{}", "it cannot be checked"),
        ({"$ref": "#nowhere"}, "{}", "the reference 'nowhere' has no target"),
    ],
)
def test_what_cannot_be_checked_is_a_sentence(
    schema: dict[str, Any], text: str, problem: str
) -> None:
    assert check_schema(schema, "the schema") == schema
    assert judge_answer(schema, text).startswith(problem)


def test_a_schema_cannot_take_for_ever() -> None:
    began = time.monotonic()
    assert problem_of(doubling(4), "x") == ""
    assert "steps" in problem_of(doubling(60), "x")
    slow = {"type": "string", "pattern": "^(a+)+$"}
    assert problem_of(slow, "a" * 60 + "!") == ""  # its pattern is not looked at
    keyed = {"patternProperties": {"^(a+)+$": False}, "additionalProperties": False}
    assert problem_of(keyed, {"a" * 60 + "!": 1}) == ""
    assert time.monotonic() - began < 20  # seconds, where it would be centuries


def test_references_lead_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where: asked.append(where))
    assert "has no target" in problem_of({"$ref": "http://192.0.2.1/schema.json"}, 1)
    assert "has no target" in problem_of({"$ref": "file:///etc/passwd"}, 1)
    assert "circular" in problem_of({"$ref": "#"}, 1)
    assert asked == []


def test_only_patterns_are_left_out() -> None:
    schema = {
        "properties": {"pattern": {"type": "string", "pattern": "x"}},
        "const": {"pattern": {"kept": 1}},
        "enum": ["pattern"],
    }
    assert without_patterns(schema) == {
        "properties": {"pattern": {"type": "string"}},
        "const": {"pattern": {"kept": 1}},
        "enum": ["pattern"],
    }


def test_examples_and_tools() -> None:
    from servekit.gateway.ui.pages import structured  # it imports gradio, for seconds

    assert check_schema(json_of(structured.EXAMPLE_SCHEMA, "it"), "it")["type"] == "object"
    options = structured.make_tools_request("m", "hi", structured.EXAMPLE_TOOLS, "auto", None)
    assert options.body["tools"][0]["function"]["name"] == "get_weather"
    assert "max_tokens" not in options.body
    for bad in ("{}", "[1]", '[{"function": {}}]', '[{"type": "function"}]'):
        with pytest.raises(RequestError):
            structured.schemas_of(json_of(bad, "the tools"))
    with pytest.raises(RequestError, match="parameters of 'f'"):
        structured.make_tools_request(
            "m", "", '[{"function": {"name": "f", "parameters": {"type": 3}}}]', "auto", 5
        )
