"""The journal writes from a thread, into a file that may be slow, full, broken or gone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.event_store import FILE, Event, EventFilter, newest_events
from servekit.supervisor import event_log as journal_module
from servekit.supervisor.event_log import Journal
from tests.polling import poll

ALL = EventFilter()


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal(again_s=0.05)
    yield made
    made.close()


def kinds(folder: Path) -> list[str]:
    return [one.kind for one in newest_events(folder, ALL, 1000)]


def test_what_is_told_is_read_by_name_time_and_kind(journal: Journal, tmp_path: Path) -> None:
    journal.record_event("before", "nobody keeps it")
    journal.open_log(tmp_path)
    journal.record_event("ready", worker="a/0", after_s=1.5)
    journal.record_event("breaker", "open: \ud800 half", model="a")
    journal.record_event("exit", "killed", worker="b/0")
    journal.record_event("ready", worker="gateway/0")
    poll("they are there", lambda: len(kinds(tmp_path)) == 4)
    first, second = newest_events(tmp_path, EventFilter(name="a"), 10)
    assert (first.kind, first.worker, first.model) == ("ready", "a/0", "a")
    assert first.detail == {"after_s": 1.5}
    assert second.what == "open: ? half"
    assert [one.worker for one in newest_events(tmp_path, EventFilter(name="b/0"), 10)] == ["b/0"]
    assert [one.kind for one in newest_events(tmp_path, EventFilter(kinds=("exit",)), 10)] == [
        "exit"
    ]
    assert [one.kind for one in newest_events(tmp_path, EventFilter(after=second.id), 10)] == [
        "exit",
        "ready",
    ]
    assert newest_events(tmp_path, EventFilter(since=time.time() + 60), 10) == []
    assert [one.worker for one in newest_events(tmp_path, ALL, 1)] == ["gateway/0"]
    assert newest_events(tmp_path, EventFilter(name="gateway"), 10) == [], "no model is called that"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_it_goes_on_where_it_left_off(tmp_path: Path) -> None:
    for pid in (1, 2):
        journal = Journal()
        journal.open_log(tmp_path)
        journal.record_event("up", pid=pid)
        journal.record_event("down")
        journal.close()
    assert kinds(tmp_path) == ["up", "down", "up", "down"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


KILLED = """
import os, pathlib, sys, time
from servekit.event_store import EventFilter, newest_events
from servekit.supervisor.event_log import journal
folder = pathlib.Path(sys.argv[1])
journal.open_log(folder)
journal.record_event("up", pid=os.getpid())
while not newest_events(folder, EventFilter(), 1):
    time.sleep(0.01)  # between two looks; the test waits no longer than its deadline
os.kill(os.getpid(), 9)
"""


def test_a_supervisor_that_was_killed_is_told_of_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.wait(20) == -signal.SIGKILL
    journal = Journal()
    journal.open_log(tmp_path)
    journal.record_event("up", pid=2)
    journal.close()
    up, crash, again = newest_events(tmp_path, ALL, 10)
    assert (up.kind, crash.kind, again.kind) == ("up", "crash", "up")
    assert f"pid {killed.pid}" in crash.what


@pytest.mark.parametrize("content", [b"no database at all, but long enough" * 100, b"SQLite f"])
def test_a_broken_file_is_put_aside(journal: Journal, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert newest_events(tmp_path, ALL, 10) == [], "and it does a reader no harm"
    journal.open_log(tmp_path)
    journal.record_event("up")
    poll("a new one is begun", lambda: kinds(tmp_path) == ["up"])
    assert (tmp_path / f"{FILE}.broken").read_bytes() == content


def test_a_damaged_page_and_another_version(tmp_path: Path) -> None:
    journal = Journal(again_s=0.05)
    journal.open_log(tmp_path)
    for _ in range(200):
        journal.record_event("x", "y" * 500)
    journal.close()
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(3 * 4096))
    journal.open_log(tmp_path)
    journal.record_event("again")
    poll("a new one is begun", lambda: kinds(tmp_path) == ["again"])
    journal.close()
    with sqlite3.connect(tmp_path / FILE) as raw:
        raw.execute("PRAGMA user_version = 77")
    raw.close()
    journal.open_log(tmp_path)
    journal.record_event("later")
    poll("a new one is begun", lambda: kinds(tmp_path) == ["later"])
    journal.close()


def test_a_file_that_is_removed_is_begun_anew(journal: Journal, tmp_path: Path) -> None:
    journal.open_log(tmp_path)
    journal.record_event("one")
    poll("it is there", lambda: kinds(tmp_path) == ["one"])
    for path in tmp_path.iterdir():
        path.unlink()
    journal.record_event("two")
    poll("it is there again", lambda: kinds(tmp_path) == ["two"])


def test_a_place_that_cannot_be_written_to_costs_events_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands where the file would be; once it is gone, what has waited is written."""
    monkeypatch.setattr(journal_module, "_MOST_WAITING", 10)
    journal = Journal(again_s=0.02)
    (tmp_path / FILE).mkdir()
    journal.open_log(tmp_path)
    began = time.monotonic()
    for number in range(25):
        journal.record_event("x", str(number))
    assert time.monotonic() - began < 0.5
    (tmp_path / FILE).rmdir()
    poll("it has caught up", lambda: len(kinds(tmp_path)) == 11)
    *_, last = newest_events(tmp_path, ALL, 100)
    assert (last.kind, last.detail) == ("gap", {"lost": 15})
    journal.record_event("y")
    poll("it goes on", lambda: kinds(tmp_path)[-1] == "y")
    journal.close()


