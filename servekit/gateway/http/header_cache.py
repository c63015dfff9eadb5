"""The head of a request that has been parsed, to know the next one by.

A client that keeps its connection sends the same head again and again; only the length of the body
is another. What is the same, byte for byte, was parsed and checked before: a seventh of a short
request's time is saved.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: A longer one is not kept: each connection keeps one, also of clients that mean harm.
MOST_BYTES = 8 * 1024
_END = b"\r\n\r\n"
_length = re.compile(rb"\r\ncontent-length: ?(\d{1,10})(?=\r\n)", re.IGNORECASE)


class Head(NamedTuple):
    """A head around the digits of its content-length."""

    before: bytes
    after: bytes  # with the empty line

    @classmethod
    def of(cls, data: bytes) -> Head | None:
        """That of a request that is whole, and all that `data` is; None for what is not."""
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
        """The body of a request that is whole and has this head; None for any other."""
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
