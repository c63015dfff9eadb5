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

    __slots__ = ("_short_ids", "_tape", "count", "doubtful", "named")

    def __init__(self, tape: IncrementalScanner, *, short_ids: bool = False) -> None:
        self._tape = tape
        self._short_ids = short_ids
        self.count = 0
        self.named = ""  # the name of the call being read, before the call is emitted
        self.doubtful = False  # the text being read may be the answer itself

    def name(self, name: str) -> None:
        """Record the name of the call being read, unless the text's end may have cut it."""
        if not (self._tape.ended and self._tape.at >= len(self._tape.text)):
            self.named = name

    def begin(self, name: str, id: str = "") -> None:
        """Emit the start of a call: the text read so far can no longer become answer text."""
        if not name:
            raise ParseError
        self._tape.release()
        self._tape.emit(ToolCallStart(self.count, id or self._new_id(), name))
        self.count += 1
        self.named = ""

    def argue(self, text: str) -> None:
        """Emit a piece of the arguments of the last call."""
        index = self.count - 1
        events = self._tape.events
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


def calls_in_text(tape: IncrementalScanner, family: Family) -> Script[None]:
    """Read text with calls in it, up to the end.

    White space before, between and after calls belongs to them, up to MAX_SPACE characters.
    """
    calls = Calls(tape, short_ids=family.short_ids)
    if family.bare:
        yield from _read_bare(tape, calls, family)
    while family.openings:
        opening = yield from tape.find(family.openings, tape.say)
        if not opening:
            return
        tape.mark()
        yield from tape.skip_space(MAX_SPACE)
        yield from _try_calls(tape, calls, family.body, tape.marked() + opening)
    yield from read_rest(tape)


def read_rest(tape: IncrementalScanner) -> Script[None]:
    """Read plain text up to the end."""
    while True:
        tape.say(tape.text[tape.at :])
        tape.at = len(tape.text)
        if tape.ended:
            return
        yield


def _read_bare(tape: IncrementalScanner, calls: Calls, family: Family) -> Script[None]:
    tape.mark()
    if (yield from tape.skip_space(MAX_SPACE)) == family.bare:
        yield from _try_calls(tape, calls, family.body, tape.marked() + family.bare)
    else:
        tape.rewind()


def _try_calls(tape: IncrementalScanner, calls: Calls, body: Body, opening: str) -> Script[None]:
    """Read calls from their opening on; malformed ones become text."""
    known = calls.count
    calls.named, calls.doubtful = "", False
    try:
        yield from body(tape, calls)
    except ParseError:
        if tape.cut and not calls.doubtful:
            if calls.named:
                calls.begin(calls.named)
            tape.release()
            tape.at = len(tape.text)
            return
        tape.rewind()
        if calls.count == known:  # the text after the opening may contain a call
            tape.say(opening)
            tape.at += len(opening)
    tape.release()
    if calls.count > known:
        yield from _skip_space(tape)


def _skip_space(tape: IncrementalScanner) -> Script[None]:
    """Skip white space that ends the text after a call."""
    tape.mark()
    if not (yield from tape.skip_space(MAX_SPACE)):
        tape.release()
    tape.rewind()
