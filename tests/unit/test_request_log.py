"""The end of the request log: the newest first, bounded, with damaged and rotated files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from servekit.request_log import file_of, read_latest


def line(number: int, *, model: str = "m") -> bytes:
    calls = (model, "", "stop", 3, 0, 2, 0.0, 0.0)
    return msgspec.json.encode((float(number), f"r-{number}", "/v1/x", 200, "", 1.0, 2.0, calls))


def write(path: Path, *lines: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(one + b"\n" for one in lines))


def ids(run_dir: Path, most_bytes: int = 10_000) -> list[str]:
    return [one.id for one in read_latest(run_dir, most_bytes)]


def test_the_newest_of_all_gateways_come_first(tmp_path: Path) -> None:
    write(file_of(tmp_path, "gateway/0"), line(1), line(4))
    write(file_of(tmp_path, "gateway/1"), line(2), b"{damaged", line(3)[:-20])
    assert ids(tmp_path) == ["r-4", "r-2", "r-1"]


def test_what_was_rotated_fills_up(tmp_path: Path) -> None:
    path = file_of(tmp_path, "gateway/0")
    write(path.with_name(f"{path.name}.1"), *map(line, range(100)))
    write(path, line(100))
    size = len(line(10)) + 1
    assert ids(tmp_path, 4 * size) == ["r-100", "r-99", "r-98"]  # and a part of a line
    path.unlink()
    assert ids(tmp_path, 3 * size) == ["r-99", "r-98"]  # the name is free for a moment


@pytest.mark.parametrize("gateways", [1, 4])
def test_the_bytes_are_of_all_gateways_together(tmp_path: Path, gateways: int) -> None:
    for number in range(gateways):
        write(file_of(tmp_path, f"gateway/{number}"), *[line(10 + number)] * 1000)
    size = len(line(10)) + 1
    found = read_latest(tmp_path, 100 * size)
    assert 100 - 2 * gateways <= len(found) <= 100


def test_no_log_is_no_request(tmp_path: Path) -> None:
    assert ids(tmp_path) == []
