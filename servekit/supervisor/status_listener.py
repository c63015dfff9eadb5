"""The interface for watching an instance, which the command line's display implements."""

from __future__ import annotations

from typing import Protocol

from servekit.protocol.messages import Status


class StatusListener(Protocol):
    """An observer of an instance, such as the command line's display."""

    def changed(self, status: Status) -> None:
        """Show the whole state; called at most once per event-loop tick."""

    def line(self, name: str, text: str) -> None:
        """Show a line that a child wrote."""
