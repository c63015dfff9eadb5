"""Running a parser over a text that is cut somehow, and joining what it says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from servekit.gateway.tool_parsing import (
    CallArguments,
    Event,
    Parser,
    Reasoning,
    Text,
    ToolCallStart,
    parser,
)
from servekit.protocol.messages import Dialect

#: What was said, in order: ("text" | "thought", words) and (name, arguments) of the calls.
Said = list[tuple[str, str]]

CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def read(
    dialect: Dialect,
    text: str,
    sizes: Sequence[int] = (1,),
    *,
    tools: bool = True,
    reasoning: bool = True,
    cut: bool = False,
) -> Said:
    """All that a parser makes of `text`, fed in pieces whose sizes go round `sizes`."""
    return joined(feed(parser(dialect, tools=tools, reasoning=reasoning), text, sizes, cut=cut))


def feed(parse: Parser, text: str, sizes: Sequence[int], *, cut: bool = False) -> list[Event]:
    events, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        events += parse.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    return events + parse.end(cut=cut)


def joined(events: Sequence[Event]) -> Said:
    said: list[list[str]] = []
    kinds: list[object] = []
    for event in events:
        msgspec.json.encode(event)  # it is going to be
        if isinstance(event, ToolCallStart):
            assert event.index == sum(isinstance(kind, int) for kind in kinds)
            said.append([event.name, ""])
            kinds.append(event.index)
            continue
        kind = event.index if isinstance(event, CallArguments) else type(event)
        if not kinds or kinds[-1] != kind:
            assert not isinstance(kind, int), "arguments of a call that is over, or never began"
            said.append(["text" if isinstance(event, Text) else "thought", ""])
            kinds.append(kind)
        assert event.text, "an event that says nothing"
        said[-1][1] += event.text
    assert all(kind in (Text, Reasoning) or isinstance(kind, int) for kind in kinds)
    return [(first, second) for first, second in said]


def all_cuts_agree(dialect: Dialect, text: str, *, cut: bool = False) -> Said:
    """What is said of `text`, which must be the same in one piece, by characters and between."""
    whole = read(dialect, text, [len(text) or 1], cut=cut)
    for sizes in ([1], [2], [3], [5], [7], [1, 4, 2]):
        assert read(dialect, text, sizes, cut=cut) == whole, sizes
    return whole
