"""The events that a parser finds in a model's text."""

from __future__ import annotations

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
