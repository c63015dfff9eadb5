"""The usage of an instance by day, API key and model: an SQLite file in its run directory.

Only the supervisor writes the file (`servekit.supervisor.usage_ledger`). Any process that may read
the run directory can read it, with or without a running supervisor. Days are of the local time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

FILE = "usage.db"
VERSION = 1
TABLE = """CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY (day, key, model)) WITHOUT ROWID"""
_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one key and model in one period; an empty string stands for all of them."""

    period: str  # a day, 2026-11-24, or a month, 2026-11
    key: str
    model: str
    requests: int
    prompt_tokens: int  # cached ones included
    cached_tokens: int
    completion_tokens: int


def read_usage(
    run_dir: Path, *, by: tuple[str, ...] = ("key", "model"), monthly: bool = False, since: str = ""
) -> list[Usage]:
    """Return the usage, summed by period and these columns; [] if nothing is written yet.

    `since` is the first day. Raises sqlite3.DatabaseError for a file that is damaged.
    """
    path = run_dir / FILE
    if not path.is_file():
        return []
    period = "substr(day, 1, 7)" if monthly else "day"
    key, model = ("key" if "key" in by else "''"), ("model" if "model" in by else "''")
    query = f"""SELECT {period}, {key}, {model}, sum(requests), sum(prompt_tokens),
        sum(cached_tokens), sum(completion_tokens) FROM usage WHERE day >= ?
        GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"""
    try:
        # Not read-only: SQLite may first have to recover the journal of a killed supervisor.
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as file:
            file.execute("PRAGMA query_only = 1")
            return [Usage(*row) for row in file.execute(query, (since,))]
    except sqlite3.OperationalError:
        return []
