"""The call formats of each family as grammars: the counterpart of the parsers.

Each writer returns the opening marker ("" for bare calls), and the grammar of everything behind it.
Names precede arguments, and white space follows the models' own templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import msgspec

from servekit.gateway.tool_parsing.gemma import FUNCTION_GEMMA, GEMMA_4, Gemma
from servekit.gateway.tool_parsing.grammars.closed_objects import OPEN
from servekit.gateway.tool_parsing.grammars.lark import SELF, Lark, join_parts, one_of
from servekit.gateway.tool_parsing.pythonic import PYTHON_MARKERS
from servekit.gateway.tool_parsing.tagged_calls import (
    DSML,
    GLM,
    INVOKE,
    QWEN,
    Kinds,
    Tags,
    find_reference,
    list_kinds,
    properties_of,
)
from servekit.gateway.tool_parsing.tool_definitions import Tool
from servekit.protocol.messages import Dialect


class Syntax:
    """The requirements of one grammar: tools, one or many calls, arguments by schema or free."""

    def __init__(
        self, lark: Lark, dialect: Dialect, tools: Sequence[Tool], many: bool, by_schema: bool
    ) -> None:
        self.lark = lark
        self.dialect = dialect
        self.many = many
        self._tools = tools
        self._by_schema = by_schema

    def any_tool(self, write: Callable[[str, dict[str, Any]], str]) -> str:
        """Return a rule for a call of any tool; `write` takes a tool's name and its schema."""
        parts = [write(tool["function"]["name"], self._schema(tool)) for tool in self._tools]
        return self.lark.rule(one_of(parts))

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """Return the schema of a tool's arguments; it allows no others unless it says so."""
        function = tool["function"]
        if not (self._by_schema or function.get("strict")):
            return {"type": "object"}
        schema = {"type": "object", "properties": {}} | (function.get("parameters") or {})
        if OPEN & schema.keys() or _requires_unlisted(schema):
            return schema
        return schema | {"additionalProperties": False}

    def in_json(self, key: str) -> str:
        """Return a rule for {"name": …, key: {…}}."""

        def write_call(name: str, schema: dict[str, Any]) -> str:
            head = f'{{"name": {json.dumps(name)}, "{key}": '
            return f"{self.lark.literal(head)} {self.lark.json(schema)} {self.lark.literal('}')}"

        return self.any_tool(write_call)

    def around(self, before: Sequence[str], behind: Sequence[str]) -> str:
        """Return a rule for a name and JSON between markers; "{}" stands for the name."""

        def write_call(name: str, schema: dict[str, Any]) -> str:
            head = self.lark.literal(*(part.replace("{}", name) for part in before))
            return f"{head} {self.lark.json(schema)} {self.lark.literal(*behind)}".rstrip()

        return self.any_tool(write_call)


Writer = Callable[[Syntax], tuple[str, str]]


# ---------------------------------------------------------------- JSON


def _write_hermes(syntax: Syntax) -> tuple[str, str]:
    lark, begin, end = syntax.lark, "<tool_call>", "</tool_call>"
    call = f"{lark.literal(chr(10))} {syntax.in_json('arguments')} {lark.literal(chr(10), end)}"
    return begin, join_parts(call, lark.literal("\n", begin), syntax.many)


def _write_template(syntax: Syntax) -> tuple[str, str]:
    lark, dialect = syntax.lark, syntax.dialect
    call = syntax.in_json("arguments")
    calls = join_parts(call, lark.literal(", "), syntax.many)
    listed = f"{lark.literal('[')} {calls} {lark.literal(']')}"
    rows = join_parts(call, lark.literal("\n"), syntax.many)
    space = lark.space()
    inner = f"{space} {one_of([listed, rows])}"
    return dialect.tool_begin, (
        f"{inner} {space} {lark.literal(dialect.tool_end)}" if dialect.tool_end else inner
    )


def _write_cohere(syntax: Syntax) -> tuple[str, str]:
    lark = syntax.lark
    begin = lark.literal('{"tool_call_id": "')
    number = f"{begin} {lark.rule('/[0-9]{1,2}/')}"

    def write_call(name: str, schema: dict[str, Any]) -> str:
        head = lark.literal(f'", "tool_name": {json.dumps(name)}, "parameters": ')
        return f"{number} {head} {lark.json(schema)} {lark.literal('}')}"

    space = lark.space()
    calls = join_parts(syntax.any_tool(write_call), f"{lark.literal(',')} {space}", syntax.many)
    end = lark.literal("]", "<|END_ACTION|>")
    return "<|START_ACTION|>", f"{lark.literal('[')} {space} {calls} {space} {end}"


