from __future__ import annotations

from pathlib import Path

import pytest

from servekit.supervisor.output import Output, RotatingFile


def test_rotates_by_size_and_keeps_a_few(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", max_bytes=10, keep=2)
    for number in range(8):
        file.write(b"%04d\n" % number)
    file.close()
    assert (tmp_path / "x.log").read_bytes() == b"0006\n0007\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"0004\n0005\n"
    assert (tmp_path / "x.log.2").read_bytes() == b"0002\n0003\n"
    assert len(list(tmp_path.iterdir())) == 3


def test_goes_on_where_an_earlier_incarnation_stopped(tmp_path: Path) -> None:
    for line in (b"first\n", b"second\n"):
        file = RotatingFile(tmp_path / "x.log")
        file.write(line)
        file.close()
    assert (tmp_path / "x.log").read_bytes() == b"first\nsecond\n"
    assert (tmp_path / "x.log").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_refuses_does_not_raise(tmp_path: Path) -> None:
    RotatingFile(tmp_path / "missing" / "x.log").write(b"lost\n")
    file = RotatingFile(Path("/dev/full"))
    file.write(b"lost\n")
    file.write(b"lost\n")
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
