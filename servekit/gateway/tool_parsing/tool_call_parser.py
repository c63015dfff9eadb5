"""Calls in the midst of text: where they begin, and what becomes of those that are none.

Each family has a body: a script that reads calls, their opening marker included. It raises
Malformed where it finds something else. Then all that has not been said of a call comes out as
text: up to the name and the beginning of the arguments the whole of it, marker included; from
there on a call can't be taken back, its arguments end where they err, and what follows is text.
Where the text is cut off within a call, by a limit or a stop string, nothing of it is text: a call
whose name is known is told with the arguments that have come, any other is dropped.
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
    """The calls of one answer: numbers them and names them."""

    __slots__ = ("_short_ids", "_tape", "count", "doubtful", "named")

    def __init__(self, tape: IncrementalScanner, *, short_ids: bool = False) -> None:
        self._tape = tape
        self._short_ids = short_ids
        self.count = 0
        self.named = ""  # the call that is being read, before it has begun
        self.doubtful = False  # what is being read may be the answer itself

    def name(self, name: str) -> None:
        """Note the name of the call that is being read; at the text's end it may be half of one."""
        if not (self._tape.ended and self._tape.at >= len(self._tape.text)):
            self.named = name

    def begin(self, name: str, id: str = "") -> None:
        """A call is certain: what has been read of it is not text any more."""
        if not name:
            raise ParseError
        self._tape.release()
        self._tape.emit(ToolCallStart(self.count, id or self._new_id(), name))
        self.count += 1
        self.named = ""

    def argue(self, text: str) -> None:
        """A piece of the arguments of the call that was begun last."""
        index = self.count - 1
        events = self._tape.events
        if events and isinstance(last := events[-1], CallArguments) and last.index == index:
            events[-1] = CallArguments(index, last.text + text)
        elif text:
            events.append(CallArguments(index, text))

    def _new_id(self) -> str:
        """As OpenAI's; nine letters and digits where the model's template takes nothing else."""
        if self._short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


Body = Callable[[IncrementalScanner, Calls], Script[None]]


class Family(NamedTuple):
    """How calls are written: what opens them, what reads them, and how a bare one begins."""

    openings: tuple[str, ...]
    body: Body
    bare: str = ""  # a character that opens calls without a marker, at the very beginning
    short_ids: bool = False


def calls_in_text(tape: IncrementalScanner, family: Family) -> Script[None]:
    """Text with calls in it, up to the end.

    White space before, between and after calls, MAX_SPACE characters at most, belongs to them.
    """
    calls = Calls(tape, short_ids=family.short_ids)
    if family.bare:
        yield from _bare(tape, calls, family)
    while family.openings:
        opening = yield from tape.find(family.openings, tape.say)
        if not opening:
            return
        tape.mark()
        yield from tape.skip_space(MAX_SPACE)
        yield from _attempt(tape, calls, family.body, tape.marked() + opening)
    yield from rest(tape)


def rest(tape: IncrementalScanner) -> Script[None]:
    """Plain text up to the end."""
    while True:
        tape.say(tape.text[tape.at :])
        tape.at = len(tape.text)
        if tape.ended:
            return
        yield


def _bare(tape: IncrementalScanner, calls: Calls, family: Family) -> Script[None]:
    tape.mark()
    if (yield from tape.skip_space(MAX_SPACE)) == family.bare:
        yield from _attempt(tape, calls, family.body, tape.marked() + family.bare)
    else:
        tape.rewind()


def _attempt(tape: IncrementalScanner, calls: Calls, body: Body, opening: str) -> Script[None]:
    """Read calls from their opening on; what is none comes out as text."""
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
        if calls.count == known:  # what stands behind the opening may yet hold a call
            tape.say(opening)
            tape.at += len(opening)
    tape.release()
    if calls.count > known:
        yield from _after(tape)


def _after(tape: IncrementalScanner) -> Script[None]:
    """White space that ends the text after a call is not said."""
    tape.mark()
    if not (yield from tape.skip_space(MAX_SPACE)):
        tape.release()
    tape.rewind()
