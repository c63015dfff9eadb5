"""Calls in the midst of text: where they begin, and what becomes of those that are none.

Each family has a body: a script that reads calls from behind an opening marker. It raises
Malformed where it finds something else. Then all that has not been said of a call comes out as
text: up to the name and the beginning of the arguments the whole of it, marker included; from
there on a call can't be taken back, its arguments end where they err, and what follows is text.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence

from servekit.gateway.parsing.events import CallArguments, CallBegins
from servekit.gateway.parsing.tape import MAX_SPACE, Malformed, Script, Tape

_ALPHANUMERIC = string.ascii_letters + string.digits


class Calls:
    """The calls of one answer: numbers them and names them."""

    __slots__ = ("_short_ids", "_tape", "count")

    def __init__(self, tape: Tape, *, short_ids: bool = False) -> None:
        self._tape = tape
        self._short_ids = short_ids
        self.count = 0

    def begin(self, name: str) -> None:
        """A call is certain: what has been read of it is not text any more."""
        if not name:
            raise Malformed
        self._tape.release()
        self._tape.emit(CallBegins(self.count, self._new_id(), name))
        self.count += 1

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


Body = Callable[[Tape, Calls], Script[None]]


def calls_in_text(
    tape: Tape, calls: Calls, openings: Sequence[str], body: Body, bare: Sequence[str] = ()
) -> Script[None]:
    """Text with calls in it, up to the end.

    `openings` begin calls anywhere and are consumed before `body` is asked; one of `bare`, at the
    very beginning of the text, is left for it to read. White space before, between and after
    calls, MAX_SPACE characters at most, belongs to them.
    """
    if bare:
        yield from _bare(tape, calls, body, bare)
    while openings:
        opening = yield from tape.find(openings, tape.say)
        if not opening:
            return
        tape.mark()
        yield from tape.skip_space(MAX_SPACE)
        yield from tape.expect(opening)
        yield from _attempt(tape, calls, body)
    yield from rest(tape)


def rest(tape: Tape) -> Script[None]:
    """Plain text up to the end."""
    while True:
        tape.say(tape.text[tape.at :])
        tape.at = len(tape.text)
        if tape.ended:
            return
        yield


def _bare(tape: Tape, calls: Calls, body: Body, bare: Sequence[str]) -> Script[None]:
    tape.mark()
    following = yield from tape.skip_space(MAX_SPACE)
    if following and following in bare:
        yield from _attempt(tape, calls, body)
    else:
        tape.rewind()


def _attempt(tape: Tape, calls: Calls, body: Body) -> Script[None]:
    """Read calls behind a marked opening; what is none comes out as text."""
    opening, known = tape.marked(), calls.count
    try:
        yield from body(tape, calls)
    except Malformed:
        tape.rewind()
        if calls.count == known:  # what stands behind the opening may yet hold a call
            tape.say(opening)
            tape.at += len(opening)
    tape.release()
    if calls.count > known:
        yield from _after(tape)


def _after(tape: Tape) -> Script[None]:
    """White space that ends the text after a call is not said."""
    tape.mark()
    if not (yield from tape.skip_space(MAX_SPACE)):
        tape.release()
    tape.rewind()
