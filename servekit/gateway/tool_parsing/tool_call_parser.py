"""Finds calls in text, and turns failed ones back into text.

Each family has a body: a script that reads calls from their opening marker on, and raises
ParseError if they are malformed. Before the name and the start of the arguments are complete, a
malformed call becomes text, marker included. After that the call cannot be taken back: its
arguments end at the error, and the rest is text. If a limit or a stop string cuts the text off
within a call, nothing of the call becomes text: a call with a complete name is emitted with the
arguments so far, any other is dropped.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import NamedTuple

from servekit.gateway.tool_parsing.events import CallArguments, ToolCallStart
from servekit.gateway.tool_parsing.incremental_scanner import (
    MAX_SPACE,
    IncrementalScanner,
    ParseError,
    Script,
)

_ALPHANUMERIC = string.ascii_letters + string.digits


class Calls:
    """The calls of one answer, with their indices and ids."""

    __slots__ = ("_scanner", "_short_ids", "count", "doubtful", "named")

    def __init__(self, scanner: IncrementalScanner, *, short_ids: bool = False) -> None:
        self._scanner = scanner
        self._short_ids = short_ids
        self.count = 0
        self.named = ""  # the name of the call being read, before the call is emitted
        self.doubtful = False  # the text being read may be the answer itself

    def record_name(self, name: str) -> None:
        """Record the name of the call being read, unless the text's end may have cut it."""
        if not (self._scanner.ended and self._scanner.at >= len(self._scanner.text)):
            self.named = name

    def start_call(self, name: str, id: str = "") -> None:
        """Emit the start of a call: the text read so far can no longer become answer text."""
        if not name:
            raise ParseError
        self._scanner.drop_mark()
        self._scanner.emit(ToolCallStart(self.count, id or self._new_id(), name))
        self.count += 1
        self.named = ""

    def argue(self, text: str) -> None:
        """Emit a piece of the arguments of the last call."""
        index = self.count - 1
        events = self._scanner.events
        if events and isinstance(last := events[-1], CallArguments) and last.index == index:
            events[-1] = CallArguments(index, last.text + text)
        elif text:
            events.append(CallArguments(index, text))

    def _new_id(self) -> str:
        """Return an id like OpenAI's, or nine letters and digits if the template requires that."""
        if self._short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


Body = Callable[[IncrementalScanner, Calls], Script[None]]


class Family(NamedTuple):
    """A call format: opening markers, the body that reads calls, and the start of bare calls."""

    openings: tuple[str, ...]
    body: Body
    bare: str = ""  # opens calls without a marker, only at the start of the text
    short_ids: bool = False


def calls_in_text(scanner: IncrementalScanner, calls: Calls, family: Family) -> Script[None]:
    """Read text with calls in it, up to the end.

    White space before, between and after calls belongs to them, up to MAX_SPACE characters.
    """
    if family.bare:
        yield from _read_bare(scanner, calls, family)
    if family.openings:
        yield from read_calls_until(scanner, calls, family, scanner.emit_text)
    else:
        yield from read_rest(scanner)


def read_calls_until(
    scanner: IncrementalScanner,
    calls: Calls,
    family: Family,
    tell: Callable[[str], None],
    *ends: str,
) -> Script[str]:
    """Hand text to `tell`, and emit the calls in it, up to one of `ends`; return that, or ""."""
    while True:
        found = yield from scanner.read_until_marker((*ends, *family.openings), tell)
        if found not in family.openings:
            return found
        scanner.mark()
        yield from scanner.skip_space(MAX_SPACE)
        yield from _try_calls(scanner, calls, family.body, scanner.marked() + found, tell)


def read_rest(scanner: IncrementalScanner) -> Script[None]:
    """Read plain text up to the end."""
    while True:
        scanner.emit_text(scanner.text[scanner.at :])
        scanner.at = len(scanner.text)
        if scanner.ended:
            return
        yield


def _read_bare(scanner: IncrementalScanner, calls: Calls, family: Family) -> Script[None]:
    scanner.mark()
    if (yield from scanner.skip_space(MAX_SPACE)) == family.bare:
        yield from _try_calls(
            scanner, calls, family.body, scanner.marked() + family.bare, scanner.emit_text
        )
    else:
        scanner.rewind()


def _try_calls(
    scanner: IncrementalScanner,
    calls: Calls,
    body: Body,
    opening: str,
    tell: Callable[[str], None],
) -> Script[None]:
    """Read calls from their opening on; the opening of malformed ones is handed to `tell`."""
    known = calls.count
    calls.named, calls.doubtful = "", False
    try:
        yield from body(scanner, calls)
    except ParseError:
        if scanner.cut and not calls.doubtful:
            if calls.named:
                calls.start_call(calls.named)
            scanner.drop_mark()
            scanner.at = len(scanner.text)
            return
        scanner.rewind()
        if calls.count == known:  # the text after the opening may contain a call
            tell(opening)
            scanner.at += len(opening)
    scanner.drop_mark()
    if calls.count > known:
        yield from _skip_space(scanner)


def _skip_space(scanner: IncrementalScanner) -> Script[None]:
    """Skip white space that ends the text after a call."""
    scanner.mark()
    if not (yield from scanner.skip_space(MAX_SPACE)):
        scanner.drop_mark()
    scanner.rewind()
