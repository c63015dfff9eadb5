"""Answers whose parts are already separated, by marks that cannot occur in other text.

See `protocol.tool_formats.FRAMED`. The text of a part is taken verbatim, including white space.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from servekit.gateway.tool_parsing.events import Reasoning
from servekit.gateway.tool_parsing.incremental_scanner import IncrementalScanner, ParseError, Script
from servekit.gateway.tool_parsing.tool_call_parser import Calls
from servekit.protocol.messages import Dialect
from servekit.protocol.tool_formats import ARGUMENTS, CALL, MARKS, NAME, THOUGHT


def read_framed(scanner: IncrementalScanner, dialect: Dialect, *, reasoning: bool) -> Script[None]:
    """Read all parts. Reasoning that is not wanted becomes text between the dialect's tags."""
    calls = Calls(scanner)
    tell: Callable[[str], None] = scanner.emit_text
    closing = ""
    while mark := (yield from scanner.read_until_marker(tuple(MARKS), tell, strip=False)):
        scanner.at += len(mark)
        scanner.emit_text(closing)
        tell, closing = scanner.emit_text, ""
        if mark == CALL:
            yield from _read_start(scanner, calls)
            tell = calls.argue
        elif mark == THOUGHT and reasoning:
            tell = partial(scanner.emit_text, kind=Reasoning)
        elif mark == THOUGHT:
            scanner.emit_text(f"{dialect.think_begin}\n")
            closing = f"\n{dialect.think_end}\n\n"
    scanner.emit_text(closing)


def _read_start(scanner: IncrementalScanner, calls: Calls) -> Script[None]:
    try:
        id, _ = yield from scanner.read_through_marker(NAME)
        name, _ = yield from scanner.read_through_marker(ARGUMENTS)
        calls.start_call(name, id)
    except ParseError:  # the answer was cut off before the call's name and id were complete
        scanner.at = len(scanner.text)
