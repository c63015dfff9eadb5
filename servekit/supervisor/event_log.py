"""The event journal: writes events (`servekit.event_store`) to a file, without blocking.

A thread of its own writes. Between it and the event loop is a bounded queue: a slow or full disk
loses events, which are counted, and has no other effect. A file that is damaged, or of another
version, is renamed to events.db.broken, and a new file is created.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import structlog

from servekit import event_store
from servekit.event_store import FILE, TABLE, VERSION, Event

log: Any = structlog.get_logger("servekit.supervisor")

#: Events kept; and the file's largest size, whatever its content: 16 MiB in pages of 4 KiB.
MOST_EVENTS = 20_000
MOST_PAGES = 4096
#: Events that may wait for the disk.
_MOST_WAITING = 2000
_LONGEST_CHARS = 2000
#: Time from a failure to the next attempt.
_AGAIN_S = 5.0
#: How long `close` waits for the writer thread, which may hang in a disk.
_GOODBYE_S = 1.0
_INSERT = "INSERT INTO events (at, kind, model, worker, what, detail) VALUES (?, ?, ?, ?, ?, ?)"
_PRUNE = "DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?"


class Journal:
    """The event journal of one process. Drops events before `open_log` and after `close`."""

    def __init__(self, *, again_s: float = _AGAIN_S) -> None:
        self._again_s = again_s
        self._waiting: deque[Event] = deque()
        self._news = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._lost = self._lost_told = 0  # the event loop's and the thread's
        self._is_failing = False
        self._is_first = True

    # ---- called on the event loop

    def open_log(self, folder: Path) -> None:
        """Start to write events to a file in `folder`."""
        self._waiting.clear()
        self._lost = self._lost_told = 0
        self._closing, self._is_failing, self._is_first = False, False, True
        self._thread = threading.Thread(
            target=self._run, args=(folder / FILE,), name="journal", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Write the queued events, if the disk takes them within a second."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing = True
            self._news.set()
            thread.join(_GOODBYE_S)

    def record_event(
        self, kind: str, what: str = "", *, model: str = "", worker: str = "", **detail: Any
    ) -> None:
        """Record an event. Never blocks, never raises."""
        if self._thread is None:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._lost += 1
            return
        model = model or ("" if worker.startswith("gateway/") else worker.rpartition("/")[0])
        text = what if len(what) <= _LONGEST_CHARS else f"{what[:_LONGEST_CHARS]} …"
        self._waiting.append(Event(time.time(), kind, text, model, worker, detail))
        self._news.set()

    # ---- in the writer thread

    def _run(self, path: Path) -> None:
        file: sqlite3.Connection | None = None
        while True:
            if not self._waiting and not self._closing:
                self._news.wait()
            self._news.clear()
            ending = self._closing
            try:
                file = self._ready(path, file)
                self._write(file)
                self._recovered(path)
            except (sqlite3.Error, OSError, ValueError) as error:
                file = self._failed(path, file, error)
                if not ending:
                    self._wait_a_while()
            if ending:
                _close(file)
                return

    def _ready(self, path: Path, file: sqlite3.Connection | None) -> sqlite3.Connection:
        """Return the file; open it if it is not open, or if somebody has removed it."""
        if file is not None and not path.exists():
            _close(file)
            file = None
        file = file or open_file(path)
        if self._is_first:
            _note_crash(file)
            self._is_first = False
        return file

    def _write(self, file: sqlite3.Connection) -> None:
        """Write all queued events in one transaction; they leave the queue once it is committed."""
        batch, all_lost = list(self._waiting), self._lost
        waited, lost = len(batch), all_lost - self._lost_told
        if lost:
            said = f"{lost} events could not be written"
            batch.append(Event(time.time(), "gap", said, detail={"lost": lost}))
        if not batch:
            return
        with file:
            file.executemany(_INSERT, [_row(one) for one in batch])
            file.execute(_PRUNE, (MOST_EVENTS,))
        for _ in range(waited):
            self._waiting.popleft()
        self._lost_told = all_lost

    def _wait_a_while(self) -> None:
        deadline = time.monotonic() + self._again_s
        while not self._closing and (left := deadline - time.monotonic()) > 0:
            self._news.wait(left)
            self._news.clear()

    def _failed(
        self, path: Path, file: sqlite3.Connection | None, error: Exception
    ) -> sqlite3.Connection | None:
        if not self._is_failing:
            log.warning("journal_unwritable", file=str(path), reason=str(error))
        self._is_failing = True
        if _is_full(error) and file is not None and _halved(file):
            return file
        _close(file)
        if _is_broken(error):
            _put_aside(path)
        return None

    def _recovered(self, path: Path) -> None:
        if self._is_failing:
            log.info("journal_recovered", file=str(path))
        self._is_failing = False


def open_file(path: Path) -> sqlite3.Connection:
    """Open the file; create it if it does not exist. Raises sqlite3.Error."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    file = sqlite3.connect(path, timeout=5.0)
    try:
        _prepare(file)
    except BaseException:
        file.close()
        raise
    return file


def _prepare(file: sqlite3.Connection) -> None:
    # No WAL: it takes another megabyte on disk, and maps memory of a disk that may be full.
    file.execute("PRAGMA journal_mode = DELETE")
    file.execute("PRAGMA synchronous = NORMAL")
    file.execute("PRAGMA cache_size = -256")
    file.execute(f"PRAGMA max_page_count = {MOST_PAGES}")
    [version] = file.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError(f"it is of another version: {version}")
    [verdict] = file.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"it is malformed: {verdict}")
    with file:
        file.execute(TABLE)
        file.execute(f"PRAGMA user_version = {VERSION}")


def _note_crash(file: sqlite3.Connection) -> None:
    """Record a crash event if the last supervisor did not record its end."""
    query = "SELECT kind, detail FROM events WHERE kind IN ('up', 'down') ORDER BY id DESC LIMIT 1"
    last = file.execute(query).fetchone()
    if last is None or last[0] != "up":
        return
    pid = event_store.parse_details(last[1]).get("pid", "unknown")
    what = f"the supervisor before (pid {pid}) was killed, or its machine went down"
    with file:
        file.execute(_INSERT, _row(Event(time.time(), "crash", what)))


def _row(event: Event) -> tuple[Any, ...]:
    return (
        *(event.at, event.kind, _text(event.model), _text(event.worker), _text(event.what)),
        json.dumps(event.detail, default=str),
    )


def _text(text: str) -> str:
    """Replace lone surrogates, which SQLite refuses."""
    return text.encode(errors="replace").decode()


def _is_full(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _is_broken(error: Exception) -> bool:
    """Return whether the error is permanent: the file is damaged, or not an event database."""
    if isinstance(error, sqlite3.OperationalError) or not isinstance(error, sqlite3.DatabaseError):
        # a missing column means damage; other operational errors may come from the disk
        return "no such column" in str(error) or "has no column" in str(error)
    return True


def _halved(file: sqlite3.Connection) -> bool:
    """Delete the older half of the events in a file that has reached its largest size.

    Returns false where the disk itself is full. Raises nothing.
    """
    with contextlib.suppress(sqlite3.Error), file:
        file.execute("DELETE FROM events WHERE id <= (SELECT (min(id) + max(id)) / 2 FROM events)")
        return True
    return False


def _put_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"{path.name}.broken"))
    for tail in ("-journal", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}{tail}").unlink(missing_ok=True)


def _close(file: sqlite3.Connection | None) -> None:
    if file is not None:
        with contextlib.suppress(sqlite3.Error):
            file.close()


#: The journal of this process.
journal = Journal()
