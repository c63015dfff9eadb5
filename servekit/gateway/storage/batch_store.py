"""Files and batches: their records in an SQLite file that all gateways here share, and the files.

A gateway runs a batch while it holds its lease (`leases`). The result of a line, and the counts of
its batch, are one transaction. The output is written at the end, under a name that follows from the
batch's: what dies in between writes it again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from servekit.errors import RequestError
from servekit.gateway.storage.leases import LeasedStore, claim_rows
from servekit.gateway.storage.store_file import StoreFile, await_work, transaction
from servekit.protocol.access import BatchRules

Json = dict[str, Any]
_VERSION = 1
_TABLES = (
    """CREATE TABLE files (id TEXT PRIMARY KEY, key TEXT NOT NULL, purpose TEXT NOT NULL,
    name TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL NOT NULL)""",
    """CREATE TABLE batches (id TEXT PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL,
    expires REAL NOT NULL, status TEXT NOT NULL, record BLOB NOT NULL,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT '', leased_until REAL NOT NULL DEFAULT 0)""",
    """CREATE TABLE results (batch TEXT NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL,
    result BLOB NOT NULL, PRIMARY KEY (batch, line)) WITHOUT ROWID""",
    f"PRAGMA user_version = {_VERSION}",
)
_ACTIVE = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
#: The most batches that a gateway runs at once.
MOST_HELD = 32
_DAY_S = 86400.0
#: How long a file on the disk may have no record: one that is being uploaded or written.
_LOOSE_S = 3600.0


class FileNotFound(RequestError):
    """The key has no file of this id: it was deleted, or is too old. Upload it again."""

    status = 404
    code = "file_not_found"


class BatchNotFound(RequestError):
    """The key has no batch of this id, or it is too old."""

    status = 404
    code = "batch_not_found"


class TooMuchStored(RequestError):
    """The key's files hold too many bytes. Delete some, or raise server.batches.max_bytes."""

    status = 413
    code = "storage_full"


class TooManyStored(RequestError):
    """The key has too many files, or too many batches that are not done. Delete or wait for some,
    or raise the limit.
    """

    status = 429
    code = "too_many_stored"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The record of a file."""

    id: str
    key: str
    purpose: str
    name: str
    bytes: int
    created: float
    expires: float


class Batch(msgspec.Struct):
    """A batch; `record` is OpenAI's object, without what the other fields hold."""

    id: str
    key: str
    created: float
    expires: float
    status: str
    record: Json
    total: int
    completed: int
    failed: int
    bytes: int


