"""A parser of server-sent events from arbitrary pieces of bytes.

Source: the WHATWG HTML standard, section "Interpreting an event stream": lines end in LF, CR LF or
CR; a line that begins with a colon is a comment; the data lines of an event are joined by LF; an
event that the end of the stream cuts off is dropped.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class EventTooLong(Exception):
    """An event exceeds the limit."""


class EventStream:
    """An incremental parser, which returns the data of completed events.

    `max_event_bytes` limits the memory of an event that does not end; without it there is no limit.
    """

    __slots__ = ("_began", "_most_bytes", "_skip_lf", "_unread")

    def __init__(self, max_event_bytes: int | None = None) -> None:
        self._most_bytes = max_event_bytes
        self._unread = bytearray()
        self._skip_lf = False  # the last byte was a CR, which already ended its line
        self._began = False

    @property
    def unread(self) -> bytes:
        """Return the bytes of an incomplete event."""
        return bytes(self._unread)

    def read_events(self, data: bytes) -> list[bytes]:
        """Return the data of each completed event, in order; events without data are skipped.

        Raises EventTooLong.
        """
        if not self._began or self._skip_lf or b"\r" in data:
            data = self._normalize(data)
        if self._unread:
            searched = len(self._unread) - 1
            self._unread += data
            if self._unread.find(b"\n\n", searched) < 0:
                self._check_size()
                return []
            data = bytes(self._unread)
        elif b"\n\n" not in data and data[:1] != b"\n":
            self._unread += data
            self._check_size()
            return []
        *events, rest = data.split(b"\n\n")
        found = []
        for event in events:
            # The fast path for the usual form: one line, one space.
            if event.startswith(b"data: ") and b"\n" not in event:
                found.append(event[6:])
            elif (payload := _data_of(event)) is not None:
                found.append(payload)
        self._unread = bytearray(rest.lstrip(b"\n"))  # further empty lines end no event
        self._check_size()
        return found

    def end(self) -> list[bytes]:
        """Return the data of a last event that lacks its empty line, as some servers send it."""
        return self.read_events(b"\n\n\n")

    def _check_size(self) -> None:
        if self._most_bytes is not None and len(self._unread) > self._most_bytes:
            raise EventTooLong

    def _normalize(self, data: bytes) -> bytes:
        """Normalise line ends to LF, and drop the byte order mark at the beginning."""
        if not self._began:
            data, self._unread = bytes(self._unread) + data, bytearray()
            if _BOM.startswith(data[:3]) and len(data) < 3:
                self._unread += data  # possibly a partial mark
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
    """Return the joined data lines of one event; None without any."""
    lines = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
