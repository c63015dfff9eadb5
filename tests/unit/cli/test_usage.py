"""What `servekit usage` prints of the counts in a run directory."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
from datetime import date
from pathlib import Path

import pytest

from servekit.usage_store import FILE, TABLE
from tests.unit.cli.instance import invoke, listening

TODAY = date.today().isoformat()
FIRST = date.today().replace(day=1).isoformat()
ROWS = [
    ("2024-02-01", "alice", "m", 1, 10, 4, 5),
    ("2024-02-28", "alice", "m", 2, 20, 0, 6),
    ("2024-03-01", "bob", "=n", 3, 1_000_000, 7, 9),
    *sorted([(FIRST, "carol", "m", 5, 50, 0, 7), (TODAY, "", "m", 4, 40, 0, 8)]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory with the usage of earlier months and of today."""
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as file, file:
        file.execute(TABLE)
        file.executemany("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?)", ROWS)
    return tmp_path


def rows(folder: Path, *options: str) -> list[list[object]]:
    done = invoke("usage", "--json", *options, run_dir=folder)
    assert done.exit_code == 0, done.stderr
    return [list(row.values()) for row in json.loads(done.stdout)]


def test_without_options_this_month_is_told_by_day_key_and_model(folder: Path) -> None:
    assert rows(folder) == [list(row) for row in ROWS[3:]]


def test_a_damaged_file_is_told(folder: Path) -> None:
    (folder / FILE).write_bytes(b"this is no database" * 100)
    done = invoke("usage", run_dir=folder)
    assert done.exit_code == 1
    assert "usage.db is damaged" in done.stderr.replace("\n", " ")


def test_all_days_that_are_kept_are_told_if_asked(folder: Path) -> None:
    assert rows(folder, "--all") == [list(row) for row in ROWS]
    assert rows(folder, "--all", "--day") == rows(folder, "--all")


def test_the_first_day_may_be_named_and_counts(folder: Path) -> None:
    assert [row[0] for row in rows(folder, "--since", "2024-02-28")] == [
        *("2024-02-28", "2024-03-01", FIRST, TODAY)
    ]


def test_months_sum_up_their_days(folder: Path) -> None:
    first = rows(folder, "--all", "--month")[0]
    assert first == ["2024-02", "alice", "m", 3, 30, 4, 11]


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("key", [("", ""), ("alice", ""), ("bob", ""), ("carol", "")]),
        ("model", [("", "=n"), ("", "m")]),
        ("model, key", [("", "m"), ("alice", "m"), ("bob", "=n"), ("carol", "m")]),
        ("none", [("", "")]),
        ("", [("", "")]),
    ],
)
def test_columns_are_summed_that_are_not_asked_for(
    folder: Path, by: str, names: list[tuple[str, str]]
) -> None:
    found = rows(folder, "--all", "--by", by)
    assert sorted({(row[1], row[2]) for row in found}) == names
    assert sum(int(str(row[3])) for row in found) == 15


def test_a_spreadsheet_takes_no_name_for_a_formula(folder: Path) -> None:
    done = invoke("usage", "--csv", "--all", run_dir=folder)
    head, *lines = csv.reader(done.stdout.splitlines())
    assert head[:4] == ["period", "key", "model", "requests"]
    assert lines[2] == ["2024-03-01", "bob", "'=n", "3", "1000000", "7", "9"]
    assert lines[0][2] == "m"


def test_the_table_adds_prompt_and_output(folder: Path) -> None:
    done = invoke("usage", "--all", run_dir=folder)
    head, *lines = (line.split() for line in done.stdout.splitlines())
    assert head == ["PERIOD", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "OUTPUT", "TOKENS"]
    assert lines[2] == ["2024-03-01", "bob", "=n", "3", "1,000,000", "7", "9", "1,000,009"]
    assert [TODAY, "-", "m"] in [line[:3] for line in lines], "requests without a key"


def test_a_time_without_requests_is_said(folder: Path) -> None:
    done = invoke("usage", "--since", "2999-01-01", run_dir=folder)
    assert done.stdout.strip() == "nothing has been used in this time"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--day", "--month"], "give --day or --month, not both"),
        (["--by", "key,user"], "--by is key, model, or key,model, not 'user'"),
        (["--since", "yesterday"], "--since is a day, such as 2026-11-01, not 'yesterday'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    folder: Path, options: list[str], said: str
) -> None:
    done = invoke("usage", *options, run_dir=folder)
    assert (done.exit_code, done.stderr.strip(), done.stdout) == (2, said, "")


def test_an_instance_that_has_counted_nothing_is_told_from_none(tmp_path: Path) -> None:
    nobody = invoke("usage", run_dir=tmp_path)
    assert nobody.exit_code == 1
    assert f"no servekit runs in {tmp_path}" in nobody.stderr
    with listening(tmp_path, lambda message: None):
        idle = invoke("usage", run_dir=tmp_path)
    assert idle.exit_code == 1
    assert f"no request has been counted in {tmp_path} yet" in idle.stderr
