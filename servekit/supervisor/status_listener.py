"""Who watches an instance: the command line's display, or nobody."""

from __future__ import annotations

from typing import Protocol

from servekit.protocol.messages import Status


class StatusListener(Protocol):
    """Who watches an instance: the command line's display."""

    def changed(self, status: Status) -> None:
        """The whole state, at most once per turn of the event loop."""

    def line(self, name: str, text: str) -> None:
        """A line that a child wrote."""
