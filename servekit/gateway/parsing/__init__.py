"""From a model's text to neutral events: thoughts, tool calls and the answer, as they come.

    parse = parser(dialect, tools=True, reasoning=True)
    for piece in pieces:
        events = parse.feed(piece)
    events = parse.end()

No character is lost: what is neither a call nor a thought, nor the markers around one, is text.
"""

from servekit.gateway.parsing.choice import tool_grammar
from servekit.gateway.parsing.definitions import Choice, Tool, check_tools, choice_by_word, choose
from servekit.gateway.parsing.events import (
    CallArguments,
    CallBegins,
    Event,
    Parser,
    Reasoning,
    Text,
)
from servekit.gateway.parsing.families import FAMILIES, begins_thinking, parser
from servekit.gateway.parsing.formats import without_unknown_formats
from servekit.gateway.parsing.json_text import is_json
from servekit.gateway.parsing.lark import after_thoughts

__all__ = [
    "FAMILIES",
    "CallArguments",
    "CallBegins",
    "Choice",
    "Event",
    "Parser",
    "Reasoning",
    "Text",
    "Tool",
    "after_thoughts",
    "begins_thinking",
    "check_tools",
    "choice_by_word",
    "choose",
    "is_json",
    "parser",
    "tool_grammar",
    "without_unknown_formats",
]
