"""Resource limits: open files, errors that say that they are too many, and hard limits."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.system.rlimits import cap_by_hard_limit, count_open_files, is_shortage


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


def test_no_more_than_the_hard_limit_is_asked_for() -> None:
    code = (
        "import resource as r; from servekit.system.rlimits import cap_by_hard_limit as cap;"
        "r.setrlimit(r.RLIMIT_CORE, (5, 5)); print(cap(r.RLIMIT_CORE, 7), cap(r.RLIMIT_CORE, 3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5 3\n"
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert hard != resource.RLIM_INFINITY or cap_by_hard_limit(resource.RLIMIT_FSIZE, 7) == 7
