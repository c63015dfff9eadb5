"""`servekit events`: the stored events as lines and as JSON; what `servekit why` tells of them."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.cli import events
from servekit.errors import NobodyRuns, StartError
from servekit.event_store import FILE, TABLE, Event, EventFilter, event_of_row
from servekit.protocol.messages import ReplicaHistory, Why
from tests.polling import poll
from tests.unit.cli.instance import invoke, listening, make_model, make_status
from tests.unit.cli.test_why import EXIT

NOW = time.time()


def write(folder: Path, *found: Event) -> None:
    """Add events to the store of a run directory, as a supervisor does."""
    insert = "INSERT INTO events (at, kind, what, model, worker, detail) VALUES (?, ?, ?, ?, ?, ?)"
    with closing(sqlite3.connect(folder / FILE)) as file, file:
        file.execute(TABLE)
        rows = ((*(e.at, e.kind, e.what, e.model, e.worker), json.dumps(e.detail)) for e in found)
        file.executemany(insert, rows)


def event(ago_s: float, kind: str, worker: str = "", what: str = "", **detail: Any) -> Event:
    return Event(NOW - ago_s, kind, what, worker.partition("/")[0], worker, detail)


def dead(ago_s: float, worker: str = "m/0", what: str = "killed", **detail: Any) -> Event:
    return event(ago_s, "exit", worker, what, lived_s=2.0, served=1, **detail)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        event(9000, "up", pid=7),
        event(6000, "started", "m/0", pid=8),
        event(1200, "ready", "m/0", after_s=1.5),
        event(600, "ready", "n/0", after_s=2.5),
    )
    return tmp_path


def kinds(folder: Path, *options: object) -> list[str]:
    done = invoke("events", "--json", *options, run_dir=folder)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line)["kind"] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], ["up", "started", "ready", "ready"]),
        (["-n", "2"], ["ready", "ready"]),
        (["-n", "0"], []),
        (["-m", "m"], ["started", "ready"]),
        (["--worker", "n/0"], ["ready"]),
        (["--since", "2h"], ["started", "ready", "ready"]),
        (["--since", "1h", "--model", "m/0"], ["ready"]),
    ],
)
def test_a_part_may_be_chosen(folder: Path, options: list[str], told: list[str]) -> None:
    assert kinds(folder, *options) == told


def test_json_has_a_fixed_form(folder: Path) -> None:
    [line] = invoke("events", "--json", "-n", "1", run_dir=folder).stdout.splitlines()
    assert json.loads(line) == {
        "id": 4,
        "at": NOW - 600,
        "kind": "ready",
        "model": "n",
        "worker": "n/0",
        "what": "",
        "detail": {"after_s": 2.5},
    }


def test_an_event_is_a_line_even_in_a_pipe(tmp_path: Path) -> None:
    write(tmp_path, event(5, "ready", "m/0", "x" * 300 + "\n\x1b[2Jy"))
    [line] = invoke("events", run_dir=tmp_path).stdout.splitlines()
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW - 5))
    assert line.startswith(f"{day}  ready       m/0  xxx")
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("found", "figures"),
    [
        (event(0, "started", "m/0", pid=8), "pid 8"),
        (event(0, "up", pid=7), "pid 7"),
        (event(0, "down", pid=7), ""),
        (event(0, "ready", "m/0", after_s=1.5), "after 1.5 s"),
        (dead(0, again_in_s=0.5), "lived 2.0 s, 1 served, again in 0.5 s"),
        (dead(0), "lived 2.0 s, 1 served, not started again"),
        (dead(0, again_in_s=0), "lived 2.0 s, 1 served, again in 0 s"),
    ],
)
def test_the_figures_follow_the_kind(found: Event, figures: str) -> None:
    assert events.format_figures(found) == figures


def test_a_line_may_leave_out_the_day_and_names_the_model_if_no_worker() -> None:
    found = event_of_row((1, NOW, "load", "m", "", "for a request", "{}"))
    clock = time.strftime("%H:%M:%S", time.localtime(NOW))
    assert events.format_event(found, day=False).plain == f"{clock}  load        m  for a request"


# ---------------------------------------------------------------- names


def test_an_alias_of_a_running_instance_is_understood(folder: Path) -> None:
    status = make_status(replace(make_model("m"), aliases=("gpt",)), make_model("new"))
    with listening(folder, lambda message: None, status):
        assert kinds(folder, "-m", "gpt") == ["started", "ready"]
        assert kinds(folder, "-m", "new/0") == [], "it runs, and nothing has happened to it"
        done = invoke("events", "-m", "gpd", run_dir=folder)
    told = "there are: m, gpt, new, m/0, new/0, gateway/0, n, n/0; did you mean 'gpt'?"
    said = f"no model or process is or was called 'gpd'; {told}\n"
    assert (done.exit_code, done.stderr) == (1, said)


def test_a_name_that_nobody_knows_is_refused_unless_it_may_come(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(StartError, match=r"called 'm'; there are: none yet$"):
        events._resolve_name(tmp_path, "m", follow=False)
    assert events._resolve_name(tmp_path, "m", follow=True) == "m"


def test_a_span_that_is_none_is_refused(folder: Path) -> None:
    done = invoke("events", "--since", "long", run_dir=folder)
    said = "'long' is not a duration; write 90s, 10m, 2h or 1d\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_a_store_that_cannot_be_kept_is_told_from_no_instance(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: None):
        done = invoke("events", run_dir=tmp_path)
    said = f"no events in {tmp_path}: the log says why events cannot be stored\n"
    assert (done.exit_code, done.stderr) == (1, said)


# ---------------------------------------------------------------- following


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LOOK_EVERY_S", 0.01)


def test_a_follower_gets_each_event_once_and_those_of_a_new_file(folder: Path) -> None:
    found = events._follow_events(folder, EventFilter("m"), 1, follow=True)
    assert next(found).kind == "ready"
    write(folder, event(0, "draining", "m/0"), event(0, "ready", "n/0"), dead(0))
    assert [one.kind for one in itertools.islice(found, 2)] == ["draining", "exit"]
    (folder / FILE).rename(folder / "events.db.broken")
    write(folder, event(0, "started", "m/0"))
    assert next(found).kind == "started", "though its number is lower"


def test_a_follower_tells_nothing_twice_while_nothing_happens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            write(folder, event(0, "stopped", "m/0"))

    monkeypatch.setattr(time, "sleep", sleep)
    found = events._follow_events(folder, EventFilter("m"), 9, follow=True)
    told = [one.kind for one in itertools.islice(found, 3)]
    assert told == ["started", "ready", "stopped"]


def test_a_follower_without_past_begins_with_what_is_new(folder: Path) -> None:
    found = events._follow_events(folder, EventFilter(), 0, follow=True)
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(next(found).kind), daemon=True)
    reader.start()

    def look() -> list[str]:
        write(folder, event(0, "stopped", "m/0"))  # again, since the reader may not have begun
        return told

    assert poll("it is told", look) == ["stopped"]
    reader.join()


# ---------------------------------------------------------------- why


def test_without_an_instance_why_tells_the_last_exits_and_the_end(folder: Path) -> None:
    write(folder, dead(50), dead(40, "n/0"), event(30, "down"), dead(20, what="hung"))
    done = invoke("why", "m", run_dir=folder)
    assert done.exit_code == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head == f"No servekit runs in {folder}; its last events:"
    assert [line.split()[2] for line in lines] == ["exit", "down", "exit"]
    assert "hung" in lines[-1]
    as_json = invoke("why", "m", "--json", run_dir=folder).stdout.splitlines()
    assert [json.loads(line)["kind"] for line in as_json] == ["exit", "down", "exit"]


def test_without_an_instance_only_the_last_exits_are_told(folder: Path) -> None:
    write(folder, *(dead(50 - n, what=f"death {n}") for n in range(7)))
    lines = invoke("why", "m/0", run_dir=folder).stdout.splitlines()[1:]
    assert [line.split("death ")[1][0] for line in lines] == ["2", "3", "4", "5", "6"]


def test_a_model_that_has_not_died_is_not_told_of(folder: Path) -> None:
    with pytest.raises(NobodyRuns, match="nobody"):
        events.post_mortem(folder, "m", NobodyRuns("nobody"), as_json=False)


def test_a_running_instance_tells_the_exits_under_supervisors_before(tmp_path: Path) -> None:
    write(tmp_path, event(900, "up"), *(dead(800 - n, what=f"death {n}") for n in range(7)))
    write(tmp_path, dead(700, "m/1", "other worker"), event(600, "up"))
    write(tmp_path, dead(500, what="new", pid=EXIT.pid))
    answer = Why("m", "closed", (ReplicaHistory("m/0", "ready", "", 1, None, (EXIT,)),))
    since, before = events.earlier_exits(tmp_path, "m/0", answer)
    assert since == []
    assert [one.what for one in before] == [f"death {n}" for n in range(2, 7)]
    _, of_all = events.earlier_exits(tmp_path, "alias", answer)
    assert of_all[-1].what == "other worker" and len(of_all) == 5
    with listening(tmp_path, lambda message: answer):
        shown = invoke("why", "m/0", run_dir=tmp_path).stdout
    assert "before this start of servekit:" in shown and "new" not in shown


def test_deaths_of_workers_that_were_replaced_since_are_told(tmp_path: Path) -> None:
    write(tmp_path, event(600, "up"), dead(500, what="out of memory", pid=EXIT.pid + 1))
    answer = Why("m", "closed", (ReplicaHistory("m/1", "ready", "", 0, None, ()),))
    with listening(tmp_path, lambda message: answer):
        shown = invoke("why", "m", run_dir=tmp_path).stdout
    assert shown.startswith("m: 1 of 1 ready; its deaths since the start are below.\n")
    head, line = shown.splitlines()[-2:]
    assert head == "since this start of servekit:"
    assert "out of memory" in line


def test_a_first_supervisor_has_none_before_it(folder: Path) -> None:
    write(folder, dead(50))
    answer = Why("m", "closed", ())
    assert events.earlier_exits(folder, "m", answer)[1] == []
    assert events.earlier_exits(folder / "none", "m", answer) == ([], [])
