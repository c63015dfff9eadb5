"""An SQLite file that all gateways of a machine share.

Each connection has a thread of its own. A file that is damaged, or of another version, is put
aside; on a full disk nothing is kept, and the log says so. Gateways open the file, and put it
aside, one at a time, and open it again where another is in its place.

SQLite needs room to delete. A second file, `.reserve`, keeps some, so that what is stored on a full
disk can be deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from servekit.errors import RequestError

log: Any = structlog.get_logger("servekit.gateway")

_T = TypeVar("_T")
_BUSY_S = 5.0
#: How long the end of a gateway waits for what is to be written.
_GOODBYE_S = 2.0
#: Deleting 10 MB takes 54 kB of SQLite's log, without a vacuum.
_RESERVE_BYTES = 2**20
#: The pages that are given back to the disk at once, and pass through the log.
_VACUUM_PAGES = 64
#: As `PRAGMA auto_vacuum` tells it.
_INCREMENTAL = 2


class ResponsesUnavailable(RequestError):
    """Stored responses, files and batches cannot be read or changed now. Try again; the log has the
    reason."""

    status = 503
    code = "responses_unavailable"


async def await_work(work: Future[_T]) -> _T:
    """Return what the thread of a file returns. Raises ResponsesUnavailable."""
    try:
        return await asyncio.wrap_future(work)
    except (sqlite3.Error, OSError) as error:
        raise ResponsesUnavailable(f"what is stored cannot be reached now: {error}") from None


class StoreFile:
    """A connection to the SQLite file at `path`, in a thread of its own.

    `tables` are the statements that make a new file, or bring one of an earlier version up to
    `version`, its `user_version`. What is in `folder` is nothing without the file.
    """

    def __init__(
        self, path: Path, tables: Sequence[str], version: int, folder: Path | None = None
    ) -> None:
        self._path, self._folder = path, folder
        self._reserve = path.with_name(f"{path.name}.reserve")
        self._tables, self._version = tables, version
        self._file: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # of the file that is open, or was
        self._thread = ThreadPoolExecutor(1, "responses")
        self._failing = False

    def submit(
        self, work: Callable[[sqlite3.Connection], _T], *, may_use_reserve: bool = False
    ) -> Future[_T]:
        """Run `work` in the thread; its future raises sqlite3.Error and OSError.

        On a full disk, work that frees room may use the reserve.
        """
        return self._thread.submit(self._run, work, may_use_reserve)

    def close(self) -> None:
        """Run what is submitted, for two seconds at most, and close the file."""
        closed = self._thread.submit(self._close)
        futures.wait([closed], _GOODBYE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def warn(self, reason: str) -> None:
        """Log that the file cannot be written, unless that was the last that was known."""
        if not self._failing:
            log.warning("responses_unwritable", file=str(self._path), reason=reason)
        self._failing = True

    # ---- in the thread

    def _run(self, work: Callable[[sqlite3.Connection], _T], may_use_reserve: bool) -> _T:
        try:
            try:
                done = self._run_once(work)
            except sqlite3.OperationalError:
                if not may_use_reserve:
                    raise
                done = self._run_in_reserve(work)
        except (sqlite3.Error, OSError) as error:
            self.warn(str(error))
            self._close()
            if _is_damage(error):
                with contextlib.suppress(OSError), _locked(self._path):
                    self._put_aside()
            raise
        self._failing = False
        return done

    def _run_once(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        if self._file is None or _identify(self._path) != self._identity:
            self._close()
            with _locked(self._path):
                self._file = self._open()
                self._make_reserve()
        return work(self._file)

    def _run_in_reserve(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run work that frees room, and give the disk what it has freed, in small steps.

        At once, all of it would pass through SQLite's log, which is longer than the reserve then.
        """
        self._close()
        self._reserve.unlink(missing_ok=True)
        try:
            with _locked(self._path):
                self._file = file = self._open()
            file.execute("PRAGMA secure_delete = FAST")
            file.execute("PRAGMA auto_vacuum = INCREMENTAL")
            done = work(file)
            with contextlib.suppress(sqlite3.Error):  # the disk gets it later
                _vacuum(file)
        finally:
            self._close()
            self._make_reserve()
        return done

    def _make_reserve(self) -> None:
        try:
            self._reserve.touch(mode=0o600)
            with self._reserve.open("r+b") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, _RESERVE_BYTES)
        except OSError:  # no room for it now
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        self._path.touch(mode=0o600)
        self._identity = _identify(self._path)
        file = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            [(version,)] = file.execute("PRAGMA user_version")
            [(tables,)] = file.execute("SELECT count(*) FROM sqlite_master")
            if tables and not 0 < version <= self._version:
                raise sqlite3.DatabaseError(f"it is of another version: {version}")
            if not tables:
                file.execute("PRAGMA auto_vacuum = FULL")
                file.execute("PRAGMA journal_mode = WAL")  # no wait for the disk at each response
            file.execute("PRAGMA synchronous = NORMAL")
            if file.execute("PRAGMA auto_vacuum").fetchone() == (_INCREMENTAL,):
                with contextlib.suppress(sqlite3.Error):  # the disk is full yet
                    file.execute("PRAGMA auto_vacuum = FULL")
            if version < self._version:
                with transaction(file):
                    for statement in self._tables:
                        file.execute(statement)
        except sqlite3.Error:
            file.close()
            raise
        return file

    def _put_aside(self) -> None:
        """Rename the damaged file and its folder, unless another gateway has done so."""
        if _identify(self._path) != self._identity:
            return
        if self._folder is not None and self._folder.exists():
            aside = self._folder.with_name(f"{self._folder.name}.broken")
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.replace(aside)
        for end in ("-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        self._path.replace(self._path.with_name(f"{self._path.name}.broken"))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(sqlite3.Error):
                file.close()


def _vacuum(file: sqlite3.Connection) -> None:
    """Give the disk the pages that are free, some at a time. Raises sqlite3.Error."""
    file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    [(free,)] = file.execute("PRAGMA freelist_count")
    for _ in range(0, free, _VACUUM_PAGES):
        # not by `execute`, which takes one step of the statement, and so one page
        file.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _identify(path: Path) -> tuple[int, int] | None:
    """Return which file stands at `path`; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the gateways that open the file, or put it aside."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_damage(error: Exception) -> bool:
    """Return whether SQLite cannot read the file: its subclasses are of other faults."""
    return type(error) is sqlite3.DatabaseError


@contextlib.contextmanager
def transaction(file: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Write all that is within, or nothing; after "BEGIN" it is read as of one moment."""
    file.execute(begin)
    try:
        yield
        file.execute("COMMIT")
    except BaseException:
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise
