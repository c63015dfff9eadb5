"""The usage by day, key and model: sums of what gateways report, kept in a file across restarts.

A thread of its own writes, every few seconds; a disk that is slow or full delays nothing, and what
cannot be written is tried again. A killed supervisor loses the last seconds. From the sums follow
the token budgets of keys: a key that has used its budget up is told to the gateways, which refuse
its requests until the next day or month.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import structlog

from servekit.config.sections.access import KeyConfig
from servekit.protocol.access import KeyBudgets, SpentBudget
from servekit.protocol.control.metrics_messages import Series
from servekit.usage_store import FILE, TABLE, VERSION, Usage, read_usage

log: Any = structlog.get_logger("servekit.supervisor")

WRITE_EVERY_S = 3.0
#: Days that are kept, of those with requests: a clock that is wrong for a while ages none.
MOST_DAYS = 800
_GOODBYE_S = 2.0
#: The place of each metric in the sums.
_FIGURES = {
    "servekit_requests_total": 0,
    "servekit_prompt_tokens_total": 1,
    "servekit_cached_prompt_tokens_total": 2,
    "servekit_completion_tokens_total": 3,
}
_ADD = """INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (day, key, model) DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens"""
_PRUNE = """DELETE FROM usage WHERE day <
    (SELECT min(day) FROM (SELECT DISTINCT day FROM usage ORDER BY day DESC LIMIT ?))"""

Sums = dict[tuple[str, str, str], list[int]]  # by day, key and model


class UsageLedger:
    """The usage of one instance. Counts only in memory before `open_store` and after `close`."""

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        self._now = now
        self._pending: Sums = {}
        self._lock = threading.Lock()
        self._day = self._latest = ""  # today, and the latest day that has been counted
        self._run_dir: Path | None = None
        self._today: defaultdict[str, int] = defaultdict(int)  # tokens by key
        self._month: defaultdict[str, int] = defaultdict(int)
        #: Set once there is something to write, or at the end.
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    # ---- called on the event loop

    def open_store(self, run_dir: Path) -> None:
        """Read the sums of this month, and start to write."""
        self._run_dir = run_dir
        self._day = self._latest = self._now().date().isoformat()
        self._read_sums(run_dir)
        self._closing.clear()
        self._thread = threading.Thread(
            target=self._run, args=(run_dir / FILE,), name="usage", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Write what is pending, if the disk takes it within two seconds."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            self._news.set()
            thread.join(_GOODBYE_S)

    def add(self, series: Iterable[Series]) -> None:
        """Add what a gateway has counted since its last report."""
        self._turn_page()
        with self._lock:
            for one in series:
                if (at := _FIGURES.get(one.metric)) is not None:
                    model, _, key = one.labels[:3]
                    count = int(one.figures[0])
                    self._pending.setdefault((self._day, key, model), [0, 0, 0, 0])[at] += count
                    if at in (1, 3):
                        self._today[key] += count
                        self._month[key] += count
            if self._pending:
                self._news.set()

    def _turn_page(self) -> None:
        """Begin the sums of a new day, and of a new month."""
        today = self._now().date()
        if (day := today.isoformat()) == self._day:
            return
        follows = self._latest == (today - timedelta(days=1)).isoformat() == self._day
        before, self._day, self._latest = self._day, day, max(day, self._latest)
        self._today.clear()
        if day[:7] != before[:7]:
            self._month.clear()
        if self._run_dir is not None and not follows:  # the clock was set, or we were suspended
            self._read_sums(self._run_dir)

    def _read_sums(self, run_dir: Path) -> None:
        """Read the tokens of this day and of its month, with those that wait to be written."""
        self._today.clear()
        self._month.clear()
        rows: list[Usage] = []
        with contextlib.suppress(sqlite3.DatabaseError):  # damaged: `_write` puts it aside
            rows = read_usage(run_dir, by=("key",), since=f"{self._day[:7]}-01")
        found = [(row.period, row.key, row.prompt_tokens + row.completion_tokens) for row in rows]
        with self._lock:
            waiting = list(self._pending.items())
        found += [(day, key, sums[1] + sums[3]) for (day, key, _), sums in waiting]
        for day, key, tokens in found:
            if day[:7] == self._day[:7]:
                self._month[key] += tokens
            if day == self._day:
                self._today[key] += tokens

    def find_spent(self, keys: Sequence[KeyConfig]) -> KeyBudgets:
        """Return the budgets that are used up, each until when."""
        self._turn_page()
        spent = []
        for key in keys:
            if key.monthly_tokens is not None and self._month[key.name] >= key.monthly_tokens:
                spent.append(self._describe(key.name, "monthly", key.monthly_tokens))
            elif key.daily_tokens is not None and self._today[key.name] >= key.daily_tokens:
                spent.append(self._describe(key.name, "daily", key.daily_tokens))
        return KeyBudgets(tuple(spent))

    def _describe(self, name: str, period: str, limit: int) -> SpentBudget:
        today = date.fromisoformat(self._day)
        following = today + timedelta(days=1)
        if period == "monthly":
            following = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
        begins = datetime(following.year, following.month, following.day)
        return SpentBudget(name, period, limit, begins.timestamp())

    # ---- in the writer thread

    def _run(self, path: Path) -> None:
        while True:
            self._news.wait()
            ending = self._closing.wait(WRITE_EVERY_S)
            self._news.clear()
            self._write(path)
            if ending:
                return

    def _write(self, path: Path) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        if not pending:
            return
        try:
            _write_sums(path, pending)
        except (sqlite3.Error, OSError) as error:
            self._put_back(pending)
            if not self._failing:
                log.warning("usage_unwritable", file=str(path), reason=str(error))
            self._failing = True
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(
                error, sqlite3.OperationalError
            ):
                with contextlib.suppress(OSError):  # damaged: another file begins
                    path.replace(path.with_name(f"{path.name}.broken"))
        else:
            self._failing = False

    def _put_back(self, sums: Sums) -> None:
        self._news.set()
        with self._lock:
            for of, figures in sums.items():
                there = self._pending.setdefault(of, [0, 0, 0, 0])
                for at, figure in enumerate(figures):
                    there[at] += figure


def _write_sums(path: Path, sums: Sums) -> None:
    path.touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(path, timeout=5.0)) as file, file:
        file.execute("PRAGMA synchronous = NORMAL")
        file.execute(TABLE)
        file.execute(f"PRAGMA user_version = {VERSION}")
        file.executemany(_ADD, [(*of, *figures) for of, figures in sums.items()])
        file.execute(_PRUNE, (MOST_DAYS,))
