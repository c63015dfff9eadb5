"""The grammar that makes a model call tools, in the syntax of its family.

A grammar is needed if the request demands a call ("required", a named function), or if a tool is
`strict`: then text stays free, and a call, once begun, has to fit the schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from servekit.errors import Unsupported
from servekit.gateway.tool_parsing.grammars.grammar_templates import WRITERS, Syntax
from servekit.gateway.tool_parsing.grammars.lark import (
    JSON_SPACE,
    Lark,
    harmony_thoughts,
    one_of,
    write_thoughts,
)
from servekit.gateway.tool_parsing.tool_definitions import Tool, ToolChoice
from servekit.protocol.messages import Dialect, Grammar

_TEXT = "/(?s:.*)/"
#: The first character of calls without a marker; text must not begin with it.
_BARE = {"llama3_json": "{", "json": "{", "pythonic": "["}


def tool_grammar(
    dialect: Dialect,
    choice: ToolChoice,
    *,
    parallel: bool = True,
    begun: bool = False,
    answer: Grammar | None = None,
) -> Grammar | None:
    """Return the grammar for one answer; None if the answer is unconstrained.

    With `parallel`, an answer may hold several calls. `begun` says whether the prompt has begun the
    reasoning; see `begins_thinking`. Raises Unsupported for a dialect without a known call format.
    """
    required = choice.mode == "required"
    strict = any(tool["function"].get("strict") for tool in choice.tools)
    if choice.mode == "none" or not (required or strict or answer):
        return None
    if dialect.tools not in WRITERS:
        raise Unsupported(
            "it is not known how this model writes tool calls, so they can't be made to fit",
            param="tool_choice" if required else "tools",
        )
    lark = Lark(dialect)
    many = parallel and not choice.once
    if answer is not None and _BARE.get(dialect.tools) == "{":
        arguments = "arguments" if dialect.tools == "json" else "parameters"
        schema = _call_or_answer(choice.tools, json.loads(answer.text), arguments)
        whole = f"{write_thoughts(lark, dialect, begun)} {lark.json(schema, JSON_SPACE)}"
        return lark.grammar(whole, param="tools")
    by_schema = required or answer is not None
    opening, calls = WRITERS[dialect.tools](Syntax(lark, dialect, choice.tools, many, by_schema))
    written = f"{lark.literal(opening)} {calls}"
    if dialect.tools == "harmony":
        told = lark.rule(_TEXT) if answer is None else _write_answer(lark, answer)
        final = f"{lark.literal('<|channel|>', 'final', '<|message|>')} {told}"
        whole = written if required else one_of([written, final])
        return lark.grammar(f"{harmony_thoughts(lark)} {whole}", param="tools")
    if required:
        whole = written
    elif answer is not None:  # either a call or an answer that fits the schema, and no other text
        whole = one_of([written, _write_answer(lark, answer)])
    else:
        whole = _in_text(lark, dialect, opening, calls)
    return lark.grammar(f"{write_thoughts(lark, dialect, begun)} {whole}", param="tools")


def _call_or_answer(tools: Sequence[Tool], answer: Any, arguments: str) -> dict[str, Any]:
    """Return one schema for bare JSON calls and answers, which a lexer cannot tell apart early."""
    parts = {"answer": answer}
    branches: list[dict[str, Any]] = [{"$ref": "#/$defs/answer"}]
    for at, tool in enumerate(tools):
        function = tool["function"]
        parts[f"tool{at}"] = function.get("parameters") or {"type": "object"}
        properties = {
            "name": {"const": function["name"]},
            arguments: {"$ref": f"#/$defs/tool{at}"},
        }
        branches.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    defs = {name: _move_references(schema, f"#/$defs/{name}") for name, schema in parts.items()}
    return {"anyOf": branches, "$defs": defs}


def _move_references(schema: Any, to: str) -> Any:
    """Return a schema whose references to itself are adjusted to its new place `to`."""
    if isinstance(schema, list):
        return [_move_references(inner, to) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _move_references(value, to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def _write_answer(lark: Lark, answer: Grammar) -> str:
    return lark.json(json.loads(answer.text), JSON_SPACE)


def _in_text(lark: Lark, dialect: Dialect, opening: str, calls: str) -> str:
    """Return the expression for text, with calls at its end: an opened call has to be completed."""
    if not opening:
        text = lark.rule(rf"/\s{{0,8}}[^\s\{_BARE[dialect.tools]}](?s:.*)/")
        return f"{one_of([calls, text])}?"
    return one_of([lark.rule(_TEXT), f"{lark.text_through_marker(opening)} {calls}"])
