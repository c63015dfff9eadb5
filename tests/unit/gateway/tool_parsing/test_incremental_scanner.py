"""The tape itself: long answers cost what they should."""

from __future__ import annotations

import time

import pytest

from servekit.gateway.tool_parsing import FAMILIES, parser
from servekit.protocol.messages import Dialect
from tests.unit.gateway.tool_parsing.reading import feed, joined

LONG = 60_000
#: Far above what a parser takes, on a busy machine too, and far below what quadratic work would.
BOUND_S = 5.0
PIECES = [
    "words and ",
    "\n",
    "<tool_call>",
    "<",
    "{",
    '{"name": "',
    "[f(a=",
    "[TOOL_CALLS]",
    '<tool_call>{"name": "f", "arguments": {"a": "',
    "<tool_call>\n<function=f>\n<parameter=a>\n",
]


@pytest.mark.lane("long")
@pytest.mark.parametrize("tools", sorted(FAMILIES))
def test_no_text_makes_a_parser_slow(tools: str) -> None:
    own = "<own>" if tools == "template" else ""
    spoken = Dialect(tools, tool_begin=own, think_begin="<think>", think_end="</think>")
    for piece in PIECES:
        text = piece * (LONG // len(piece))
        for size in (4, LONG):
            start = time.process_time()
            said = joined(feed(parser(spoken, tools=True, reasoning=True), text, [size]))
            assert time.process_time() - start < BOUND_S, piece
            if all(kind == "text" for kind, _ in said):
                assert "".join(words for _, words in said) == text
