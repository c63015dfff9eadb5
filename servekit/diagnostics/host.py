"""Checks of memory, processors, limits, shared memory and disk. `root` stands for / in tests.

Source: proc(5), getrlimit(2), kernel cgroup-v2 (memory.max, memory.current), cgroup-v1.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from servekit.diagnostics.finding import Finding, gib
from servekit.supervisor.process.environment import usable_cpus

_FEW_FILES = 4096
_FEW_PROCESSES = 1024
_LITTLE_SHM_BYTES = 2**30
_LITTLE_MEMORY_BYTES = 2 * 2**30
#: Without a limit, cgroup v1 reports the largest multiple of the page size, which is above this.
_UNLIMITED_BYTES = 2**60


def host(root: Path = Path("/")) -> Iterator[Finding]:
    yield memory(root)
    yield processors(usable_cpus(), os.cpu_count() or 1)
    yield shared_memory(shutil.disk_usage(root / "dev/shm").total)
    yield from limits()


def memory(root: Path) -> Finding:
    """Check the memory available to this cgroup."""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    total, available = (int(fields[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
    said = f"{gib(available)} available of {gib(total)}"
    limit, used = memory_limit(root)
    if limit is not None and limit < total:
        available = min(available, limit - used)
        said = f"{gib(available)} available of the {gib(limit)} that the cgroup allows"
        said += f" (the host has {gib(total)})"
    if available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", "warning", f"{said}; a model of any size needs more")
    return Finding("memory", "ok", said)


def memory_limit(root: Path) -> tuple[int | None, int]:
    """Return the tightest memory limit of the cgroups above, and the use under it, in bytes."""
    tightest: tuple[int | None, int] = (None, 0)
    for folder, limit, usage in _memory_groups(root):
        try:
            text, used = (folder / limit).read_text().strip(), (folder / usage).read_text()
        except OSError:
            continue
        if not text.isdecimal() or int(text) >= _UNLIMITED_BYTES:
            continue
        if tightest[0] is None or int(text) < tightest[0]:
            tightest = int(text), int(used)
    return tightest


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield folder and file names of this process's memory cgroup and of all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        v1 = controllers == "memory"
        mount = root / ("sys/fs/cgroup/memory" if v1 else "sys/fs/cgroup")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inner = mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == mount or mount in folder.parents:
                yield (folder, *(names if v1 else ("memory.max", "memory.current")))


def processors(usable: int, of_host: int) -> Finding:
    if usable < of_host:
        return Finding("cpu", "ok", f"{usable} usable of {of_host}: the affinity or cgroup says so")
    return Finding("cpu", "ok", f"{usable} usable")


def shared_memory(total_bytes: int) -> Finding:
    said = f"/dev/shm holds {gib(total_bytes)}"
    if total_bytes < _LITTLE_SHM_BYTES:
        said += "; engines that spread over several GPUs need more: docker run --shm-size=8g"
        return Finding("shared memory", "warning", said)
    return Finding("shared memory", "ok", said)


def limits() -> Iterator[Finding]:
    """Check the limits of open files, processes and locked memory that children inherit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the start raises the soft limit
    yield limit(
        "open files (nofile)", hard, _FEW_FILES, "every connection is one: ulimit -Hn 65536"
    )
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield limit("processes (nproc)", soft, _FEW_PROCESSES, "threads count, too: ulimit -u 65536")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if locked == resource.RLIM_INFINITY else gib(locked)
    yield Finding("limits", "ok", f"{shown} of locked memory (memlock)")


def limit(what: str, value: int, least: int, advice: str) -> Finding:
    if value == resource.RLIM_INFINITY:
        return Finding("limits", "ok", f"unlimited {what}")
    if value < least:
        return Finding("limits", "warning", f"only {value} {what}; {advice}")
    return Finding("limits", "ok", f"{value} {what}")


def disk(what: str, path: Path, least_bytes: int) -> Finding:
    """Check that a folder, existing or not, can be written and has room."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("disk", "error", f"the {what} {path} cannot be written; choose another")
    free = shutil.disk_usage(there).free
    said = f"{gib(free)} free for the {what} {path}"
    if free < least_bytes:
        return Finding("disk", "warning", f"{said}; free some space there, or choose another")
    return Finding("disk", "ok", said)
