"""A parser of server-sent events with bounded memory, for bytes split anywhere.

Source: WHATWG HTML, 9.2.6. Only `data` is used; other fields and comments are skipped.
"""

from __future__ import annotations

#: Limit of one event: more than any answer needs, and little memory for each slot.
MAX_EVENT_BYTES = 4 * 2**20
#: Memory of a line in addition to its text.
_LINE_BYTES = 64


class EventTooLong(Exception):
    """An event has more than MAX_EVENT_BYTES."""


class Events:
    """A splitter of a stream into the data of its events."""

    def __init__(self) -> None:
        self._line = bytearray()  # the incomplete line
        self._data: list[bytes] = []  # of the incomplete event
        self._held = 0  # bytes of the incomplete event

    def feed(self, piece: bytes) -> list[bytes]:
        """Add bytes; return the data of each completed event.

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
        """Return the data of a last event that lacks its empty line, as some servers send it."""
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
