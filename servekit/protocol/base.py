"""Base classes of all structs that cross a process boundary."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what messages carry: no tag."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """The base of all messages; the tag is the class name."""