FULL = """
import pathlib, resource, signal, sys, time
from servekit.event_store import EventFilter, newest_events
from servekit.supervisor.event_log import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
journal = Journal(again_s=0.02)
journal.open_log(folder)
journal.record_event("before")
while len(newest_events(folder, EventFilter(), 9)) < 1:
    time.sleep(0.01)  # between two looks; the test waits no longer than its deadline
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
journal.record_event("full")
while not journal._is_failing:
    time.sleep(0.01)  # between two looks; the test ends a program that takes too long
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
while [one.kind for one in newest_events(folder, EventFilter(), 9)] != ["before", "full"]:
    time.sleep(0.01)  # between two looks; the test waits no longer than its deadline
journal.close()
"""


def test_what_could_not_be_written_is_written_when_there_is_room(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("journal_unwritable") == 1, run.stdout
    assert run.stdout.count("journal_recovered") == 1


def test_its_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_EVENTS", 50)
    monkeypatch.setattr(journal_module, "MOST_PAGES", 40)
    journal = Journal(again_s=0.01)
    journal.open_log(tmp_path)
    for number in range(400):
        journal.record_event("x", "y" * 3000, worker=f"a/{number}")
        if number % 20 == 0:
            poll("the disk keeps up", lambda: not journal._waiting)
    poll("all are written", lambda: not journal._waiting)
    journal.close()
    found = newest_events(tmp_path, ALL, 1000)
    assert found[-1].worker == "a/399"
    assert 10 <= len(found) <= 50
    assert (tmp_path / FILE).stat().st_size <= 40 * 4096


def test_a_file_that_has_its_largest_size_loses_its_older_half_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_PAGES", 20)
    journal = Journal(again_s=0.01)
    journal.open_log(tmp_path)
    for number in range(60):  # of which about 35 fit
        journal.record_event("x", "y" * 2000, worker=f"a/{number}")
        poll("the disk keeps up", lambda: not journal._waiting)
    journal.close()
    found = [int(one.worker.removeprefix("a/")) for one in newest_events(tmp_path, ALL, 1000)]
    assert found == list(range(found[0], 60)), "the newest, and all of them"
    assert 10 <= len(found) < 40
    assert (tmp_path / FILE).stat().st_size <= 20 * 4096


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    opened = journal_module.open_file

    def slow(path: Path) -> sqlite3.Connection:
        hang.wait()
        return opened(path)

    monkeypatch.setattr(journal_module, "open_file", slow)
    journal = Journal()
    journal.open_log(tmp_path)
    began = time.monotonic()
    for _ in range(5000):
        journal.record_event("x")
    journal.close()
    assert time.monotonic() - began < 20.0  # it hangs for ever
    assert len(journal._waiting) == 2000
    hang.set()


def test_rows_of_strangers_do_no_harm(journal: Journal, tmp_path: Path) -> None:
    journal.open_log(tmp_path)
    journal.record_event("x")
    poll("it is there", lambda: kinds(tmp_path) == ["x"])
    with sqlite3.connect(tmp_path / FILE) as raw:
        raw.execute(
            "INSERT INTO events (at, kind, model, worker, what, detail) VALUES (1, 2, 3, 4, 5, ?)",
            ("[" * 100_000,),
        )
    raw.close()
    assert newest_events(tmp_path, ALL, 1) == [Event(1.0, "2", "5", "3", "4", {}, 2)]
