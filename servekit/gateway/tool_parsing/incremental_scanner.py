"""An incremental scanner over a model's text, and the scripts that read it.

A script is a generator. It reads as if the whole text were there, and yields when it needs more. It
decides only what no further text can change, so its joined events do not depend on how the text was
cut into pieces. It can rewind to a mark that it has set.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from servekit.gateway.tool_parsing.events import Event, Reasoning, Text
from servekit.gateway.tool_parsing.json_text import JsonReader

T = TypeVar("T")
Script = Generator[None, None, T]

#: The most white-space characters that belong to a marker.
MAX_SPACE = 32
#: The most characters that are held back before they are known to be a call.
MAX_HELD = 65_536
MAX_NAME = 256
#: The least characters at the end of cut-off text that count as the beginning of a marker: a single
#: character, such as "<" or "[", is as likely to be text.
LEAST_OF_MARKER = 2
#: Besides letters and digits of any language.
_IN_NAME = frozenset("_.:/-")


class ParseError(Exception):
    """The text does not match what the script expects."""


class IncrementalScanner:
    """Text that was received and not yet consumed, and the events made of consumed text."""

    __slots__ = ("_mark", "at", "cut", "ended", "events", "finding", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # index into `text` of the first character not consumed
        self.ended = False
        self.cut = False  # a limit or a stop string ended the text
        self.events: list[Event] = []
        #: While `read_until_marker` waits: the first letters of its markers, and its `tell`.
        self.finding: tuple[frozenset[str], Callable[[str], None]] | None = None
        self._mark: int | None = None

    # ---- for the parser

    def append_text(self, text: str) -> None:
        """Append text, and drop the consumed text that no rewind can reach."""
        cut = self.at if self._mark is None else self._mark
        self.text = self.text[cut:] + text
        self.at -= cut
        if self._mark is not None:
            self._mark = 0

    def pass_on(self, text: str) -> bool:
        """Consume text that begins no marker; return False if that is not sure.

        Nearly all text within an answer is such text, and resuming the script costs more.
        """
        if self.finding is None or self._mark is not None or self.at < len(self.text):
            return False
        letters, tell = self.finding
        if not letters.isdisjoint(text) or text[-1:].isspace():
            return False
        tell(text)
        return True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    # ---- marks

    def mark(self) -> None:
        self._mark = self.at

    def drop_mark(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Move back to the mark, if there is one, and remove the mark."""
        if self._mark is not None:
            self.at, self._mark = self._mark, None

    def marked(self) -> str:
        """Return the text read since the mark."""
        return "" if self._mark is None else self.text[self._mark : self.at]

    def limit_held_text(self, more: int = 0) -> None:
        """Raise ParseError if too much text is held back since the mark."""
        if self._mark is not None and self.at + more - self._mark > MAX_HELD:
            raise ParseError

    # ---- output

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def emit_text(self, text: str, kind: type[Text] | type[Reasoning] = Text) -> None:
        """Emit text, joined to the previous event if that has the same kind."""
        if not text:
            return
        if self.events and isinstance(last := self.events[-1], kind):
            self.events[-1] = kind(last.text + text)
        else:
            self.events.append(kind(text))

    # ---- reading

    def peek(self) -> Script[str]:
        """Return the next character; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def take_marker(self, *markers: str) -> Script[str]:
        """Consume and return the marker of `markers` that comes next; return "" if none does."""
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
        """Consume a marker like `take_marker`; raise ParseError if none comes next."""
        found = yield from self.take_marker(*markers)
        if not found:
            raise ParseError
        return found

    def skip_space(self, limit: int = MAX_HELD) -> Script[str]:
        """Consume at most `limit` characters of white space; return the next character."""
        while True:
            following = yield from self.peek()
            if not following.isspace() or limit <= 0:
                return following
            self.at += 1
            limit -= 1

    def read_name(self) -> Script[str]:
        """Consume and return the name of a tool or argument, with white space around it.

        Raises ParseError if there is no name.
        """
        yield from self.skip_space()
        name = ""
        while (following := (yield from self.peek())) in _IN_NAME or following.isalnum():
            self.at += 1
            name += following
            if len(name) > MAX_NAME:
                raise ParseError
        if not name:
            raise ParseError
        yield from self.skip_space()
        return name

    def take_end(self, marker: str) -> Script[bool]:
        """Consume a closing marker, or the part of it that the end of the text has left."""
        while True:
            rest = self.text[self.at : self.at + len(marker)]
            if rest == marker or (self.ended and marker.startswith(rest)):
                self.at += len(rest)
                return True
            if not marker.startswith(rest):
                return False
            yield

    def read_until_marker(
        self, markers: Sequence[str], tell: Callable[[str], None], *, strip: bool = True
    ) -> Script[str]:
        """Consume all text before the first of `markers`, hand it to `tell`, and return the marker.

        With `strip`, white space before the marker belongs to the marker. Afterwards the scanner is
        before that white space. Returns "" at the end of the text.
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
            self.finding = _first_letters(tuple(markers)), tell
            yield
            self.finding = None

    def _held_at_end(self, start: int, markers: Sequence[str]) -> int:
        """Return the number of characters at the end of the text that may begin a marker."""
        if self.ended and not self.cut:
            return 0
        size = count_begun(self.text, start, markers)
        return 0 if self.cut and size < LEAST_OF_MARKER else size

    def read_through_marker(self, *markers: str) -> Script[tuple[str, str]]:
        """Consume all text before the first of `markers` and the marker; return both.

        Raises ParseError if no marker comes.
        """
        pieces: list[str] = []

        def collect_text(text: str) -> None:
            pieces.append(text)
            self.limit_held_text(len(text))

        found = yield from self.read_until_marker(markers, collect_text, strip=False)
        if not found:
            raise ParseError
        self.at += len(found)
        return "".join(pieces), found

    def json(self, tell: Callable[[str], None]) -> Script[None]:
        """Consume a JSON value and hand it to `tell` as it arrives, without leading white space.

        Raises ParseError if the text is not JSON.
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


def count_begun(text: str, start: int, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text[start:]` that is an incomplete marker."""
    beginnings, longest = _list_prefixes(tuple(markers))
    for size in range(min(longest, len(text) - start), 0, -1):
        if text[-size:] in beginnings:
            return size
    return 0