class BatchStore(LeasedStore):
    """The files and batches in the folder `folder`, and the SQLite file beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder.with_name("batches.db")
        super().__init__(StoreFile(path, _TABLES, _VERSION, folder), "batches")
        self._outputs = StoreFile(path, _TABLES, _VERSION, folder)

    def close(self) -> None:
        self._outputs.close()
        super().close()

    def path(self, id: str) -> Path:
        """Return where the content of a file is; its id must be one of a record."""
        return self._folder / id

    def make_path(self) -> Path:
        """Make an empty file for what is being uploaded or written. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f".{secrets.token_hex(12)}"
        path.touch(mode=0o600, exist_ok=False)
        return path

    # ---- files

    async def check_room(self, key: str, rules: BatchRules) -> int:
        """Return how many bytes the key may still upload.

        Raises TooManyStored and TooMuchStored.
        """
        return await self._run(lambda db: _room(db, key, rules))

    async def add_file(self, written: Path, file: StoredFile, rules: BatchRules) -> None:
        """Add a file that is written at a path of `make_path`."""

        def insert_file(db: sqlite3.Connection) -> None:
            with transaction(db):
                if file.bytes > _room(db, file.key, rules):
                    raise _too_much(rules)
                _add_file(db, file)
                written.replace(self.path(file.id))

        await self._run(insert_file)

    async def find_file(self, id: str, key: str) -> StoredFile:
        """Return a file of the key. Raises FileNotFound."""
        rows = await self._files("id = ? AND key = ?", id, key)
        if not rows:
            raise FileNotFound(f"the key has no file {id[:100]!r}")
        return rows[0]

    async def list_files(self, key: str, purpose: str | None) -> list[StoredFile]:
        """Return the key's files, the newest first."""
        return await self._files("key = ? AND purpose = ifnull(?, purpose)", key, purpose)

    async def _files(self, where: str, *values: str | None) -> list[StoredFile]:
        query = f"SELECT * FROM files WHERE {where} AND expires > ? ORDER BY created DESC, id DESC"
        rows = await self._run(lambda db: db.execute(query, (*values, time.time())).fetchall())
        return [StoredFile(*row) for row in rows]

    async def remove_file(self, id: str) -> None:
        """Remove a file; a batch that reads it goes on to its end."""

        def delete_file(db: sqlite3.Connection) -> None:
            with transaction(db):
                if id not in _read_inputs(db):
                    # first: that makes room for the other change where the disk is full
                    self.path(id).unlink(missing_ok=True)
                db.execute("DELETE FROM files WHERE id = ?", (id,))

        await self._run(delete_file, may_use_reserve=True)

    # ---- batches, for clients

    async def add_batch(self, batch: Batch, rules: BatchRules) -> None:
        """Add a batch that is to run; of those that are done, the newest `max_files` are kept.

        Raises TooManyStored.
        """

        def insert_batch(db: sqlite3.Connection) -> None:
            with transaction(db):
                query = f"SELECT count(*) FROM batches WHERE key = ? AND {_ACTIVE}"
                [(active,)] = db.execute(query, (batch.key,))
                if active >= rules.max_batches:
                    raise TooManyStored(
                        f"{active} batches of the key are not done; wait for one, cancel one, or"
                        " raise server.batches.max_batches"
                    )
                query = "INSERT INTO batches (id, key, created, expires, status, record)"
                values = batch.id, batch.key, batch.created, batch.expires, batch.status
                db.execute(f"{query} VALUES (?, ?, ?, ?, ?, ?)", (*values, _encode(batch.record)))
                done = f"FROM batches WHERE key = ? AND NOT {_ACTIVE}"
                kept = f"SELECT id {done} ORDER BY created DESC, id DESC LIMIT ?"
                given = batch.key, batch.key, rules.max_files
                db.execute(f"DELETE {done} AND id NOT IN ({kept})", given)

        await self._run(insert_batch)

    async def find_batch(self, id: str, key: str) -> Batch:
        """Return a batch of the key. Raises BatchNotFound."""
        found = await self._run(lambda db: _batches(db, "id = ? AND key = ?", id, key))
        if not found:
            raise BatchNotFound(f"the key has no batch {id[:100]!r}")
        return found[0]

    async def list_batches(self, key: str) -> list[Batch]:
        """Return the key's batches, the newest first."""
        where = "key = ? ORDER BY created DESC, id DESC"
        return await self._run(lambda db: _batches(db, where, key))

    async def cancel_batch(self, id: str, key: str) -> Batch:
        """Begin to cancel a batch that is not done. Raises BatchNotFound."""

        def mark_cancelling(db: sqlite3.Connection) -> None:
            with transaction(db):
                where = "id = ? AND key = ? AND status IN ('validating', 'in_progress')"
                for batch in _batches(db, where, id, key):
                    _set_status(db, batch, "cancelling")

        await self._run(mark_cancelling, may_use_reserve=True)
        return await self.find_batch(id, key)

    # ---- batches, for the gateway that runs them

    async def claim_batches(self) -> list[Batch]:
        """Renew the leases of this gateway, take batches that nobody runs, and return all held."""

        def claim_held(db: sqlite3.Connection) -> list[Batch]:
            claim_rows(db, "batches", _ACTIVE, "created", self._owner, MOST_HELD)
            return _batches(db, f"owner = ? AND {_ACTIVE}", self._owner)

        return await self._run(claim_held)

    async def done_lines(self, id: str) -> set[int]:
        """Return the numbers of the lines that have a result."""
        query = "SELECT line FROM results WHERE batch = ?"
        return {line for (line,) in await self._run(lambda db: db.execute(query, (id,)).fetchall())}

    async def begin(self, batch: Batch, total: int, errors: list[Json]) -> bool:
        """Record the end of the validation. Returns whether the batch is to run."""

        def begin(db: sqlite3.Connection) -> bool:
            with transaction(db):
                for now in self._held(db, batch.id, "validating"):
                    if errors:
                        now.record["errors"] = _list_errors(errors)
                    _set_status(db, now, "failed" if errors else "in_progress")
                    db.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch.id))
                    return not errors
            return False

        return await self._run(begin)

    async def save_result(self, id: str, line: int, *, good: bool, result: bytes) -> int:
        """Keep the result of a line, once, while this gateway holds the batch.

        Returns the size of all results of the batch.
        """

        def save(db: sqlite3.Connection) -> int:
            with transaction(db):
                for now in self._held(db, id, "in_progress", "cancelling"):
                    values = id, line, good, result
                    new = db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", values)
                    if new.rowcount:
                        db.execute(
                            "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                            " bytes = bytes + ? WHERE id = ?",
                            (good, not good, len(result), id),
                        )
                    return now.bytes + len(result)
            return 0

        return await self._run(save)

    async def finish_batch(
        self, id: str, status: str, rules: BatchRules, errors: Sequence[Json] = ()
    ) -> None:
        """Write the files of a batch, which ends with this status, if this gateway holds it.

        They are written in a thread of their own: a large one takes longer than a lease, which is
        renewed meanwhile.
        """

        def write_files(db: sqlite3.Connection) -> list[tuple[str, Path, StoredFile]]:
            return [
                (kind, *written)
                for batch in self._held(db, id)
                for kind, good in (("output", 1), ("error", 0))
                if (written := self._write_output(db, batch, kind, good, rules)) is not None
            ]

        def finish(db: sqlite3.Connection) -> None:
            with transaction(db):
                for batch in self._held(db, id):
                    for kind, path, file in made:
                        _add_file(db, file)
                        path.replace(self.path(file.id))
                        batch.record[f"{kind}_file_id"] = file.id
                    if errors:
                        batch.record["errors"] = _list_errors(errors)
                    if status == "completed":
                        batch.record["finalizing_at"] = int(time.time())
                    _set_status(db, batch, status)
                    db.execute("DELETE FROM results WHERE batch = ?", (id,))

        made = await await_work(self._outputs.submit(write_files))
        try:
            await self._run(finish)
        finally:
            for _, path, _ in made:  # what another gateway has taken over, or the disk has refused
                path.unlink(missing_ok=True)

    def _held(self, db: sqlite3.Connection, id: str, *status: str) -> list[Batch]:
        """Return the batch if this gateway holds it, and it is in one of these states."""
        found = _batches(db, f"id = ? AND owner = ? AND {_ACTIVE}", id, self._owner)
        return [batch for batch in found if not status or batch.status in status]

    def _write_output(
        self, db: sqlite3.Connection, batch: Batch, kind: str, good: int, rules: BatchRules
    ) -> tuple[Path, StoredFile] | None:
        """Write the results of a kind to a path of `make_path`; None if there are none."""
        query = "SELECT result FROM results WHERE batch = ? AND good = ? ORDER BY line"
        size_bytes, path = 0, self.make_path()
        try:
            with path.open("wb") as file:
                for (result,) in db.execute(query, (batch.id, good)):
                    size_bytes += file.write(result + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if not size_bytes:
            path.unlink()
            return None
        now_s = time.time()
        id, name = f"file-{batch.id.removeprefix('batch_')}-{kind}", f"{batch.id}_{kind}.jsonl"
        expires = expiry(now_s, rules, batch.record.get("output_expires_after_s"))
        return path, StoredFile(id, batch.key, "batch_output", name, size_bytes, now_s, expires)

    async def sweep(self, rules: BatchRules) -> None:
        """Remove the files and batches that are too old, and what has no record."""

        def sweep(db: sqlite3.Connection) -> None:
            now_s = time.time()
            kept = db.execute("SELECT id FROM files WHERE expires >= ?", (now_s,))
            known = {id for (id,) in kept}
            known |= _read_inputs(db)
            # before their records: that makes room for the other change where the disk is full
            for path in self._folder.glob("*") if self._folder.exists() else ():
                with contextlib.suppress(FileNotFoundError):  # another gateway's upload is done
                    if path.name not in known and path.stat().st_mtime < now_s - _LOOSE_S:
                        path.unlink()
            with transaction(db):
                old = f"created < ? AND NOT {_ACTIVE}"
                db.execute(f"DELETE FROM batches WHERE {old}", (now_s - rules.days * _DAY_S,))
                db.execute("DELETE FROM files WHERE expires < ?", (now_s,))

        await self._run(sweep, may_use_reserve=True)


def expiry(created: float, rules: BatchRules, after_s: float | None) -> float:
    """Return when a file is removed: `after_s` after it was made, and no later than by the rules.

    Both are Unix times, s.
    """
    kept_s = rules.days * _DAY_S
    return created + (kept_s if after_s is None else min(kept_s, after_s))


def _encode(record: Json) -> str:
    return msgspec.json.encode(record).decode()


def _list_errors(errors: Sequence[Json]) -> Json:
    return {"object": "list", "data": errors}


def _room(db: sqlite3.Connection, key: str, rules: BatchRules) -> int:
    query = "SELECT count(*), ifnull(sum(bytes), 0) FROM files WHERE key = ? AND expires > ?"
    [(count, held)] = db.execute(query, (key, time.time()))
    if count >= rules.max_files:
        raise TooManyStored(
            f"the key has {count} files; delete some, or raise server.batches.max_files"
        )
    if held >= rules.max_bytes:
        raise _too_much(rules)
    return rules.max_bytes - int(held)


def _too_much(rules: BatchRules) -> TooMuchStored:
    return TooMuchStored(
        f"the key's files would hold more than {rules.max_bytes} bytes; delete some, or raise"
        " server.batches.max_bytes"
    )


def _add_file(db: sqlite3.Connection, file: StoredFile) -> None:
    values = file.id, file.key, file.purpose, file.name, file.bytes, file.created, file.expires
    db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def _batches(db: sqlite3.Connection, where: str, *values: Any) -> list[Batch]:
    columns = "id, key, created, expires, status, record, total, completed, failed, bytes"
    return list(_decode(db.execute(f"SELECT {columns} FROM batches WHERE {where}", values)))


def _read_inputs(db: sqlite3.Connection) -> set[str]:
    """Return the ids of the files that batches read which are not done."""
    return {batch.record["input_file_id"] for batch in _batches(db, _ACTIVE)}


def _decode(rows: sqlite3.Cursor) -> Iterator[Batch]:
    for id, key, created, expires, status, record, *counts in rows:
        yield Batch(id, key, created, expires, status, msgspec.json.decode(record), *counts)


def _set_status(db: sqlite3.Connection, batch: Batch, status: str) -> None:
    """Record a batch's status, and since when it has it."""
    batch.status = status
    batch.record[f"{status}_at"] = int(time.time())
    values = status, _encode(batch.record), batch.id
    db.execute("UPDATE batches SET status = ?, record = ? WHERE id = ?", values)