def _write_llama(syntax: Syntax) -> tuple[str, str]:
    # the model was trained for one call per turn, and its template refuses more
    return "", syntax.in_json("parameters")


def _bare_json(syntax: Syntax) -> tuple[str, str]:
    return "", join_parts(syntax.in_json("arguments"), syntax.lark.literal("\n"), syntax.many)


def _write_mistral(syntax: Syntax) -> tuple[str, str]:
    lark, begin = syntax.lark, "[TOOL_CALLS]"
    if "[ARGS]" in dict(syntax.dialect.tokens):
        call = syntax.around(["{}", "[ARGS]"], [])
        return begin, join_parts(call, lark.literal(begin), syntax.many)
    calls = join_parts(syntax.in_json("arguments"), lark.literal(", "), syntax.many)
    return begin, f"{lark.space()} {lark.literal('[')} {calls} {lark.literal(']')}"


# ---------------------------------------------------------------- a name and JSON


def _write_deepseek(syntax: Syntax) -> tuple[str, str]:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    lark = syntax.lark
    v3 = syntax.around([begin, "function", sep, "{}\n```json\n"], ["\n```", end])
    plain = syntax.around([begin, "{}", sep], [end])
    close = lark.literal("<｜tool▁calls▁end｜>")
    rows = f"{join_parts(v3, lark.literal(chr(10)), syntax.many)} {close}"
    return "<｜tool▁calls▁begin｜>", one_of([rows, f"{plain}{'+' if syntax.many else ''} {close}"])


def _write_kimi(syntax: Syntax) -> tuple[str, str]:
    lark = syntax.lark
    number = lark.rule("/[0-9]{1,2}/")

    def write_call(name: str, schema: dict[str, Any]) -> str:
        head = lark.literal("<|tool_call_begin|>", f"functions.{name}:")
        between, end = (
            lark.literal("<|tool_call_argument_begin|>"),
            lark.literal("<|tool_call_end|>"),
        )
        return f"{head} {number} {between} {lark.json(schema)} {end}"

    calls = syntax.any_tool(write_call) + ("+" if syntax.many else "")
    return "<|tool_calls_section_begin|>", f"{calls} {lark.literal('<|tool_calls_section_end|>')}"


def _write_function(syntax: Syntax) -> tuple[str, str]:
    begin = "<function="
    call = syntax.around(["{}>"], ["</function>"])
    return begin, join_parts(call, syntax.lark.literal(begin), syntax.many)


def _write_harmony(syntax: Syntax) -> tuple[str, str]:
    # a call ends the turn
    head = [" to=functions.{} ", "<|constrain|>", "json", "<|message|>"]
    return "<|channel|>", f"{syntax.lark.literal('commentary')} {syntax.around(head, [])}"


# ---------------------------------------------------------------- tags


def _write_tagged(tags: Tags) -> Writer:
    def write_all(syntax: Syntax) -> tuple[str, str]:
        dialect, lark = syntax.dialect, syntax.lark
        begin = dialect.tool_begin or tags.outer_begin
        end = dialect.tool_end if dialect.tool_begin else tags.outer_end
        call = syntax.any_tool(lambda name, schema: _tagged_call(syntax, tags, name, schema))
        line = lark.literal("\n")
        if tags in (INVOKE, DSML):  # one pair of outer tags holds all calls
            calls = f"{line} {call}" + (f" ({line} {call})*" if syntax.many else "")
            return begin, f"{calls} {lark.literal(chr(10), end)}"
        one = f"{line}? {call} {line}? {lark.literal(end)}"
        return begin, join_parts(one, f"{line}? {lark.literal(begin)}", syntax.many)

    return write_all


def _tagged_call(syntax: Syntax, tags: Tags, name: str, schema: Mapping[str, Any]) -> str:
    lark = syntax.lark
    line = lark.literal("\n")
    head = lark.literal(tags.name[0] + name + tags.name[1])
    required = _list_required(schema)
    arguments: list[str] = []
    known: Kinds = {}
    for key, value in properties_of(schema).items():
        kinds = list_kinds(value, schema, known)
        part = f"{line}? {_tagged_argument(lark, tags, key, _with_defs(value, schema), kinds)}"
        arguments.append(part if key in required else f"({part})?")
    if _takes_any(schema):
        begin = f"{line}? {lark.literal(tags.value[0])} " if tags.value[0] else ""
        end = lark.text_through_marker(tags.value[1])
        value = f"{lark.text_through_marker(tags.key[1])} {begin}{end}"
        arguments.append(f"({line}? {lark.literal(tags.key[0])} {value})*")
    tail = f"{line}? {lark.literal(tags.end)}" if tags.end else ""
    return " ".join(part for part in (head, *arguments, tail) if part)


