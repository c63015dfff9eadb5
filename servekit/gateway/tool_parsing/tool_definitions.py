"""The tools of a request, and the choice among them.

Definitions go to the chat template unchanged; only what the gateway relies on is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from servekit.errors import RequestError, Unsupported

Tool = dict[str, Any]
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolChoice(NamedTuple):
    """The meaning of a request's `tool_choice`."""

    mode: Literal["none", "auto", "required"]
    tools: tuple[Tool, ...]  # the tools that may be called
    once: bool = False  # a named function is called once


def check_tools(tools: Any) -> list[Tool]:
    """Check and return the definitions. Raises RequestError that names the place."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError("tools: expected a list", param="tools")
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{at}]")
        if name in seen:
            where = f"tools[{at}].function.name"
            raise RequestError(f"{where}: {name!r} is defined twice", param=where)
        seen.add(name)
    return tools


def _check_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, dict):
        raise RequestError(f"{where}: expected an object", param=where)
    if tool.get("type") != "function":
        raise Unsupported(f'{where}.type: only "function" is supported', param=f"{where}.type")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise RequestError(f"{where}: expected an object", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name: expected 1 to 64 letters, digits, _ and -", param=f"{where}.name"
        )
    _check_kind(function, "description", str, "a string", where)
    _check_kind(function, "strict", bool, "true or false", where)
    _check_kind(function, "parameters", dict, "a JSON schema, an object", where)
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        where = f"{where}.parameters.type"
        raise RequestError(f'{where}: arguments are an object; expected "object"', param=where)
    return name


def _check_kind(function: Tool, key: str, kind: type, wanted: str, where: str) -> None:
    value = function.get(key)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{where}.{key}: expected {wanted}", param=f"{where}.{key}")


def parse_tool_choice(tools: Sequence[Tool], tool_choice: Any) -> ToolChoice:
    """Return the choice that `tool_choice` makes among checked tools. Raises RequestError.

    Accepts OpenAI's forms: "none", "auto", "required", a function by name (nested as in chat
    completions, or flat as in responses) and `allowed_tools`.
    """
    everything = tuple(tools)
    if tool_choice is None:
        return ToolChoice("auto" if tools else "none", everything)
    if isinstance(tool_choice, str):
        return _by_mode(tool_choice, everything, "tool_choice")
    if not isinstance(tool_choice, dict):
        raise _no_choice()
    match tool_choice.get("type"):
        case "function":
            named = tool_choice.get("function", tool_choice)
            return ToolChoice(
                "required", (_find_tool(tools, named, "tool_choice.function.name"),), True
            )
        case "allowed_tools":
            inner = tool_choice.get("allowed_tools", tool_choice)
            return _list_allowed(tools, inner)
    raise _no_choice()


def choice_by_word(tools: Sequence[Tool], word: str) -> ToolChoice:
    """Return the choice for one word: "none", "auto", "required", or the name of a tool."""
    if word in ("none", "auto", "required"):
        return _by_mode(word, tuple(tools), "tool_choice")
    return ToolChoice("required", (_find_tool(tools, {"name": word}, "tool_choice"),), True)


def _by_mode(mode: str, tools: tuple[Tool, ...], param: str) -> ToolChoice:
    if mode == "none":
        return ToolChoice("none", ())
    if mode == "auto":
        return ToolChoice("auto" if tools else "none", tools)
    if mode != "required":
        raise _no_choice()
    if not tools:
        raise RequestError("tool_choice is required, but there are no tools", param=param)
    return ToolChoice("required", tools)


def _list_allowed(tools: Sequence[Tool], inner: Any) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(listed, list) or not listed:
        raise RequestError(f"{where}.tools: expected a list of tools", param=f"{where}.tools")
    found: dict[str, Tool] = {}
    for at, entry in enumerate(listed):
        named = entry.get("function", entry) if isinstance(entry, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        if isinstance(name, str) and name in found:
            continue  # it may be there any number of times
        tool = _find_tool(tools, named, f"{where}.tools[{at}].function.name")
        found[tool["function"]["name"]] = tool
    mode = inner.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise RequestError(f'{where}.mode: expected "auto" or "required"', param=f"{where}.mode")
    return _by_mode(mode, tuple(found.values()), where)


def _find_tool(tools: Sequence[Tool], named: Any, param: str) -> Tool:
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        raise RequestError(f"{param} is required", param=param)
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise RequestError(f"{param}: no tool is named {name[:64]!r}", param=param)


def _no_choice() -> RequestError:
    return RequestError(
        'tool_choice: expected "none", "auto", "required" or a function by its name',
        param="tool_choice",
    )
