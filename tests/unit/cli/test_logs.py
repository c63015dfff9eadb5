"""`servekit logs`: the lines of the processes of an instance, merged by their times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.cli import logs
from servekit.errors import ConfigError
from servekit.log_files import LogLine
from tests.unit.cli.instance import invoke, listening, make_model, make_status


def stamp(ago_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(time.time() - ago_s))


def write(folder: Path, name: str, lines: Iterable[tuple[float, str]]) -> None:
    """Write a log with lines of these ages in seconds."""
    (folder / "logs").mkdir(exist_ok=True)
    text = "".join(f'{{"event": "{said}", "timestamp": "{stamp(ago)}"}}\n' for ago, said in lines)
    (folder / "logs" / f"{name}.log").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "m~0", [(7200, "one"), (60, "three")])
    write(tmp_path, "m~1", [(100, "two")])
    write(tmp_path, "gateway~0", [(30, "four")])
    return tmp_path


def said(folder: Path, *options: object) -> list[str]:
    done = invoke("logs", *options, run_dir=folder)
    assert done.exit_code == 0, done.stderr
    return [f"{line.split()[0]} {line.split()[-1]}" for line in done.stdout.splitlines()]


def test_all_processes_are_merged_by_time(folder: Path) -> None:
    assert said(folder) == ["m/0 one", "m/1 two", "m/0 three", "gateway/0 four"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["m"], ["one", "two", "three"]),
        (["m/1"], ["two"]),
        (["--worker", "m/1"], ["two"]),
        (["m/1", "-w", "m/1"], ["two"]),
        (["--since", "1h"], ["two", "three", "four"]),
        (["--since", "9999999999999d"], ["one", "two", "three", "four"]),
        (["--since", "90s"], ["three", "four"]),
        (["-n", "2"], ["three", "four"]),
        (["--tail", "2", "m"], ["two", "three"]),
        (["-n", "0"], []),
    ],
)
def test_a_part_may_be_chosen(folder: Path, options: list[str], words: list[str]) -> None:
    assert [line.split()[1] for line in said(folder, *options)] == words


def test_an_alias_of_a_running_instance_is_understood(folder: Path) -> None:
    status = make_status(make_model("other"), replace(make_model("m"), aliases=("gpt",)))
    with listening(folder, lambda message: None, status):
        assert [line.split()[1] for line in said(folder, "gpt")] == ["one", "two", "three"]


def test_an_order_within_a_file_outlives_a_clock_that_was_set_back(tmp_path: Path) -> None:
    write(tmp_path, "m~0", [(50, "first"), (500, "second")])
    write(tmp_path, "m~1", [(100, "zeroth")])
    assert said(tmp_path) == ["m/1 zeroth", "m/0 first", "m/0 second"]


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["m/0", "-w", "m/1"], 2, "give m/0 or --worker m/1, not both\n"),
        (["--since", "long"], 2, "'long' is not a duration; write 90s, 10m, 2h or 1d\n"),
        (
            ["m/7"],
            2,
            "'m/7' has no log here; there are logs of: gateway/0, m/0, m/1; did you mean 'm/1'?\n",
        ),
    ],
)
def test_what_cannot_be_shown_is_said(
    folder: Path, options: list[str], code: int, told: str
) -> None:
    done = invoke("logs", *options, run_dir=folder)
    assert (done.exit_code, done.stderr) == (code, told)


def test_an_instance_without_output_is_told_from_none(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: None):
        done = invoke("logs", run_dir=tmp_path)
    said = f"there are no log files in {tmp_path}/logs yet\n"
    assert (done.exit_code, done.stderr) == (1, said)
    assert "no servekit runs in" in invoke("logs", run_dir=tmp_path).stderr


def test_who_follows_may_name_what_has_not_written_yet(folder: Path) -> None:
    with listening(folder, lambda message: None):  # m, m/0 and gateway/0
        logs._check_names(folder, "gateway/0", follow=True)
        logs._check_known(folder, "")
        logs._check_known(folder, "m/0")
        with pytest.raises(ConfigError) as error:
            logs._check_names(folder, "mm", follow=True)
    there = "no model or process is called 'mm'; there are: m, m/0, gateway/0"
    assert error.value.message == f"{there}; did you mean 'm'?"
    logs._check_names(folder, "mm", follow=True)  # nothing runs: it may come


def test_a_follower_reads_what_is_new_and_new_files_from_their_start(folder: Path) -> None:
    tails = logs._open_tails(folder, "m")
    assert sorted(tails) == ["m/0", "m/1"]
    assert list(logs._read_news(folder, "m", tails)) == []
    with (folder / "logs" / "m~1.log").open("a") as file:
        file.write("new\n")
    (folder / "logs" / "m~2.log").write_text("first\n")
    (folder / "logs" / "n~0.log").write_text("not asked for\n")
    news = [(line.name, line.text) for line in logs._read_news(folder, "m", tails)]
    assert news == [("m/1", "new"), ("m/2", "first")]
    assert list(logs._read_news(folder, "m", tails)) == []
    for tail in tails.values():
        tail.close()


def test_a_line_shows_the_local_time_and_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TZ", "Etc/GMT-2")
    time.tzset()
    try:
        text = '{"event": "it failed", "level": "error", "timestamp": "2026-01-01T22:30:00Z"}'
        line = logs.format_line(LogLine("", "m/0", text))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line.plain == "m/0 | 2026-01-02 00:30:00 it failed"
    assert [str(span.style) for span in line.spans][-1] == "red"


def test_lines_of_others_are_shown_as_they_are_without_control_characters() -> None:
    line = logs.format_line(LogLine("", "m/0", "plain \x1b[2J line"))
    assert line.plain == "m/0 | plain  line"
    traceback = '{"event": "it failed", "exception": "Traceback:\\n  x"}'
    first, *rest = logs.format_line(LogLine("", "m/0", traceback)).plain.split("\n")
    assert first.startswith("m/0 | it failed")
    assert all(part.startswith("    ") for part in rest)
