"""The file of usage as any process may read it: sums by period, key and model."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from servekit.usage_store import FILE, TABLE, Usage, read_usage

#: day, key, model, requests, tokens: prompt, cached, completion
ROWS = [
    ("2026-11-30", "ann", "m", 1, 10, 1, 100),
    ("2026-11-30", "ann", "n", 2, 20, 2, 200),
    ("2026-11-30", "bob", "m", 4, 40, 4, 400),
    ("2026-12-01", "ann", "m", 8, 80, 8, 800),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    file = sqlite3.connect(tmp_path / FILE)
    file.execute(TABLE)
    file.executemany("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?)", reversed(ROWS))
    file.commit()
    file.close()
    return tmp_path


def test_each_key_and_model_has_a_row_for_each_day(run_dir: Path) -> None:
    assert read_usage(run_dir) == [Usage(*row) for row in ROWS]


def test_a_column_that_is_not_asked_for_is_summed_over(run_dir: Path) -> None:
    assert read_usage(run_dir, by=("key",), since="2026-11-30") == [
        Usage("2026-11-30", "ann", "", 3, 30, 3, 300),
        Usage("2026-11-30", "bob", "", 4, 40, 4, 400),
        Usage("2026-12-01", "ann", "", 8, 80, 8, 800),
    ]
    assert read_usage(run_dir, by=("model",), monthly=True) == [
        Usage("2026-11", "", "m", 5, 50, 5, 500),
        Usage("2026-11", "", "n", 2, 20, 2, 200),
        Usage("2026-12", "", "m", 8, 80, 8, 800),
    ]
    assert read_usage(run_dir, by=(), since="2026-12") == [
        Usage("2026-12-01", "", "", 8, 80, 8, 800)
    ]


def test_the_first_day_counts_in_a_month_too(run_dir: Path) -> None:
    found = read_usage(run_dir, by=(), monthly=True, since="2026-12-01")
    assert found == [Usage("2026-12", "", "", 8, 80, 8, 800)]
    assert read_usage(run_dir, since="2026-12-02") == []


def test_a_reader_finds_nothing_where_there_is_no_readable_file(tmp_path: Path) -> None:
    assert read_usage(tmp_path) == []
    assert not (tmp_path / FILE).exists(), "a reader makes none"
    (tmp_path / FILE).write_bytes(b"")
    assert read_usage(tmp_path) == [], "the table is not there yet"
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert read_usage(tmp_path) == []


def test_a_damaged_file_is_not_taken_for_no_usage(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        read_usage(tmp_path)
