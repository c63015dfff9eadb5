"""What a parser finds in a model's text, and what a parser is."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer itself."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Event = Text | Reasoning | ToolCallStart | CallArguments


class Parser(Protocol):
    """Takes a model's text as it comes and says what it is, however the pieces are cut."""

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; return what has become certain."""

    def end(self, *, cut: bool = False) -> list[Event]:
        """Return what was held back: no further text comes.

        `cut`: the text was cut off, by a limit or a stop string. Then what has begun a marker, or
        a call whose name is not known yet, is dropped: it is no part of the answer.
        """
