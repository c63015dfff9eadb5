"""Server-sent events out of bytes that are cut anywhere.

Source: the WHATWG HTML standard, section "Interpreting an event stream": lines end in LF, CR LF or
CR; a line that begins with a colon is a comment; the data lines of an event are joined by LF; an
event that the end of the stream cuts off is dropped.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Feed it bytes as they come; it gives back the data of the events that they complete."""

    __slots__ = ("_began", "_skip_lf", "_unread")

    def __init__(self) -> None:
        self._unread = b""
        self._skip_lf = False  # the last byte was a CR, which has ended its line already
        self._began = False

    @property
    def unread(self) -> bytes:
        """What is not a whole event yet."""
        return self._unread

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event completed, in order; events without data are none."""
        if not self._began or self._skip_lf or b"\r" in data:
            data = self._plain(data)
        if self._unread:
            data = self._unread + data
        if b"\n\n" not in data and data[:1] != b"\n":
            self._unread = data
            return []
        *events, self._unread = data.split(b"\n\n")
        found = []
        for event in events:
            # What all servers send: one line, one space. Anything else is read line by line.
            if event.startswith(b"data: ") and b"\n" not in event:
                found.append(event[6:])
            elif (payload := _data_of(event)) is not None:
                found.append(payload)
        while self._unread[:1] == b"\n":  # an empty line after an empty line ends nothing
            self._unread = self._unread[1:]
        return found

    def _plain(self, data: bytes) -> bytes:
        """The same with LF as the only end of a line, and without the mark at its beginning."""
        if not self._began:
            data, self._unread = self._unread + data, b""
            if _BOM.startswith(data[:3]) and len(data) < 3:
                self._unread = data  # it may become one
                return b""
            self._began = True
            data = data.removeprefix(_BOM)
        if self._skip_lf and data[:1] == b"\n":
            data = data[1:]
            self._skip_lf = False
        if data:
            self._skip_lf = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(event: bytes) -> bytes | None:
    """The data lines of one event, joined; None without any."""
    lines = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
