"""The end of the request log: the newest first, bounded, with damaged and rotated files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from servekit.request_log import (
    Line,
    RequestRecord,
    file_of,
    find_files,
    find_version,
    make_record,
    read_latest,
    read_records,
)


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


# ---------------------------------------------------------------- records


def test_a_record_has_the_times_from_the_head_of_its_request() -> None:
    calls = ("m", "ann", "length", 30, 20, 10, 100.25, 101.5)
    made = make_record(Line(7.0, "r-1", "/v1/x", 200, "bob", 100.0, 103.12341, calls))
    assert made == RequestRecord(
        7.0, "r-1", "/v1/x", 200, 3.1234, "ann", "m", "length", 30, 20, 10, 0.25, 1.5
    )  # the key of the call is that which paid


def test_a_request_that_asked_no_model_has_the_key_of_its_head() -> None:
    made = make_record(Line(7.0, "r-1", "/v1/models", 401, "bob", 100.0, 100.5, None))
    assert made == RequestRecord(7.0, "r-1", "/v1/models", 401, 0.5, "bob")


@pytest.mark.parametrize(("started_s", "queue_s"), [(0.0, 0.0), (99.0, 0.0), (100.5, 0.5)])
def test_what_did_not_happen_took_no_time(started_s: float, queue_s: float) -> None:
    calls = ("m", "", "stop", 0, 0, 0, started_s, 0.0)
    made = make_record(Line(7.0, "r-1", "/v1/x", 200, "bob", 100.0, 101.0, calls))
    assert (made.queue_s, made.first_s, made.key) == (queue_s, 0.0, "bob")


@pytest.mark.parametrize(
    ("status", "outcome", "failed"),
    [
        (200, "", False),
        (200, "stop", False),
        (200, "length", False),
        (200, "worker_lost", True),  # within a stream that had begun
        (399, "", False),
        (400, "", True),
        (499, "stop", True),
    ],
)
def test_a_request_has_failed_by_its_status_or_within_its_stream(
    status: int, outcome: str, failed: bool
) -> None:
    made = RequestRecord(1.0, "r", "/v1/x", status, 1.0, outcome=outcome)
    assert made.failed is failed


# ---------------------------------------------------------------- whole files


def test_each_gateway_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = ("gateway/1", "gateway/0")
    for name in names:
        write(file_of(tmp_path, name), line(1))
    rotated = file_of(tmp_path, "gateway/0").with_name("gateway-0.jsonl.1")
    write(rotated, line(0))
    assert [path.name for path in find_files(tmp_path)] == ["gateway-0.jsonl", "gateway-1.jsonl"]


def test_all_records_come_in_their_order_without_damaged_lines(tmp_path: Path) -> None:
    first, second = file_of(tmp_path, "gateway/0"), file_of(tmp_path, "gateway/1")
    write(first, line(1), b"", b"[]", line(4))
    write(second, line(3), line(2)[:9], line(2).replace(b"r-2", b"r-\xff"))
    write(first.with_name(f"{first.name}.1"), line(2))
    (first.parent / "gateway-2.jsonl").mkdir()
    assert [one.id for one in read_records(tmp_path)] == ["r-1", "r-2", "r-3", "r-4"]
    assert read_records(tmp_path / "nowhere") == []


def test_the_version_changes_with_each_file(tmp_path: Path) -> None:
    assert find_version(tmp_path) == []
    path = file_of(tmp_path, "gateway/0")
    write(path, line(1))
    os.utime(path, ns=(0, 1))
    versions = [find_version(tmp_path)]
    os.utime(path, ns=(0, 2))
    versions.append(find_version(tmp_path))
    write(file_of(tmp_path, "gateway/1"), line(1))
    versions.append(find_version(tmp_path))
    assert versions[0] == [("gateway-0.jsonl", 1)] and versions[1] == [("gateway-0.jsonl", 2)]
    assert [name for name, _ in versions[2]] == ["gateway-0.jsonl", "gateway-1.jsonl"]
