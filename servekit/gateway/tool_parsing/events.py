"""The events that a parser finds in a model's text, and the parser protocol."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of the model's reasoning before the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a tool call. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Event = Text | Reasoning | ToolCallStart | CallArguments


class Parser(Protocol):
    """Converts a model's text to events that do not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; return the events that no further text can change."""

    def end(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the text that was held back: no further text follows.

        With `cut`, a limit or a stop string ended the text. Then the beginning of a marker, or a
        call without a complete name, is dropped: it is no part of the answer.
        """
