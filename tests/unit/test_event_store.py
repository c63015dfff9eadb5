"""The journal's file as any process may read it, whatever state it is in."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from servekit.event_store import (
    FILE,
    TABLE,
    EventFilter,
    event_names,
    event_of_row,
    newest_events,
    parse_details,
)

ALL = EventFilter()
#: time, kind, model, process
ROWS = [
    (10.0, "up", "", ""),
    (20.0, "ready", "m", "m/0"),
    (30.0, "exit", "", "m/0"),
    (40.0, "breaker", "m", ""),
    (50.0, "ready", "n", "gateway/0"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = sqlite3.connect(tmp_path / FILE)
    file.execute(TABLE)
    file.executemany(
        "INSERT INTO events (at, kind, model, worker, what, detail) VALUES (?, ?, ?, ?, '', '{}')",
        ROWS,
    )
    file.commit()
    file.close()
    return tmp_path


def times(folder: Path, wanted: EventFilter, most: int = 100) -> list[float]:
    return [event.at for event in newest_events(folder, wanted, most)]


def test_the_last_events_come_in_the_order_in_which_they_happened(folder: Path) -> None:
    assert times(folder, ALL) == [10, 20, 30, 40, 50]
    assert times(folder, ALL, 2) == [40, 50]
    assert times(folder, ALL, 0) == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (EventFilter(name="m"), [20, 40]),
        (EventFilter(name="m/0"), [20, 30]),
        (EventFilter(name="gateway/0"), [50]),
        (EventFilter(name="gateway"), []),
        (EventFilter(since=30.0), [30, 40, 50]),  # that moment included
        (EventFilter(since=30.5), [40, 50]),
        (EventFilter(after=3), [40, 50]),  # that event not included
        (EventFilter(kinds=("ready",)), [20, 50]),
        (EventFilter(kinds=("exit", "up")), [10, 30]),
        (EventFilter(name="m", since=20.0, after=2, kinds=("ready", "breaker")), [40]),
    ],
)
def test_all_parts_of_a_filter_hold_together(
    folder: Path, wanted: EventFilter, found: list[float]
) -> None:
    assert times(folder, wanted) == found


def test_a_filter_takes_at_most_the_newest_that_match(folder: Path) -> None:
    assert times(folder, EventFilter(kinds=("ready",)), 1) == [50]


def test_models_and_processes_with_events_are_named_once(folder: Path) -> None:
    assert event_names(folder) == ["gateway/0", "m", "m/0", "n"]


def test_a_reader_finds_nothing_where_there_is_no_readable_file(tmp_path: Path) -> None:
    assert newest_events(tmp_path, ALL, 10) == []
    assert event_names(tmp_path) == []
    assert not (tmp_path / FILE).exists(), "a reader makes none"
    (tmp_path / FILE).write_bytes(b"this is no database" * 100)
    assert newest_events(tmp_path, ALL, 10) == []
    assert event_names(tmp_path) == []
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert newest_events(tmp_path, ALL, 10) == []
    assert event_names(tmp_path) == []


def test_a_file_without_the_table_holds_no_event(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / FILE).close()
    (tmp_path / FILE).touch()
    assert newest_events(tmp_path, ALL, 10) == []
    assert event_names(tmp_path) == []


def test_an_event_has_the_fields_of_its_row() -> None:
    event = event_of_row((7, 1.5, "exit", "m", "m/0", "killed", '{"served": 3}'))
    assert (event.id, event.at, event.kind, event.what) == (7, 1.5, "exit", "killed")
    assert (event.model, event.worker, event.detail) == ("m", "m/0", {"served": 3})


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", "[" * 100_000, None])
def test_figures_that_are_no_mapping_do_no_harm(text: str) -> None:
    assert parse_details(text) == {}
