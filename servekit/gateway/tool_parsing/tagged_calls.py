"""Calls written in tags, each argument between tags of its own, with an unquoted value.

Only the tool's schema says whether a value is text or a number. Where the schema allows both, a
value that parses as JSON is JSON, and any other is text. Text is streamed; other values arrive
whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.json_calls import read_close, skip_marker
from servekit.gateway.tool_parsing.json_text import is_json, python_as_json
from servekit.gateway.tool_parsing.tool_call_parser import Calls, Family

#: By tool, the arguments that are always text.
TextArguments = Mapping[str, frozenset[str]]
#: By reference within a schema, the kinds of values that its target allows.
Kinds = dict[str, set[str]]
#: The greatest depth to which references in a schema are followed.
_MAX_DEPTH = 8
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Tags(NamedTuple):
    """The tags of a family around calls, names, keys and values."""

    outer_begin: str
    outer_end: str
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str  # the end of a call; "" if the outer tag ends it
    #: What stands behind a key of text and of JSON, where the model says which it is.
    kinds: tuple[str, str] = ("", "")


QWEN = Tags(
    "<tool_call>",
    "</tool_call>",
    ("<function=", ">"),
    ("<parameter=", ">"),
    ("", "</parameter>"),
    "</function>",
)
INVOKE = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    ('<invoke name="', '">'),
    ('<parameter name="', '">'),
    ("", "</parameter>"),
    "</invoke>",
)
DSML = Tags(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    ('<｜DSML｜invoke name="', '">'),
    ('<｜DSML｜parameter name="', '">'),
    ("", "</｜DSML｜parameter>"),
    "</｜DSML｜invoke>",
    ('" string="true', '" string="false'),
)
GLM = Tags(
    "<tool_call>",
    "</tool_call>",
    ("", ""),
    ("<arg_key>", "</arg_key>"),
    ("<arg_value>", "</arg_value>"),
    "",
)


def make_tagged(tags: Tags, begin: str, end: str, texts: TextArguments) -> Family:
    """Return the family of `tags`, with the template's outer markers if it has any."""
    if begin:
        tags = tags._replace(outer_begin=begin, outer_end=end)
    openings = (tags.outer_begin, tags.name[0]) if tags.name[0] else (tags.outer_begin,)
    return Family(openings, partial(_read_calls, tags=tags, texts=texts))


def text_arguments(tools: Sequence[Mapping[str, Any]]) -> TextArguments:
    """Return the arguments of each tool that are always text by the tool's schema."""
    found: dict[str, frozenset[str]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        root = function.get("parameters") or {}
        properties = properties_of(root)
        known: Kinds = {}
        found[function.get("name", "")] = frozenset(
            key for key, schema in properties.items() if list_kinds(schema, root, known) == {"text"}
        )
    return found


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a schema; the schema's compiler reports malformed ones."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def list_kinds(schema: Any, root: Mapping[str, Any], known: Kinds, depth: int = 0) -> set[str]:
    """Return the kinds of values that a schema allows: "text", "other" or both.

    `root` is the schema that contains `schema`, for references. `known` has the kinds of those that
    were followed before, so that each is followed once: they may lead to each other.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {"text", "other"}
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        texts = {isinstance(value, str) for value in values} if isinstance(values, list) else set()
        return {"text" if text else "other" for text in texts} or {"text", "other"}
    if stated := schema.get("type"):
        named = stated if isinstance(stated, list) else [stated]
        return {"text" if kind == "string" else "other" for kind in named}
    if "$ref" in schema:
        return _follow(schema["$ref"], root, known, depth)
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list) and schema[several]:
            return set().union(
                *(list_kinds(one, root, known, depth + 1) for one in schema[several])
            )
    return {"text", "other"}


def _follow(reference: Any, root: Mapping[str, Any], known: Kinds, depth: int) -> set[str]:
    """Return the kinds of the target of a reference; both while that is being followed."""
    if not isinstance(reference, str):
        return {"text", "other"}
    if reference not in known:
        known[reference] = {"text", "other"}
        target = find_reference(reference, root)
        known[reference] = list_kinds(target, root, known, depth + 1)
    return known[reference]


def find_reference(reference: str, root: Any) -> Any:
    """Return the target of a reference within the schema; None for other references."""
    if not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        root = (
            root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
        )
    return root


def _read_calls(
    scanner: IncrementalScanner, calls: Calls, *, tags: Tags, texts: TextArguments
) -> Script[None]:
    outer = yield from scanner.take_marker(
        tags.outer_begin
    )  # Qwen models forget it; the name's tag suffices
    while True:
        yield from scanner.skip_space()
        yield from _read_call(scanner, calls, tags, texts)
        scanner.mark()
        yield from scanner.skip_space()
        another = bool(tags.end) and (yield from scanner.take_marker(tags.name[0]))
        scanner.rewind()
        if not another:
            break
        scanner.mark()
    if outer:
        yield from read_close(scanner, tags.outer_end)
    else:
        yield from skip_marker(scanner, tags.outer_end)


def _read_call(
    scanner: IncrementalScanner, calls: Calls, tags: Tags, texts: TextArguments
) -> Script[None]:
    if tags.name[0]:
        yield from scanner.expect(tags.name[0])
    name = yield from scanner.read_name()
    if tags.name[1]:
        yield from scanner.expect(tags.name[1])
    yield from scanner.skip_space()
    calls.record_name(name)
    calls_end = tags.end or tags.outer_end
    tag = yield from scanner.expect(tags.key[0], calls_end)
    calls.start_call(name)
    before = "{"
    while tag != calls_end:
        key, _ = yield from scanner.read_through_marker(tags.key[1])
        key, is_text = _split_key(key.strip(), tags)
        calls.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        if is_text is None:
            is_text = key in texts.get(name, ())
        yield from _read_value(scanner, calls, tags, is_text)
        before = ", "
        yield from scanner.skip_space()
        tag = yield from scanner.expect(tags.key[0], calls_end)
    calls.argue("}" if before == ", " else "{}")
    if not tags.end:
        scanner.at -= len(calls_end)  # the outer script consumes it


def _split_key(key: str, tags: Tags) -> tuple[str, bool | None]:
    """Return a key, and whether its value is text; None if the model does not say."""
    for behind, is_text in zip(tags.kinds, (True, False), strict=True):
        if behind and key.endswith(behind):
            return key.removesuffix(behind), is_text
    return key, None


def _read_value(
    scanner: IncrementalScanner, calls: Calls, tags: Tags, is_text: bool
) -> Script[None]:
    if tags.value[0]:
        yield from scanner.skip_space()
        yield from scanner.expect(tags.value[0])
    ends: tuple[str, ...] = (tags.value[1],)
    if not tags.kinds[0]:  # a line break at either end inside the tags belongs to them
        yield from scanner.take_marker("\n")
        ends = ("\n" + tags.value[1], tags.value[1])
    if not is_text:
        written, _ = yield from scanner.read_through_marker(*ends)
        calls.argue(_as_json(written))
        return
    calls.argue('"')
    found = yield from scanner.read_until_marker(
        ends, lambda text: calls.argue(json.dumps(text, ensure_ascii=False)[1:-1]), strip=False
    )
    if not found:
        raise ParseError
    scanner.at += len(found)
    calls.argue('"')


def _as_json(written: str) -> str:
    stripped = written.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    if is_json(stripped) and not stripped.startswith('"'):
        return stripped
    if stripped[:1] in ("{", "["):  # some templates write objects and lists as Python does
        with suppress(ValueError):
            return python_as_json(stripped)
    return json.dumps(written, ensure_ascii=False)