def _tagged_argument(lark: Lark, tags: Tags, key: str, schema: Any, kinds: set[str]) -> str:
    """Return the rule of one argument; unquoted text is free up to the closing tag."""
    line = lark.literal("\n")
    of_text, of_json = tags.kinds
    if tags.value[0]:
        head = (
            f"{lark.literal(tags.key[0], key, tags.key[1])} {line}? {lark.literal(tags.value[0])}"
        )
    else:
        kind = of_text if "text" in kinds else of_json
        head = lark.literal(tags.key[0] + key + kind + tags.key[1])
    if kinds == {"text"} and "enum" in schema:
        written = one_of([lark.literal(value) or '""' for value in schema["enum"]])
    elif "text" in kinds:
        text = f"{head} {lark.text_through_marker(tags.value[1])}"
        if not of_json or kinds == {"text"}:
            return text
        head = lark.literal(tags.key[0] + key + of_json + tags.key[1])
        return one_of([text, f"{head} {lark.json(schema)} {lark.literal(tags.value[1])}"])
    else:
        written = lark.json(schema)
    if of_text:  # what stands between these tags is the value
        line = ""
    space = f"{line}?" if line else ""
    return " ".join(
        part for part in (head, space, written, space, lark.literal(tags.value[1])) if part
    )


