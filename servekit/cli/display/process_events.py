"""Process events of the supervisor, as lines for `servekit logs`.

Many workers write nothing themselves, so that only their supervisor reports starts and ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from servekit.cli.events import format_figures
from servekit.event_store import Event, EventFilter, newest_events
from servekit.log_files import LogLine, is_of

_KINDS = ("started", "ready", "stalled", "exit", "stopped")
_WARNINGS = ("stalled", "exit")
#: Maximum events per query, including those of other processes.
_MOST = 10_000


def last_lines(folder: Path, name: str, most: int) -> list[LogLine]:
    """Return the last events of a process or a model ("": of all), the newest last."""
    told = [
        _format_event(one)
        for one in newest_events(folder, EventFilter(kinds=_KINDS), _MOST)
        if _is_of(one, name)
    ]
    return told[len(told) - min(most, len(told)) :]


class Follower:
    """A reader of events from now on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._after = EventFilter(kinds=_KINDS)
        self._pass_by(newest_events(folder, self._after, 1))

    def lines(self) -> Iterator[LogLine]:
        """Yield the events since the last call."""
        found = newest_events(self._folder, self._after, _MOST)
        self._pass_by(found)
        yield from (_format_event(one) for one in found if _is_of(one, self._name))

    def _pass_by(self, found: list[Event]) -> None:
        if found:
            self._after = replace(self._after, after=found[-1].id)


def _is_of(event: Event, name: str) -> bool:
    return bool(event.worker) and is_of(event.worker, name)


def _format_event(event: Event) -> LogLine:
    """Format an event as a line of servekit's own log, so that it has a time and a level."""
    at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    said = ", ".join(filter(None, (event.what, format_figures(event))))
    line = {
        "event": f"{event.kind}: {said}" if said else event.kind,
        "level": "warning" if event.kind in _WARNINGS else "info",
        "timestamp": at,
    }
    return LogLine(at, event.worker, json.dumps(line))
