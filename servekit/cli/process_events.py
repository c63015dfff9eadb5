"""What the supervisor has noted of processes, as lines for `servekit logs`: many a worker writes
nothing itself, and how it began and ended is told by its supervisor alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from servekit.cli.events import figures
from servekit.event_store import Event, Wanted, newest
from servekit.log_files import Line, is_of

_KINDS = ("started", "ready", "stalled", "exit", "stopped")
_WARNINGS = ("stalled", "exit")
#: Events looked through: those of other processes stand among them.
_MOST = 10_000


def lines(folder: Path, name: str, most: int) -> list[Line]:
    """The last ones of a process or a model ("": of all), the newest last."""
    told = [_line(one) for one in newest(folder, Wanted(kinds=_KINDS), _MOST) if _is_of(one, name)]
    return told[len(told) - min(most, len(told)) :]


class Follower:
    """Tells what is noted from now on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._after = Wanted(kinds=_KINDS)
        self._pass_by(newest(folder, self._after, 1))

    def lines(self) -> Iterator[Line]:
        """What has come since the last time."""
        found = newest(self._folder, self._after, _MOST)
        self._pass_by(found)
        yield from (_line(one) for one in found if _is_of(one, self._name))

    def _pass_by(self, found: list[Event]) -> None:
        if found:
            self._after = replace(self._after, after=found[-1].id)


def _is_of(event: Event, name: str) -> bool:
    return bool(event.worker) and is_of(event.worker, name)


def _line(event: Event) -> Line:
    """In the form of our own log, so that it has a time and a level."""
    at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    said = ", ".join(filter(None, (event.what, figures(event))))
    line = {
        "event": f"{event.kind}: {said}" if said else event.kind,
        "level": "warning" if event.kind in _WARNINGS else "info",
        "timestamp": at,
    }
    return Line(at, event.worker, json.dumps(line))
