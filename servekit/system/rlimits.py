"""The limit of open files per process."""

from __future__ import annotations

import resource

_FILES = 65536


def raise_file_limit() -> None:
    """Raise the soft limit of open files.

    Every connection is a file; the usual soft limit of 1024 is for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
