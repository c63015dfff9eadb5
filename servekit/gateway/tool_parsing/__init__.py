"""Converts a model's text to neutral events as it arrives: reasoning, tool calls and the answer.

    parse = parser(dialect, tools=True, reasoning=True)
    for piece in pieces:
        events = parse.feed(piece)
    events = parse.end()

No character is lost: everything but calls, reasoning and the markers around them is text.

Only `gateway` may import from here, and only what `__all__` lists.
"""

from servekit.gateway.tool_parsing.events import (
    CallArguments,
    Event,
    Reasoning,
    Text,
    ToolCallStart,
)
from servekit.gateway.tool_parsing.grammars.closed_objects import close_objects
from servekit.gateway.tool_parsing.grammars.lark import after_thoughts
from servekit.gateway.tool_parsing.grammars.schema_formats import without_unknown_formats
from servekit.gateway.tool_parsing.grammars.tool_grammar import tool_grammar
from servekit.gateway.tool_parsing.incremental_scanner import Parser
from servekit.gateway.tool_parsing.json_text import is_json
from servekit.gateway.tool_parsing.registry import FAMILIES, begins_thinking, parser
from servekit.gateway.tool_parsing.tool_definitions import (
    Tool,
    ToolChoice,
    check_tools,
    choice_by_word,
    parse_tool_choice,
)

__all__ = [
    "FAMILIES",
    "CallArguments",
    "Event",
    "Parser",
    "Reasoning",
    "Text",
    "Tool",
    "ToolCallStart",
    "ToolChoice",
    "after_thoughts",
    "begins_thinking",
    "check_tools",
    "choice_by_word",
    "close_objects",
    "is_json",
    "parse_tool_choice",
    "parser",
    "tool_grammar",
    "without_unknown_formats",
]
