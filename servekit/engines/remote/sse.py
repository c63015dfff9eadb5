"""A stream of server-sent events, from bytes however they are cut. Bounded, whatever comes.

Source: WHATWG HTML, 9.2.6. Only `data` is of interest; other fields and comments are passed over.
"""

from __future__ import annotations

#: One event: more than any answer takes at once, and little to hold for each slot.
MAX_EVENT_BYTES = 4 * 2**20
#: What a line takes here beside its text.
_LINE_BYTES = 64


class EventTooLong(Exception):
    """An event has more than MAX_EVENT_BYTES."""


class Events:
    """Cuts a stream into the data of its events."""

    def __init__(self) -> None:
        self._line = bytearray()  # the one that is not complete
        self._data: list[bytes] = []  # of the event that is not complete
        self._held = 0  # bytes that it takes

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each event they complete.

        Raises EventTooLong.
        """
        events: list[bytes] = []
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self._line += line
            self._take_line(bytes(self._line), events)
            self._line.clear()
        self._line += rest
        if len(self._line) + self._held > MAX_EVENT_BYTES:
            raise EventTooLong
        return events

    def end(self) -> list[bytes]:
        """What stood at the end without an empty line after it, as careless servers leave it."""
        events: list[bytes] = []
        self._take_line(bytes(self._line), events)
        self._take_line(b"", events)
        return events

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        line = line.removesuffix(b"\r")
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data, self._held = [], 0
        elif line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._held += len(data) + _LINE_BYTES
