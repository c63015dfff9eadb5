"""What `servekit logs` and `events` tell of processes that have written nothing, or never were."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.cli import events, logs
from servekit.cli.display import process_events
from servekit.errors import ServekitError, StartError
from servekit.event_store import EventFilter, event_names, newest_events
from servekit.supervisor.event_log import Journal
from tests.polling import poll


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run directory in which nothing runs any more."""
    (tmp_path / "logs").mkdir()
    journal = Journal()
    journal.open_log(tmp_path)
    journal.record_event("started", worker="smol/0", pid=7)
    journal.record_event("ready", worker="smol/0", after_s=1.5)
    journal.record_event("load", "for a request", model="smol")
    journal.record_event(
        "exit", "killed by SIGKILL", worker="gone/1", lived_s=2.0, served=1, again_in_s=0.5
    )
    poll("the journal writes", lambda: len(newest_events(tmp_path, EventFilter(), 10)) == 4)
    yield tmp_path
    journal.close()


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines without their times."""
    rows = [row.split(" ", 4) for row in capsys.readouterr().out.splitlines()]
    return [f"{name} {rest}" for name, _, _, _, rest in rows]


def test_who_has_written_nothing_began_and_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.logs(worker="smol", most=10, run_dir=folder, follow=False)
    assert shown(capsys) == ["smol/0 started: pid 7", "smol/0 ready: after 1.5 s"]
    logs.logs(worker="gone/1", most=10, run_dir=folder, follow=False)
    [death] = shown(capsys)
    assert death.startswith("gone/1 exit: killed by SIGKILL, lived 2.0 s, 1 served, again in 0.5 s")


def test_what_it_wrote_stands_between_by_its_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started, ready = process_events.last_lines(folder, "smol/0", 10)
    assert started.at < ready.at
    said = f'{{"event": "hello", "timestamp": "{started.at}"}}\n'
    (folder / "logs" / "smol~0.log").write_text(said)
    logs.logs(worker="smol/0", most=10, run_dir=folder, follow=False)
    words = [row.split(" ")[1].rstrip(":") for row in shown(capsys)]
    assert set(words[:2]) == {"started", "hello"} and words[2:] == ["ready"]


def test_a_follower_hears_what_is_noted_later(folder: Path) -> None:
    follower = process_events.Follower(folder, "smol/0")
    assert [*follower.lines()] == []
    journal = Journal()
    journal.open_log(folder)
    journal.record_event("stopped", "unloaded", worker="smol/0")
    journal.record_event("ready", worker="other/0")
    found = poll("it is told", lambda: [line.text for line in follower.lines()])
    journal.close()
    assert len(found) == 1 and '"stopped: unloaded"' in found[0]
    assert [*follower.lines()] == [], "once"


@pytest.mark.parametrize(
    ("most", "kinds"),
    [(0, []), (1, ["ready"]), (2, ["started", "ready"]), (9, ["started", "ready"])],
)
def test_the_last_ones_are_told(folder: Path, most: int, kinds: list[str]) -> None:
    told = [
        json.loads(line.text)["event"] for line in process_events.last_lines(folder, "smol/0", most)
    ]
    assert [event.partition(":")[0] for event in told] == kinds


def test_who_was_never_there_is_told_with_what_may_have_been_meant(folder: Path) -> None:
    assert event_names(folder) == ["gone", "gone/1", "smol", "smol/0"]
    with pytest.raises(StartError, match=r"'smoll'; there are: .*did you mean 'smol'\?"):
        events.events(name="smoll", run_dir=folder, follow=False, as_json=False, since="", most=5)


def test_what_has_gone_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.events(name="gone", run_dir=folder, follow=False, as_json=False, since="", most=5)
    assert "killed by SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [logs.logs, events.events])
def test_where_nothing_runs_all_say_the_same(tmp_path: Path, asked: object) -> None:
    more = {"worker": "", "most": 5} if asked is logs.logs else {"name": "", "since": "", "most": 5}
    if asked is events.events:
        more["as_json"] = False
    with pytest.raises(
        ServekitError, match=r"no servekit runs in .*, --run-dir names another$"
    ) as it:
        asked(run_dir=tmp_path, follow=False, **more)  # type: ignore[operator]
    assert isinstance(it.value, StartError)
