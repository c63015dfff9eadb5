"""The event journal of an instance: an SQLite file in its run directory, and its reader.

Only the supervisor writes the file (`servekit.supervisor.event_log`). Any process that may read
the run directory can read it, with or without a running supervisor.
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
#: Event kinds, and when each is recorded.
KINDS = {
    "up": "The supervisor has started.",
    "down": "The supervisor has ended.",
    "crash": "The previous supervisor was killed, or its machine went down.",
    "started": "A process was started; `worker` is its name, for gateways and standbys too.",
    "ready": "A process serves.",
    "exit": "A process died or could not start: why, how many requests it had served, and when it"
    " is tried again.",
    "stalled": "A process made no progress.",
    "stopped": "A process was ended on purpose.",
    "stray": "A worker holds memory on a GPU that is not its own, or more than its claim.",
    "load": "A model is loaded, with the reason.",
    "unload": "A model is unloaded, with the reason (`evicted for …`).",
    "sleep": "A model is put to sleep, with the reason.",
    "wake": "A model is woken, with the reason.",
    "reload": "The configuration was reloaded, or refused; with the changes, or the reason.",
    "breaker": "The breaker of a model is open, half-open or closed.",
    "quarantine": "A request is refused from now on because it kills workers, or is allowed again.",
    "scale": "A model has got more replicas, or fewer, with the reason.",
    "adapter": "An adapter serves, was refused, has failed, or was removed.",
    "gap": "Events could not be written: the disk was full or too slow.",
}
TABLE = """\
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
  model TEXT NOT NULL, worker TEXT NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL)"""
_COLUMNS = "id, at, kind, model, worker, what, detail"
#: SQLite busy timeout of a reader; a writer holds the file for milliseconds.
_BUSY_S = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `worker` is "" in events of a model; `model` is "" in those of the supervisor."""

    at: float  # Unix time, s
    kind: str
    what: str = ""  # a sentence, or a part of one
    model: str = ""
    worker: str = ""
    detail: dict[str, Any] = field(default_factory=dict)  # figures; the unit is in the name
    id: int = 0  # ascending; never used twice in one file


@dataclass(frozen=True, slots=True)
class EventFilter:
    """A filter for events; `name` is a model's or a process's name, "" for all."""

    name: str = ""
    since: float = 0.0  # Unix time, s
    after: int = 0  # ids
    kinds: tuple[str, ...] = ()


def newest_events(folder: Path, wanted: EventFilter, most: int) -> list[Event]:
    """Return the last `most` matching events in ascending order; [] if no file is readable."""
    path = folder / FILE
    if not path.is_file():
        return []
    query, values = _where_clause(wanted)
    try:
        with contextlib.closing(_open_store(path)) as file:
            rows = file.execute(
                f"SELECT {_COLUMNS} FROM events WHERE {query} ORDER BY id DESC LIMIT ?",
                (*values, most),
            ).fetchall()
    except sqlite3.Error:  # the supervisor repairs a corrupt file
        return []
    return [event_of_row(row) for row in reversed(rows)]


def event_names(folder: Path) -> list[str]:
    """Return the sorted names of all models and processes that have events."""
    path = folder / FILE
    if not path.is_file():
        return []
    query = "SELECT model FROM events UNION SELECT worker FROM events"
    try:
        with contextlib.closing(_open_store(path)) as file:
            return sorted(str(name) for (name,) in file.execute(query) if name)
    except sqlite3.Error:
        return []


def _open_store(path: Path) -> sqlite3.Connection:
    # Not read-only: SQLite may first have to recover the journal of a killed supervisor.
    file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S)
    file.execute("PRAGMA query_only = 1")
    return file


def event_of_row(row: tuple[Any, ...]) -> Event:
    """Convert a row of the table to an Event. Unexpected contents do no harm."""
    number, at, kind, model, worker, what, detail = row
    told = str(kind), str(what), str(model), str(worker)
    return Event(float(at), *told, detail=parse_details(detail), id=int(number))


def parse_details(text: str) -> dict[str, Any]:
    """Parse the JSON figures of an event; return {} if they are malformed."""
    found: Any = None
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _where_clause(wanted: EventFilter) -> tuple[str, list[Any]]:
    parts: list[str] = ["at >= ?", "id > ?"]
    values: list[Any] = [wanted.since, wanted.after]
    if wanted.name:
        parts.append("(model = ? OR worker = ?)")
        values += [wanted.name] * 2
    if wanted.kinds:
        parts.append(f"kind IN ({', '.join('?' for _ in wanted.kinds)})")
        values += wanted.kinds
    return " AND ".join(parts), values
