"""What has happened in an instance: events in an SQLite file of its run directory, and a reader.

The supervisor alone writes it (`servekit.supervisor.event_log`); whoever may read the run directory
reads it, whether a supervisor lives there or not.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "events.db"
#: PRAGMA user_version of the file.
VERSION = 1
#: The kinds of events, and when one is recorded.
KINDS = {
    "up": "The supervisor has started.",
    "down": "The supervisor has ended.",
    "crash": "The supervisor before this one ended without a word.",
    "started": "A process was started; `worker` is its name, for gateways and standbys too.",
    "ready": "A process serves.",
    "exit": "A process died or could not start: why, how many requests it had served, and when it"
    " is tried again.",
    "stalled": "A process made no progress.",
    "stopped": "A process was ended on purpose.",
    "stray": "A worker holds memory where it should not, or more than its claim.",
    "load": "A model is loaded, with the reason.",
    "unload": "A model is unloaded, with the reason (`evicted for …`).",
    "sleep": "A model is put to sleep, with the reason.",
    "wake": "A model is woken, with the reason.",
    "reload": "The file was read again: what it changed, or why it was refused.",
    "breaker": "The breaker of a model is open, half-open or closed.",
    "quarantine": "A request is refused from now on because it takes workers down; or no longer.",
    "scale": "A model has got more replicas, or fewer, with the reason.",
    "adapter": "An adapter serves, was refused, has failed, or is gone.",
    "gap": "Events could not be written: the disk was full or too slow.",
}
TABLE = """\
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
  model TEXT NOT NULL, worker TEXT NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL)"""
_COLUMNS = "id, at, kind, model, worker, what, detail"
#: How long a reader waits for a writer, which holds the file for milliseconds.
_BUSY_S = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """One of them. `worker` is "" for those of a model, `model` for those of the supervisor."""

    at: float  # Unix time, s
    kind: str
    what: str = ""  # a sentence, or a part of one
    model: str = ""
    worker: str = ""
    detail: dict[str, Any] = field(default_factory=dict)  # figures: their names tell their units
    id: int = 0  # ascending; never used twice in one file


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events; `name` is a model's or a process's, "" for all."""

    name: str = ""
    since: float = 0.0  # Unix time, s
    after: int = 0  # ids
    kinds: tuple[str, ...] = ()


def newest(folder: Path, wanted: Wanted, most: int) -> list[Event]:
    """The last `most` of them, the newest last; none where there is no file that can be read."""
    path = folder / FILE
    if not path.is_file():
        return []
    query, values = _where(wanted)
    try:
        with contextlib.closing(_opened(path)) as file:
            rows = file.execute(
                f"SELECT {_COLUMNS} FROM events WHERE {query} ORDER BY id DESC LIMIT ?",
                (*values, most),
            ).fetchall()
    except sqlite3.Error:  # the supervisor sees to a file that is broken
        return []
    return [event(row) for row in reversed(rows)]


def names(folder: Path) -> list[str]:
    """Of the models and processes that some event is about."""
    path = folder / FILE
    if not path.is_file():
        return []
    query = "SELECT model FROM events UNION SELECT worker FROM events"
    try:
        with contextlib.closing(_opened(path)) as file:
            return sorted(str(name) for (name,) in file.execute(query) if name)
    except sqlite3.Error:
        return []


def _opened(path: Path) -> sqlite3.Connection:
    # Not read-only: what a supervisor that was killed has left has to be gone through first.
    file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)
    file.execute("PRAGMA query_only = 1")
    return file


def event(row: tuple[Any, ...]) -> Event:
    """A row of the table. What somebody else has put there does no harm."""
    number, at, kind, model, worker, what, detail = row
    told = str(kind), str(what), str(model), str(worker)
    return Event(float(at), *told, detail=details(detail), id=int(number))


def details(text: str) -> dict[str, Any]:
    """The figures of an event, as they stand in the file."""
    found: Any = None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _where(wanted: Wanted) -> tuple[str, list[Any]]:
    parts: list[str] = ["at >= ?", "id > ?"]
    values: list[Any] = [wanted.since, wanted.after]
    if wanted.name:
        parts.append("(model = ? OR worker = ?)")
        values += [wanted.name] * 2
    if wanted.kinds:
        parts.append(f"kind IN ({', '.join('?' for _ in wanted.kinds)})")
        values += wanted.kinds
    return " AND ".join(parts), values
