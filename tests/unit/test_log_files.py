"""Children's output, read from its end and as it grows, whatever is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli.logs import format_line
from servekit.log_files import LONGEST_BYTES, Tail, find_log_files, is_of, last_lines, process_of
from servekit.supervisor.process.log_capture import RotatingFile


def test_names_of_files_are_those_of_processes(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("a~0.log", "org~a~0.log", "a~standby-0.log", "gateway-0.log", "a~0.log.1"):
        (tmp_path / "logs" / name).touch()
    assert set(find_log_files(tmp_path)) == {"a/0", "org/a/0", "a/standby-0", "gateway/0"}
    assert process_of(Path("gateway-0.log")) == "gateway/0"
    assert process_of(Path("gateway-ip-10-0-0-2.log")) == "gateway/ip-10-0-0-2"
    assert find_log_files(tmp_path / "none") == {}


def test_a_name_is_a_process_or_a_model() -> None:
    for name in ("", "a", "a/0"):
        assert is_of("a/0", name)
    assert is_of("org/a/0", "org/a")
    assert not is_of("ab/0", "a") and not is_of("a/1", "a/0")


def texts(path: Path, most: int) -> list[str]:
    return [one.text for one in last_lines("a/0", path, most)]


def test_the_last_lines_go_back_into_what_was_rotated(tmp_path: Path) -> None:
    path = tmp_path / "a~0.log"
    file = RotatingFile(path, max_bytes=40, keep=3)
    for number in range(40):
        file.append_line(b"line %d\n" % number)
    file.close()
    assert texts(path, 8) == [f"line {number}" for number in range(32, 40)]
    assert texts(path, 0) == []
    assert len(texts(path, 10_000)) < 40, "what is gone is gone"
    assert texts(tmp_path / "none.log", 5) == []


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a~0.log"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(2**30)  # a gigabyte, in a sparse file
    [only] = texts(path, 10)
    assert len(only) < LONGEST_BYTES + 100
    path.write_bytes(b"a" * 20_000 + b"\nnext")
    long, short = texts(path, 10)
    assert long.endswith("bytes more)") and short == "next"


def test_lines_have_the_time_they_tell_or_that_of_their_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "a~0.log"
    path.write_text('raw\n{"event": "x", "timestamp": "2026-01-02"}\nraw\n{"timestamp": 7}\n{[\n')
    assert [one.at for one in last_lines("a/0", path, 9)] == ["2026-01-02"] * 5


def test_a_tail_follows_through_rotations(tmp_path: Path) -> None:
    path = tmp_path / "a~0.log"
    file = RotatingFile(path, max_bytes=30, keep=3)
    file.append_line(b"before\n")
    tail = Tail(path, from_start=False)
    seen: list[str] = []
    for number in range(12):
        file.append_line(b"line %d\n" % number)
        seen += tail.lines()
    assert seen == [f"line {number}" for number in range(12)]
    path.unlink()
    assert list(tail.lines()) == []
    file.append_line(b"anew\n")
    assert list(tail.lines()) == ["anew"]
    tail.close()
    file.close()


def test_a_tail_holds_no_more_than_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a~0.log"
    path.touch()
    tail = Tail(path, from_start=True)
    with path.open("ab") as file:
        file.write(b"x" * 300_000)
        file.flush()
        [cut] = tail.lines()
        assert len(cut) < LONGEST_BYTES + 100
        file.write(b"y" * 100_000 + b"\nnext\npart")
        file.flush()
        assert list(tail.lines()) == ["next"], "the rest of a line that was cut is passed over"
        file.write(b"ly\n")
        file.flush()
        assert list(tail.lines()) == ["partly"]
    tail.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m\x07", "a/0 | red"),
        ('{"event": "lo\\u001b[2Jst", "level": "error", "n": 3}', "a/0 | lost n=3"),
        ('{"event": "one\\ntwo"}', "a/0 | one\n    two"),
        ('{"level": ["x"]}', 'a/0 | {"level": ["x"]}'),
    ],
)
def test_what_is_shown_moves_no_cursor(tmp_path: Path, text: str, shown: str) -> None:
    (tmp_path / "a~0.log").write_text(f"{text}\n")
    [line] = last_lines("a/0", tmp_path / "a~0.log", 1)
    assert format_line(line).plain == shown
