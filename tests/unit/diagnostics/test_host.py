from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from servekit.diagnostics.host import (
    check_disk,
    check_host,
    check_limit,
    check_memory,
    check_processors,
    check_shared_memory,
)

GIB = 2**30


def root(tmp_path: Path, files: dict[str, str]) -> Path:
    """A / of its own, with the few files that are read."""
    kib = GIB // 1024
    files = {
        "proc/meminfo": f"MemTotal: {64 * kib} kB\nMemFree: 1 kB\nMemAvailable: {32 * kib} kB\n",
        **files,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


V2 = {"proc/self/cgroup": "0::/user/job\n"}


def test_the_hosts_memory_where_no_cgroup_limits_it(tmp_path: Path) -> None:
    found = check_memory(root(tmp_path, {**V2, "sys/fs/cgroup/user/job/memory.max": "max\n"}))
    assert (found.level, found.said) == ("ok", "32.0 GiB available of 64.0 GiB")


def test_the_tightest_cgroup_above_us_counts(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": "1\n",
        "sys/fs/cgroup/user/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
    }
    found = check_memory(root(tmp_path, {**V2, **groups}))
    assert found.level == "ok"
    assert found.said == (
        "5.0 GiB available of the 8.0 GiB that the cgroup allows (the host has 64.0 GiB)"
    )


def test_little_memory_is_a_warning(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/user/job/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/job/memory.current": f"{3 * GIB}\n",
    }
    assert check_memory(root(tmp_path, {**V2, **groups})).level == "warning"


def test_processors_that_are_kept_from_us_are_told() -> None:
    assert check_processors(2, 64).said.startswith("2 usable of 64")
    assert check_processors(64, 64).said == "64 usable"


def test_dockers_little_shared_memory_is_a_warning() -> None:
    found = check_shared_memory(64 * 2**20)
    assert found.level == "warning" and "64 MiB" in found.said and "--shm-size" in found.said
    assert check_shared_memory(8 * GIB).level == "ok"


def test_limits_that_are_low_say_what_to_do() -> None:
    found = check_limit("open files (nofile)", 1024, 4096, "ulimit -Hn 65536")
    assert (found.level, found.said) == (
        "warning",
        "only 1024 open files (nofile); ulimit -Hn 65536",
    )
    assert check_limit("open files", resource.RLIM_INFINITY, 4096, "").level == "ok"


def test_disk(tmp_path: Path) -> None:
    assert check_disk("cache", tmp_path / "not" / "yet", 1).level == "ok"
    full = check_disk("cache", tmp_path, 2**60)
    assert full.level == "warning" and "free some space" in full.said
    file = tmp_path / "file"
    file.touch()
    assert check_disk("cache", file / "below", 1).level == "error"


def test_a_disk_without_inodes_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(os.statvfs(tmp_path))
    fields[5:8] = [1000, 0, 0]  # inodes: all, free, free for this user
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    found = check_disk("cache", tmp_path, 1)
    assert found.level == "warning" and "and no inode for another file" in found.said


def test_a_system_without_shared_memory_is_told_of_it(tmp_path: Path) -> None:
    found = [one for one in check_host(root(tmp_path, V2)) if one.area == "shared memory"]
    assert [(one.level, one.said[:14]) for one in found] == [("warning", "/dev/shm holds")]


def test_a_folder_that_is_another_users_own_cannot_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    as_root = os.geteuid() == 0
    if as_root:
        os.setresuid(65534, 65534, 0)
    try:
        assert check_disk("cache", closed / "below" / "it", 1).level == "error"
    finally:
        if as_root:
            os.setresuid(0, 0, 0)
        closed.chmod(0o700)
