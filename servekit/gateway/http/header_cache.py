"""The head of the last parsed request, by which the next request is recognised without parsing.

A client that keeps its connection sends the same head again and again; only the body's length
changes. A head that is otherwise the same, byte for byte, has been parsed and checked before.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: Longer heads are not kept: each connection keeps one, and clients may be malicious.
MOST_BYTES = 8 * 1024
_END = b"\r\n\r\n"
_length = re.compile(rb"\r\ncontent-length: ?(\d{1,10})(?=\r\n)", re.IGNORECASE)


class Head(NamedTuple):
    """A request head, split around the digits of its content-length."""

    before: bytes
    after: bytes  # including the empty line

    @classmethod
    def of(cls, data: bytes) -> Head | None:
        """Return the head of `data` if that is exactly one complete request, else None."""
        end = data.find(_END) + len(_END)
        found = _length.findall(data, 0, end)
        if (
            not len(_END) <= end <= MOST_BYTES
            or len(found) != 1
            or end + int(found[0]) != len(data)
        ):
            return None
        at = _length.search(data)
        assert at is not None
        return cls(data[: at.start(1)], data[at.end(1) : end])

    def body_of(self, data: bytes) -> bytes | None:
        """Return the body of `data` if that is one complete request with this head, else None."""
        before, after = self
        if not data.startswith(before):
            return None
        begin = len(before)
        at = data.find(b"\r", begin, begin + 11)
        if at <= begin or not data.startswith(after, at):
            return None
        digits, end = data[begin:at], at + len(after)
        if not digits.isdigit() or int(digits) != len(data) - end:
            return None
        return data[end:]
