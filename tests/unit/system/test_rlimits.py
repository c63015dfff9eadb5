"""Open files: their number, and errors that say that they are too many."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from servekit.system.rlimits import count_open_files, is_shortage


def test_open_files_are_counted(tmp_path: Path) -> None:
    before, limit = count_open_files(os.getpid())
    with (tmp_path / "one").open("w"):
        assert count_open_files(os.getpid()) == (before + 1, limit)
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_files_of_a_process_that_has_ended_cannot_be_counted() -> None:
    with pytest.raises(FileNotFoundError):
        count_open_files(2**22 + 1)


def test_what_says_that_files_are_too_many() -> None:
    assert is_shortage(OSError(errno.EMFILE, "")) and is_shortage(OSError(errno.ENFILE, ""))
    assert not is_shortage(OSError(errno.ENOENT, "")) and not is_shortage(None)