def _list_required(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("required")
    return {key for key in found if isinstance(key, str)} if isinstance(found, list) else set()


def _takes_any(schema: Mapping[str, Any]) -> bool:
    """Return whether a tool takes arguments of any name."""
    return "properties" not in schema or _requires_unlisted(schema)


def _requires_unlisted(schema: Mapping[str, Any]) -> bool:
    return not _list_required(schema) <= properties_of(schema).keys()


def _with_defs(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a part of a schema with the root's definitions, if it may reference them."""
    if not isinstance(schema, dict) or b'"$ref"' not in msgspec.json.encode(schema):
        return schema
    return schema | {key: root[key] for key in ("$defs", "definitions") if key in root}


# ---------------------------------------------------------------- Python


def _write_pythonic(syntax: Syntax) -> tuple[str, str]:
    lark, dialect = syntax.lark, syntax.dialect
    call = syntax.any_tool(lambda name, schema: _python_call(lark, name, schema))
    calls = join_parts(call, lark.literal(", "), syntax.many)
    calls = f"{lark.literal('[')} {calls} {lark.literal(']')}"
    known = dict(dialect.tokens)
    own = [pair for pair in PYTHON_MARKERS.items() if pair[0] in known]
    begin, end = (
        (dialect.tool_begin, dialect.tool_end) if dialect.tool_begin else (*own, ("", ""))[0]
    )
    return begin, f"{calls} {lark.literal(end)}".rstrip()


def _python_call(lark: Lark, name: str, schema: Mapping[str, Any]) -> str:
    """Return the rule of f(a=1, b="x"), with the arguments in the order of the schema."""
    if _takes_any(schema):
        part = f"{lark.rule('/[A-Za-z_][A-Za-z0-9_]{0,63}=/')} {lark.json({})}"
        inner = f"({join_parts(part, lark.literal(', '), many=True)})?"
        return f"{lark.literal(f'{name}(')} {inner} {lark.literal(')')}"
    parts = {
        key: f"{lark.literal(f'{key}=')} {lark.json(_with_defs(v, schema))}"
        for key, v in properties_of(schema).items()
    }
    inner = _in_order(lark, parts, _list_required(schema), ", ")
    return " ".join(p for p in (lark.literal(f"{name}("), inner, lark.literal(")")) if p)


def _in_order(
    lark: Lark, members: Mapping[str, str], required: Container[str], separator: str
) -> str:
    """Return the expression for members in their order, those not required optional."""
    parts = list(members.values())
    needed = [key in required for key in members]
    comma, tails = lark.literal(separator), [""]
    for part, must in zip(reversed(parts), reversed(needed), strict=True):
        own = f"{comma} {part}" if must else f"({comma} {part})?"
        tails.insert(0, lark.rule(f"{own} {tails[0]}".rstrip()))
    first = [f"{part} {tails[at + 1]}".rstrip() for at, part in enumerate(parts)]
    stop = needed.index(True) + 1 if True in needed else len(first)
    begins = one_of(first[:stop]) if first else ""
    return f"({begins})?" if begins and True not in needed else begins


# ---------------------------------------------------------------- Gemma

#: The depth to which a schema of Gemma's arguments is followed; deeper values are free.
_MAX_DEPTH = 32
_GEMMA_KEY = r"/[^\s:,{}\[\]\"<>|]{1,100}:/"


def _write_gemma(gemma: Gemma) -> Writer:
    def write_all(syntax: Syntax) -> tuple[str, str]:
        lark = syntax.lark

        def write_call(name: str, schema: dict[str, Any]) -> str:
            value = _GemmaValues(lark, gemma, schema).write(schema, _MAX_DEPTH)
            return f"{lark.literal(f'call:{name}')} {value} {lark.literal(gemma.end)}"

        calls = join_parts(syntax.any_tool(write_call), lark.literal(gemma.begin), syntax.many)
        return gemma.begin, calls

    return write_all


class _GemmaValues:
    """Writes the rules of values by a schema; text is free up to its closing quote."""

    def __init__(self, lark: Lark, gemma: Gemma, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._gemma = gemma
        self._root = root
        self._text = f"{lark.literal(gemma.quote)} {lark.text_through_marker(gemma.quote)}"
        self._known: dict[str, str] = {}  # rules by reference, so that each is followed once

    def write(self, schema: Any, depth: int) -> str:
        """Return the expression for a value."""
        if not isinstance(schema, dict) or not depth:
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._follow(reference, depth)
        if list_kinds(schema, self._root, {}) == {"text"}:
            return self._write_text(schema)
        lark = self._lark
        match schema.get("type"):
            case "object":
                inner = self._write_members(schema, depth)
                return f"{lark.literal('{')} {inner} {lark.literal('}')}"
            case "array":
                item = lark.rule(self.write(schema.get("items"), depth - 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "integer" | "number" | "boolean" | "null":
                return lark.json(_with_defs(schema, self._root))
        return self._any()

    def _follow(self, reference: str, depth: int) -> str:
        if reference not in self._known:
            self._known[reference] = self._any()  # within itself
            target = find_reference(reference, self._root)
            self._known[reference] = self._lark.rule(self.write(target, depth - 1))
        return self._known[reference]

    def _write_text(self, schema: Mapping[str, Any]) -> str:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if not values:
            return self._text
        quote = self._gemma.quote
        return one_of([self._lark.literal(quote, value, quote) for value in values])

    def _write_members(self, schema: Mapping[str, Any], depth: int) -> str:
        lark, quote = self._lark, self._gemma.quote
        if _takes_any(schema):
            part = f"{lark.rule(_GEMMA_KEY)} {self._any()}"
            return f"({join_parts(part, lark.literal(','), many=True)})?"
        members: dict[str, str] = {}
        for key, value in sorted(properties_of(schema).items()):  # as the template sorts them
            around = "" if re.fullmatch(r"[\w.-]+", key) else quote
            head = lark.literal(around, key, around, ":")
            members[key] = f"{head} {self.write(value, depth - 1)}"
        return lark.rule(_in_order(lark, members, _list_required(schema), ",") or '""')

    def _any(self) -> str:
        word = self._lark.json({"type": ["number", "boolean", "null"]})
        key = self._lark.rule(_GEMMA_KEY)
        items = f'"[" ({SELF} ("," {SELF})*)? "]"'
        members = f'"{{" ({key} {SELF} ("," {key} {SELF})*)? "}}"'
        return self._lark.rule(one_of([self._text, word, items, members]))


#: The writers by `Dialect.tools`.
WRITERS: dict[str, Writer] = {
    "hermes": _write_hermes,
    "template": _write_template,
    "llama3_json": _write_llama,
    "json": _bare_json,
    "mistral": _write_mistral,
    "deepseek": _write_deepseek,
    "kimi_k2": _write_kimi,
    "function": _write_function,
    "harmony": _write_harmony,
    "qwen3_coder": _write_tagged(QWEN),
    "invoke": _write_tagged(INVOKE),
    "dsml": _write_tagged(DSML),
    "glm": _write_tagged(GLM),
    "cohere": _write_cohere,
    "gemma": _write_gemma(GEMMA_4),
    "function_gemma": _write_gemma(FUNCTION_GEMMA),
    "pythonic": _write_pythonic,
}
