"""Checks of memory, processors, limits, shared memory and disk. `root` stands for / in tests.

Source: getrlimit(2).
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from servekit.diagnostics.finding import Finding
from servekit.system import cgroup
from servekit.units import format_bytes

_FEW_FILES = 4096
_FEW_PROCESSES = 1024
_LITTLE_SHM_BYTES = 2**30
_LITTLE_MEMORY_BYTES = 2 * 2**30


def check_host(root: Path = Path("/")) -> Iterator[Finding]:
    yield check_memory(root)
    yield check_processors(cgroup.count_usable_cpus(), os.cpu_count() or 1)
    yield check_shared_memory(_shared_memory_bytes(root))
    yield from check_limits()


def check_memory(root: Path) -> Finding:
    """Check the memory available to this cgroup."""
    total, limit = cgroup.machine_memory_bytes(root), cgroup.memory_limit_bytes(root)
    available = cgroup.available_memory_bytes(root)
    if limit is None or limit >= total:
        said = f"{format_bytes(available)} available of {format_bytes(total)}"
    else:
        said = (
            f"{format_bytes(available)} available of the {format_bytes(limit)} that the cgroup "
            f"allows (the host has {format_bytes(total)})"
        )
    if available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", "warning", f"{said}; a model of any size needs more")
    return Finding("memory", "ok", said)


def check_processors(usable: int, of_host: int) -> Finding:
    if usable < of_host:
        return Finding("cpu", "ok", f"{usable} usable of {of_host}: the affinity or cgroup says so")
    return Finding("cpu", "ok", f"{usable} usable")


def _shared_memory_bytes(root: Path) -> int:
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:  # as in a chroot, or a small container
        return 0


def check_shared_memory(total_bytes: int) -> Finding:
    said = f"/dev/shm holds {format_bytes(total_bytes)}"
    if total_bytes < _LITTLE_SHM_BYTES:
        said += "; engines that spread over several GPUs need more: docker run --shm-size=8g"
        return Finding("shared memory", "warning", said)
    return Finding("shared memory", "ok", said)


def check_limits() -> Iterator[Finding]:
    """Check the limits of open files, processes and locked memory that children inherit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the start raises the soft limit
    yield check_limit(
        "open files (nofile)", hard, _FEW_FILES, "every connection is one: ulimit -Hn 65536"
    )
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield check_limit(
        "processes (nproc)", soft, _FEW_PROCESSES, "threads count, too: ulimit -u 65536"
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    yield Finding("limits", "ok", f"{shown} of locked memory (memlock)")


def check_limit(what: str, value: int, least: int, advice: str) -> Finding:
    if value == resource.RLIM_INFINITY:
        return Finding("limits", "ok", f"unlimited {what}")
    if value < least:
        return Finding("limits", "warning", f"only {value} {what}; {advice}")
    return Finding("limits", "ok", f"{value} {what}")


def check_disk(what: str, path: Path, least_bytes: int) -> Finding:
    """Check that a folder, existing or not, can be written and has room."""
    # not by Path.exists, which raises where a folder above it is another user's own
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("disk", "error", f"the {what} {path} cannot be written; choose another")
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize
    said = f"{format_bytes(free)} free for the {what} {path}"
    if disk.f_files and not disk.f_favail:  # file systems without a fixed number say 0 of 0
        said += ", and no inode for another file"
    elif free >= least_bytes:
        return Finding("disk", "ok", said)
    return Finding("disk", "warning", f"{said}; free some space there, or choose another")
