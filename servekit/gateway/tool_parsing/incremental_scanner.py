"""The text under a parser's head, and scripts that read it.

A script is a generator that reads the tape as if all of the text were there and yields where it
is not, yet. It decides only what no further text could change, so that its events, joined, do not
depend on how the text was cut. Where it has set a mark it may go back.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from servekit.gateway.tool_parsing.events import Event, Reasoning, Text
from servekit.gateway.tool_parsing.json_text import JsonReader

T = TypeVar("T")
Script = Generator[None, None, T]

#: White space around a marker belongs to it, up to so many characters.
MAX_SPACE = 32
#: What is held back without being known for a call may be so long, in characters.
MAX_HELD = 65_536
MAX_NAME = 256
#: Where a text is cut off, its end is taken for a marker's beginning from so many characters on: a
#: single one, such as "<" or "[", is as likely to be text.
LEAST_OF_MARKER = 2
_IN_NAME = frozenset(f"{string.ascii_letters}{string.digits}_.:/-")


class ParseError(Exception):
    """What the tape says is not what the script is for."""


class IncrementalScanner:
    """Text that has come and is not yet consumed, and the events made of it."""

    __slots__ = ("_mark", "at", "cut", "ended", "events", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # of `text`: the first character not consumed
        self.ended = False
        self.cut = False  # ended in the midst, by a limit or a stop string
        self.events: list[Event] = []
        self._mark: int | None = None

    # ---- from outside

    def write(self, text: str) -> None:
        """Add text, and forget what can't be gone back to."""
        cut = self.at if self._mark is None else self._mark
        self.text = self.text[cut:] + text
        self.at -= cut
        if self._mark is not None:
            self._mark = 0

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    # ---- marks

    def mark(self) -> None:
        self._mark = self.at

    def release(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Back to the mark, where there is one; the mark is gone."""
        if self._mark is not None:
            self.at, self._mark = self._mark, None

    def marked(self) -> str:
        """What has been read since the mark."""
        return "" if self._mark is None else self.text[self._mark : self.at]

    def hold(self, more: int = 0) -> None:
        """Raise Malformed where too much is held back since the mark."""
        if self._mark is not None and self.at + more - self._mark > MAX_HELD:
            raise ParseError

    # ---- output

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def say(self, text: str, kind: type[Text] | type[Reasoning] = Text) -> None:
        """Emit text, joined to what the same piece has said before."""
        if not text:
            return
        if self.events and isinstance(last := self.events[-1], kind):
            self.events[-1] = kind(last.text + text)
        else:
            self.events.append(kind(text))

    # ---- reading

    def peek(self) -> Script[str]:
        """The next character; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def take(self, *markers: str) -> Script[str]:
        """Consume the one of `markers` that comes next, and return it; "" if none does."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, markers))]
            for marker in markers:
                if rest.startswith(marker):
                    self.at += len(marker)
                    return marker
            if self.ended or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def expect(self, *markers: str) -> Script[str]:
        """As `take`; raises Malformed if none comes next."""
        found = yield from self.take(*markers)
        if not found:
            raise ParseError
        return found

    def skip_space(self, limit: int = MAX_HELD) -> Script[str]:
        """Consume white space, at most `limit` characters; return the character after it."""
        while True:
            following = yield from self.peek()
            if not following.isspace() or limit <= 0:
                return following
            self.at += 1
            limit -= 1

    def name(self) -> Script[str]:
        """Consume the name of a tool or of one of its arguments, and white space around it.

        Raises Malformed where there is none.
        """
        yield from self.skip_space()
        name = ""
        while (following := (yield from self.peek())) and following in _IN_NAME:
            self.at += 1
            name += following
            if len(name) > MAX_NAME:
                raise ParseError
        if not name:
            raise ParseError
        yield from self.skip_space()
        return name

    def take_end(self, marker: str) -> Script[bool]:
        """Consume a closing marker, or so much of it as the text's end has left."""
        while True:
            rest = self.text[self.at : self.at + len(marker)]
            if rest == marker or (self.ended and marker.startswith(rest)):
                self.at += len(rest)
                return True
            if not marker.startswith(rest):
                return False
            yield

    def find(
        self, markers: Sequence[str], tell: Callable[[str], None], *, strip: bool = True
    ) -> Script[str]:
        """Hand all text before the first of `markers` to `tell` and consume it; return the marker.

        With `strip` white space before the marker belongs to it. Afterwards the tape is before
        that white space and the marker. "" at the end, when all has been told.
        """
        while True:
            here, stop = self.at, len(self.text)
            found = ""
            for marker in markers:
                at = self.text.find(marker, here, stop + len(marker))
                if here <= at < stop:
                    stop, found = at, marker
            held = 0 if found else self._held_at_end(here, markers)
            stop -= held
            if strip and (found or held or not self.ended):
                stop = max(here, stop - _space_before(self.text, here, stop))
            tell(self.text[here:stop])
            self.at = stop
            if self.ended and not found:
                self.at = len(self.text)
            if found or self.ended:
                return found
            yield

    def _held_at_end(self, start: int, markers: Sequence[str]) -> int:
        """How many characters at the end of the text begin a marker, and are not told."""
        if self.ended and not self.cut:
            return 0
        size = begun(self.text, start, markers)
        return 0 if self.cut and size < LEAST_OF_MARKER else size

    def until(self, *markers: str) -> Script[tuple[str, str]]:
        """Consume all before the first of `markers` and return both; Malformed if none comes."""
        pieces: list[str] = []

        def tell(text: str) -> None:
            pieces.append(text)
            self.hold(len(text))

        found = yield from self.find(markers, tell, strip=False)
        if not found:
            raise ParseError
        self.at += len(found)
        return "".join(pieces), found

    def json(self, tell: Callable[[str], None]) -> Script[None]:
        """Consume a JSON value, handing it to `tell` as it comes; raises Malformed where it errs.

        White space before it is consumed silently.
        """
        yield from self.skip_space()
        reader = JsonReader()
        while True:
            stop = reader.scan(self.text, self.at)
            if stop > self.at:
                tell(self.text[self.at : stop])
                self.at = stop
            if reader.done:
                return
            if reader.broken or self.ended:
                raise ParseError
            yield


def begun(text: str, start: int, markers: Sequence[str]) -> int:
    """Length of the longest end of `text[start:]` that begins, and does not complete, a marker."""
    beginnings, longest = _beginnings(tuple(markers))
    for size in range(min(longest, len(text) - start), 0, -1):
        if text[-size:] in beginnings:
            return size
    return 0


@lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """All that begins a marker, and the length of the longest."""
    found = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return found, max(map(len, found), default=0)


def _space_before(text: str, start: int, stop: int) -> int:
    """How many characters of white space end `text[start:stop]`, MAX_SPACE at most."""
    tail = text[max(start, stop - MAX_SPACE) : stop]
    return len(tail) - len(tail.rstrip())


class GeneratorParser:
    """A parser that runs a script over its tape."""

    def __init__(self, script: Callable[[IncrementalScanner], Script[None]]) -> None:
        self._tape = IncrementalScanner()
        self._script = script(self._tape)
        next(self._script, None)

    def feed(self, text: str) -> list[Event]:
        self._tape.write(text)
        next(self._script, None)
        return self._tape.take_events()

    def end(self, *, cut: bool = False) -> list[Event]:
        self._tape.ended, self._tape.cut = True, cut
        next(self._script, None)
        return self._tape.take_events()
