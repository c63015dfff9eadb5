"""Anthropic's tool definitions and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.fields import DESCRIPTION, doc
from servekit.gateway.api.unknown_parameters import MOST_NAMES, UNKNOWN, clean_name

_OWN = (None, "custom")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Tool(msgspec.Struct):
    """A tool of the client's own. The tools that Anthropic runs have other types."""

    name: Annotated[str, doc("The name of the tool")] = ""
    description: Annotated[str, DESCRIPTION] | None = None
    input_schema: Annotated[dict[str, Any], doc("The JSON schema of the input")] | None = None
    type: Annotated[str, doc("custom; others are left out beside these, else refused")] | None = (
        None
    )
    strict: Annotated[bool, doc("Enforce the schema on calls")] | None = None
    defer_loading: bool | None = None
    """true: the model sees the tool once a result has a tool_reference to it."""


class ToolChoice(msgspec.Struct):
    """The choice of tools: whether one may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    """`any` requires a call, `tool` a call of the named tool."""
    name: Annotated[str, doc("The name of the tool")] | None = None
    disable_parallel_tool_use: Annotated[bool, doc("true: one call at most")] | None = None


def choose_own_tools(given: list[Tool] | None) -> list[Tool]:
    """Return the client's own tools; Anthropic's are left out beside them, with a warning.

    Agents offer all tools that they know. A request that has no other was made for Anthropic's.
    """
    own = [tool for tool in given or () if tool.type in _OWN]
    if not given or len(own) == len(given) or not own or UNKNOWN.policy == "refuse":
        return given or []
    kinds = sorted({clean_name(tool.type or "") for tool in given if tool.type not in _OWN})
    names = [f"tools.{kind}" for kind in kinds[:MOST_NAMES]]
    UNKNOWN.warn(f"left out: {', '.join(names)}", names)
    return own


def tools(given: list[Tool] | None, found: Collection[str] = ()) -> list[dict[str, Any]]:
    """Convert tools to OpenAI's definitions; of those that are deferred, the `found` ones.

    Raises RequestError for wrong ones.
    """
    seen: set[str] = set()
    defined = []
    for at, tool in enumerate(given or ()):
        function = _function(tool, f"tools[{at}]")
        if not tool.defer_loading or tool.name in found:
            defined.append({"type": "function", "function": function})
        if tool.name in seen:
            raise RequestError(f"tools: there are two named {tool.name!r}", param="tools")
        seen.add(tool.name)
    return defined


def _function(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in _OWN:
        raise Unsupported(
            f"{where}: {tool.type!r} is a tool that Anthropic provides; give tools of your own,"
            " with an input_schema",
            param="tools",
        )
    if not _NAME.fullmatch(tool.name):
        raise RequestError(f"{where}.name: expected 1 to 64 letters, digits, _ or -", param="tools")
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is required", param="tools")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return function


def tool_choice(choice: ToolChoice | None, given: list[Tool] | None) -> tuple[Any, bool]:
    """Return `tool_choice` in OpenAI's form, and whether parallel calls are allowed."""
    if choice is None:
        return None, True
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "none":
        return "none", parallel
    if not given:
        raise RequestError("tool_choice: there are no tools to choose from", param="tool_choice")
    if choice.type != "tool":
        return {"auto": "auto", "any": "required"}[choice.type], parallel
    if choice.name not in {tool.name for tool in given}:
        raise RequestError(
            f"tool_choice.name: there is no tool named {choice.name!r}", param="tool_choice"
        )
    return {"type": "function", "function": {"name": choice.name}}, parallel
