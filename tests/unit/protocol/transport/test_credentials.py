"""How secrets reach a new process, and that they stay nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.errors import StartError
from servekit.protocol.transport.credentials import Credentials, read_credentials

OURS = Credentials("c", "worker", "m/0", b"authority", b"certificate", b"secret", 1.0, 2.0)


def test_what_is_handed_over_is_read_once_and_wiped() -> None:
    fd = OURS.hand_over()
    assert os.get_inheritable(fd), "a child gets it in pass_fds"
    other = os.dup(fd)
    try:
        assert read_credentials(fd) == OURS
        assert os.fstat(other).st_size == 0, "another process that inherited it finds nothing"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    finally:
        os.close(other)


def test_it_is_read_from_its_beginning() -> None:
    fd = OURS.hand_over()
    os.lseek(fd, 3, os.SEEK_SET)
    assert read_credentials(fd) == OURS


def test_a_pipe_does_as_well() -> None:
    end, start = os.pipe()
    os.write(start, OURS.to_bytes()[:10])
    os.write(start, OURS.to_bytes()[10:])
    os.close(start)
    assert read_credentials(end) == OURS


def test_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(OURS.to_bytes())
    fd = os.open(path, os.O_RDONLY)
    assert read_credentials(fd) == OURS
    assert path.read_bytes() == OURS.to_bytes()


@pytest.mark.parametrize("data", [b"", b"not msgpack", b"\x90"])
def test_anything_else_is_refused(data: bytes) -> None:
    end, start = os.pipe()
    os.write(start, data)
    os.close(start)
    with pytest.raises(StartError, match="these are not credentials of servekit"):
        read_credentials(end)


def test_an_endless_source_is_not_read_for_ever() -> None:
    with pytest.raises(StartError):
        read_credentials(os.open("/dev/zero", os.O_RDONLY))


def test_logs_do_not_show_the_key() -> None:
    assert repr(OURS) == "Credentials(c, worker, m/0)"
