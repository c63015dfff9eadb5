"""Limits on the content of one request (`server.limits`), beyond the bounds of the API schemas.

Bodies are bounded in bytes before they are read, and in depth by the decoder, whose limit is far
below that of Python's stack. Free-form parts (tools, schemas, template arguments) are checked here,
by the endpoints that accept them; a request without such parts pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from servekit.errors import ContextLengthExceeded, RequestError
from servekit.gateway.api.openai.schema import INT64
from servekit.protocol.access import RequestLimits
from servekit.protocol.types import Grammar

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import ChatMessage, ModelInfo

#: Highest `multipleOf` of a schema, apart from a factor that is a power of ten.
MAX_MULTIPLE = 10_000
#: Memory of a waiting request and its connection, without the request's content.
_CALL_BYTES = 8 * 1024
#: Keys of a JSON schema that hold a schema, a list or a mapping of them. Source: draft 2020-12.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_ONE_MORE = ("unevaluatedItems", "unevaluatedProperties", "additionalItems", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def check_counts(
    messages: Sequence[ChatMessage] | None, stops: Sequence[str], limits: RequestLimits
) -> None:
    """Raise RequestError for more messages or stop strings than allowed."""
    if messages is not None and len(messages) > limits.messages:
        raise _too_many(len(messages), limits.messages, "messages", "messages")
    if len(stops) > limits.stop_strings:
        raise _too_many(len(stops), limits.stop_strings, "stop", "stop_strings")


def held_bytes(call: InflightRequest) -> int:
    """Return the approximate memory of a waiting request, in bytes."""
    size = _CALL_BYTES + len(call.body)
    if call.prompt is not None:
        size += _size(call.prompt)
    if call.more:
        size += _size(call.more)
    for message in call.messages or ():
        size += sys.getsizeof(message.content)
        for one in message.media:
            size += sys.getsizeof(one.data)
        if message.reasoning:
            size += sys.getsizeof(message.reasoning)
        if message.tool_calls:
            size += sum(_size(called.arguments) for called in message.tool_calls)
    return size


def _size(value: Any) -> int:
    """Return the size of a decoded value with its content, in bytes; `check_depth` bounds depth."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(map(_size, value))
    return sys.getsizeof(value)


def check_fits(call: InflightRequest, info: ModelInfo | None) -> None:
    """Raise ContextLengthExceeded for a prompt whose least number of tokens exceeds the context.

    This spares a request that can never fit the wait for its worker, which would refuse it.
    Assistant messages and white space do not count, because templates may drop them.
    """
    if info is None or call.more.get("task") or call.params.truncate_prompt:
        return
    prompt, context = call.prompt, info.max_context
    if isinstance(prompt, list):
        tokens = len(prompt)
    elif info.token_bytes:
        texts = [one.content for one in call.messages or () if one.role != "assistant"]
        texts += [] if prompt is None else [prompt]
        if sum(map(len, texts)) <= context * info.token_bytes // 4:
            return  # a character has four bytes at most
        size_bytes = sum(len(part.encode()) for text in texts for part in text.split())
        tokens = size_bytes // info.token_bytes
    else:
        return
    if tokens > context:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context} tokens; the prompt has {tokens} at"
            " the very least. Shorten it",
            param="prompt" if call.messages is None else "messages",
        )


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
        for one in level:
            _check_multiple(one, param)
        level = [inner for outer in level for inner in subschemas(outer)]


def _check_multiple(schema: Any, param: str) -> None:
    """Raise RequestError for a `multipleOf` that takes long to compile.

    Its automaton has a state for each remainder, except that powers of ten only need the last
    digits.
    """
    multiple = schema.get("multipleOf") if isinstance(schema, dict) else None
    if not isinstance(multiple, int | float) or isinstance(multiple, bool):
        return  # the grammar compiler reports what is wrong
    digits = f"{multiple:.15g}".partition("e")[0].replace(".", "").strip("0-")
    if len(digits) > 6 or int(digits or 0) > MAX_MULTIPLE:
        raise RequestError(
            f"{param}: multipleOf is {multiple:g}, and at most {MAX_MULTIPLE} is served, "
            "powers of ten apart",
            param=param,
        )


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
    """Raise RequestError if tools, template variables or the grammar nest too deep."""
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


def _too_many(count: int, most: int, param: str, key: str) -> RequestError:
    message = f"{param}: {count} are over the limit of {most}; see server.limits.{key}"
    return RequestError(message, param=param)


def _too_deep(param: str, most: int, key: str) -> RequestError:
    message = f"{param} is nested deeper than the limit of {most}; see server.limits.{key}"
    return RequestError(message, param=param)


def subschemas(schema: Any) -> list[Any]:
    """Return the object schemas directly within a schema; `true` and `false` are left out."""
    if not isinstance(schema, dict):
        return []
    found = [schema[key] for key in (*_ONE, *_ONE_MORE) if key in schema]
    for key in _LISTS:
        found += schema[key] if isinstance(schema.get(key), list) else []
    for key in _MAPPINGS:
        found += schema[key].values() if isinstance(schema.get(key), dict) else []
    return [inner for inner in found if isinstance(inner, dict)]
