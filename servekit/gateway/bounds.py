"""How much one request may hold: `server.limits`, beside what the schema itself bounds.

Bodies are bounded in bytes before they are read, and in depth by the decoder, which gives up long
before Python's stack does. What is left free in form (tools, schemas, metadata) is measured here,
by whoever takes it in; nothing here costs a request that holds nothing of the kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from servekit.errors import RequestError
from servekit.gateway.schema import INT64
from servekit.wire.access import RequestLimits
from servekit.wire.values import Grammar

if TYPE_CHECKING:
    from servekit.gateway.call import Call

#: Keys of a JSON schema that hold schemas: one, a list, a mapping; source: draft 2020-12.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties", "additionalItems", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def check_call(call: Call, limits: RequestLimits) -> None:
    """Raise RequestError if a call holds more messages or stop strings than allowed."""
    _check(len(call.messages or ()), limits.messages, "messages", "messages")
    _check(len(call.params.stop), limits.stop_strings, "stop", "stop_strings")


def check_images(count: int, limits: RequestLimits, param: str = "messages") -> None:
    """Raise RequestError if a request holds more images than allowed."""
    _check(count, limits.images, param, "images")


def check_depth(value: Any, limits: RequestLimits, param: str) -> None:
    """Raise RequestError if a decoded value nests deeper than allowed, or cannot cross the wire."""
    level = [value]
    for _ in range(limits.json_depth + 1):
        if any(isinstance(one, int) and not -INT64 <= one < 2 * INT64 for one in level):
            raise RequestError(f"{param}: a whole number in it is beyond 64 bits", param=param)
        outer = [one for one in level if isinstance(one, dict | list)]
        if not outer:
            return
        level = [i for one in outer for i in (one.values() if isinstance(one, dict) else one)]
    raise _too_deep(param, limits.json_depth, "json_depth")


def check_schema(schema: Any, limits: RequestLimits, param: str) -> None:
    """Raise RequestError if a JSON schema nests deeper than allowed, as JSON or as schemas."""
    check_depth(schema, limits, param)
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > limits.schema_depth:
            raise _too_deep(param, limits.schema_depth, "schema_depth")
        level = [inner for outer in level for inner in subschemas(outer)]


def check_grammar(grammar: Grammar, limits: RequestLimits, param: str = "response_format") -> None:
    """Raise RequestError if a grammar is a JSON schema that nests deeper than allowed."""
    if grammar.kind == "json_schema":
        check_schema(msgspec.json.decode(grammar.text), limits, param)


def check_free(
    tools: list[dict[str, Any]],
    template: dict[str, Any],
    grammar: Grammar | None,
    limits: RequestLimits,
) -> None:
    """Raise RequestError if what a conversation brings beside its messages nests too deep."""
    if tools:
        check_depth(tools, limits, "tools")
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict):
            check_schema(function.get("parameters"), limits, "tools")
    if template:
        check_depth(template, limits, "chat_template_kwargs")
    if grammar is not None:
        check_grammar(grammar, limits)


def _check(count: int, most: int, param: str, key: str) -> None:
    if count > most:
        message = f"{param}: {count} are over the limit of {most}; see server.limits.{key}"
        raise RequestError(message, param=param)


def _too_deep(param: str, most: int, key: str) -> RequestError:
    message = f"{param} is nested deeper than the limit of {most}; see server.limits.{key}"
    return RequestError(message, param=param)


def subschemas(schema: Any) -> list[Any]:
    """The schemas directly within a schema that are objects; `true` and `false` hold none."""
    if not isinstance(schema, dict):
        return []
    found = [schema[key] for key in (*_ONE, *_ONE_MORE) if key in schema]
    for key in _LISTS:
        found += schema[key] if isinstance(schema.get(key), list) else []
    for key in _MAPPINGS:
        found += schema[key].values() if isinstance(schema.get(key), dict) else []
    return [inner for inner in found if isinstance(inner, dict)]
