"""The memory and the processors of this machine, within the limits of this process's cgroups.

Source: proc(5); kernel cgroup-v2 (memory.max, memory.current, memory.stat, memory.events, cpu.max)
and cgroup-v1 (memory.limit_in_bytes, memory.usage_in_bytes, cpu.cfs_quota_us).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
#: Without a limit, cgroup v1 reports the largest multiple of the page size, which is above this.
_UNLIMITED_BYTES = 2**60


def total_memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory of this machine, or its cgroup's limit; 0 if unknown."""
    total, limit = machine_memory_bytes(root), memory_limit_bytes(root)
    return min(total or limit, limit) if limit is not None else total


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be allocated without swapping, within the limits; 0 if unknown."""
    available = _read_meminfo(root, "MemAvailable")
    return min([available, *(room for _, room in _memory_limits(root))])


def machine_memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory of the whole machine; 0 if unknown."""
    return _read_meminfo(root, "MemTotal")


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the tightest memory limit of the cgroup and those above it; None without any."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def count_oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown.

    Counted in our own cgroup if possible, else on this machine since boot (/proc/vmstat).
    """
    events = [folder / "memory.events" for folder, v1 in _own_groups(root, "memory") if not v1]
    counts = (_read_figure(path, "oom_kill") for path in (*events, root / "proc/vmstat"))
    return next((count for count in counts if count is not None), 0)


def count_usable_cpus() -> int:
    """Return the cores this process may use: its affinity, and its cgroup's quota rounded up."""
    affinity = len(os.sched_getaffinity(0))
    quota = cpu_quota(Path("/sys/fs/cgroup"))
    return max(1, min(affinity, quota) if quota else affinity)


def cpu_quota(mount: Path) -> int | None:
    """Return the cores of a CPU quota, None if unlimited."""
    try:
        quota, period = (mount / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (mount / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (mount / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdecimal() or not period.isdecimal():
        return None  # "max", or -1
    return -(-int(quota) // int(period))


def _read_meminfo(root: Path, field: str) -> int:
    return (_read_figure(root / "proc/meminfo", f"{field}:") or 0) * 1024


def _read_figure(path: Path, *names: str) -> int | None:
    """Return the number of the first line that begins with one of these names; None without."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name in names:
                return int(rest.split()[0])
    return None


def _own_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of this process's cgroup in each hierarchy, and whether it is version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield root / "sys/fs/cgroup" / path.lstrip("/"), False
        elif controller in controllers.split(","):
            yield root / "sys/fs/cgroup" / controller / path.lstrip("/"), True


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and bytes left under it, for the own cgroup and all above that have a limit."""
    for own, v1 in _own_groups(root, "memory"):
        mount = root / ("sys/fs/cgroup/memory" if v1 else "sys/fs/cgroup")
        names = ("memory.max", "memory.current")
        if v1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        # in a container the folder may not exist; its limits are at the mount then
        for folder in (own, *own.parents):
            if folder == mount or mount in folder.parents:
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    limit, used = (int((folder / name).read_text()) for name in names)
                    if limit < _UNLIMITED_BYTES:
                        yield limit, max(0, limit - used + _reclaimable_bytes(folder))


def _reclaimable_bytes(folder: Path) -> int:
    """Return the size of page cache that counts as usage, but that the kernel frees if needed."""
    return _read_figure(folder / "memory.stat", "inactive_file", "total_inactive_file") or 0
