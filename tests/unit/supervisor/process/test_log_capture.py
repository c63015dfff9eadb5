from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from servekit.supervisor.process.log_capture import Output, RotatingFile


def test_rotates_by_size_and_keeps_a_few(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", max_bytes=10, keep=2)
    for number in range(8):
        file.append_line(b"%04d\n" % number)
    file.close()
    assert (tmp_path / "x.log").read_bytes() == b"0006\n0007\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"0004\n0005\n"
    assert (tmp_path / "x.log.2").read_bytes() == b"0002\n0003\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_goes_on_where_an_earlier_incarnation_stopped(tmp_path: Path) -> None:
    for line in (b"first\n", b"second\n"):
        file = RotatingFile(tmp_path / "x.log")
        file.append_line(line)
        file.close()
    assert (tmp_path / "x.log").read_bytes() == b"first\nsecond\n"
    assert (tmp_path / "x.log").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_refuses_does_not_raise(tmp_path: Path) -> None:
    RotatingFile(tmp_path / "missing" / "x.log").append_line(b"lost\n")
    file = RotatingFile(Path("/dev/full"))
    file.append_line(b"lost\n")
    file.append_line(b"lost\n")
    file.close()


def test_a_line_is_written_whole_or_lost_whole_and_the_gap_is_told_of(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "x.log"
    file = RotatingFile(path)
    file.append_line(b"first\n")
    with capture_logs() as told:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
            file.append_line(b"second\n")  # of which four bytes fit
            assert path.stat().st_size == len(b"first\n")
            file.append_line(b"third\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for line in (b"fourth\n", b"fifth\n"):
            file.append_line(line)
    gap = b"[2 lines lost: File too large]\n"
    assert path.read_bytes() == b"first\n" + gap + b"fourth\nfifth\n"
    assert [event["event"] for event in told] == ["log_file_unwritable", "log_file_recovered"]
    file.close()


def test_a_log_that_was_removed_to_make_room_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = RotatingFile(path)
    file.append_line(b"first\n")
    path.unlink()
    file.append_line(b"second\n")
    assert path.read_bytes() == b"second\n"
    path.write_bytes(b"")  # emptied, as `: > x.log` does
    file.append_line(b"third\n")
    assert path.read_bytes() == b"third\n"
    file.close()


@pytest.mark.parametrize("cut", range(1, 12))
async def test_lines_are_whole_however_they_arrive(tmp_path: Path, cut: int) -> None:
    lines: list[str] = []
    output = Output(RotatingFile(tmp_path / "x.log"), lines.append)
    data = "eins\r\nzwö\n\n  \ndrei".encode()
    output.data_received(data[:cut])
    output.data_received(data[cut:])
    output.connection_lost(None)
    assert lines == ["eins", "zwö", "drei"]
    assert output.ended.done()


async def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    lines: list[str] = []
    output = Output(RotatingFile(tmp_path / "x.log"), lines.append)
    for _ in range(10):
        output.data_received(b"x" * 2**14)
    output.connection_lost(None)
    assert sum(map(len, lines)) == 10 * 2**14
    assert max(map(len, lines)) <= 2**16 + 2**14


async def test_only_the_last_lines_are_remembered(tmp_path: Path) -> None:
    output = Output(RotatingFile(tmp_path / "x.log"), lambda line: None, tail=3)
    output.data_received(b"".join(b"%d\n" % n for n in range(10)))
    assert list(output.tail) == ["7", "8", "9"]


async def test_stacks_are_kept_apart_from_the_last_words(tmp_path: Path) -> None:
    output = Output(RotatingFile(tmp_path / "x.log"), lambda line: None, tail=3)
    frames = b"".join(b'  File "x.py", line %d in f\n' % n for n in range(20))
    dump = b"".join(
        b"Thread 0x%016x [worker] (most recent call first):\n" % n + frames for n in range(50)
    )
    dump += b"Current thread 0x00007f (most recent call first):\n  <no Python frame>\n"
    output.data_received(b"before\nFatal Python error: Aborted\n" + dump + b"after\n  File it\n")
    assert list(output.tail) == ["Fatal Python error: Aborted", "after", "  File it"]
    assert len(output.stacks) == 50 * 21 + 2
    assert output.stacks[-1] == "  <no Python frame>"


async def test_a_dump_is_waited_for_until_it_is_over(tmp_path: Path) -> None:
    output = Output(RotatingFile(tmp_path / "x.log"), lambda line: None)
    loop = asyncio.get_running_loop()
    lines = [b"Thread 0x1 (most recent call first):\n", *[b"  File one\n"] * 5]
    for number, line in enumerate(lines):
        loop.call_later(0.03 * number, output.data_received, line)
    await output.dumped(within_s=5.0)
    assert len(output.stacks) == 6
    began = loop.time()
    await output.dumped(within_s=0.1)
    assert list(output.stacks) == [], "those of an earlier dump do not count"
    assert loop.time() - began < 1.0
