"""Resource limits of processes: of open files, mostly."""

from __future__ import annotations

import errno
import os
import resource

_FILES = 65536


def raise_file_limit() -> None:
    """Raise the soft limit of open files.

    Every connection is a file; the usual soft limit of 1024 is for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = cap_by_hard_limit(resource.RLIMIT_NOFILE, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cap_by_hard_limit(limit: int, value: int) -> int:
    """Return `value`, or this process's hard limit if that is lower: only root may raise it."""
    _, hard = resource.getrlimit(limit)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def count_open_files(pid: int) -> tuple[int, int]:
    """Return how many files a process has open, and how many it may. Raises OSError.

    Source: proc(5). The size of /proc/PID/fd is their number since Linux 6.2.
    """
    folder = f"/proc/{pid}/fd"
    count = os.stat(folder).st_size or len(os.listdir(folder))  # noqa: PTH116, PTH208
    return count, resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def is_shortage(error: object) -> bool:
    """Return whether an error says that no file can be opened, as too many are."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