@lru_cache(maxsize=256)
def _first_letters(markers: tuple[str, ...]) -> frozenset[str]:
    return frozenset(marker[0] for marker in markers)


@lru_cache(maxsize=256)
def _list_prefixes(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return all proper prefixes of markers, and the length of the longest."""
    found = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return found, max(map(len, found), default=0)


def _space_before(text: str, start: int, stop: int) -> int:
    """Return how many white-space characters, up to MAX_SPACE, end `text[start:stop]`."""
    tail = text[max(start, stop - MAX_SPACE) : stop]
    return len(tail) - len(tail.rstrip())


class Parser:
    """Converts a model's text to events that do not depend on how the text was cut into pieces.

    It runs a script over its scanner.
    """

    def __init__(self, script: Callable[[IncrementalScanner], Script[None]]) -> None:
        self._scanner = IncrementalScanner()
        self._script = script(self._scanner)
        next(self._script, None)

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; return the events that no further text can change."""
        if not self._scanner.pass_on(text):
            self._scanner.append_text(text)
            next(self._script, None)
        return self._scanner.take_events()

    def end(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the text that was held back: no further text follows.

        With `cut`, a limit or a stop string ended the text. Then the beginning of a marker, or a
        call without a complete name, is dropped: it is no part of the answer.
        """
        self._scanner.ended, self._scanner.cut = True, cut
        next(self._script, None)
        return self._scanner.take_events()
