"""The memory and descriptors of an instance's processes, over the time of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from servekit.supervisor import procfs
from servekit.wire.messages import Status


@dataclass(slots=True)
class Usage:
    """One process. Memory by progress of the run, from 0 to 1."""

    name: str
    pid: int
    fds_before: int = 0
    fds_after: int = 0
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> float:
        """The median of its resident memory in that part of the run; 0 if it was not seen then."""
        seen = [size for at, size in self.rss_bytes if begin <= at <= end]
        return median(seen) if seen else 0.0

    @property
    def warm_bytes(self) -> float:
        return self.between(0.15, 0.25)

    @property
    def end_bytes(self) -> float:
        return self.between(0.9, 1.0)

    @property
    def growth(self) -> float:
        """After the warm-up, as a share of what it had then."""
        return self.end_bytes / self.warm_bytes - 1 if self.warm_bytes else 0.0


class Watched:
    """All processes of an instance."""

    def __init__(self, supervisor: int, status: Status) -> None:
        replicas = [replica for model in status.models for replica in model.replicas]
        found = [("supervisor", supervisor)]
        found += [(one.name, one.pid) for one in status.gateways if one.pid]
        found += [(one.name, one.pid) for one in replicas if one.pid]
        self.usages = [Usage(name, pid) for name, pid in found]
        for usage in self.usages:
            usage.fds_before = fds(usage.pid)

    def sample(self, progress: float) -> None:
        for usage in self.usages:
            usage.rss_bytes.append((progress, procfs.rss_bytes(usage.pid)))

    def settled(self) -> bool:
        """Whether all have as few descriptors as before."""
        for usage in self.usages:
            usage.fds_after = fds(usage.pid)
        return all(usage.fds_after <= usage.fds_before for usage in self.usages)

    def complaints(self, growth: float) -> list[str]:
        found = []
        for usage in self.usages:
            if not procfs.rss_bytes(usage.pid):
                found.append(f"{usage.name} ended")
            if usage.growth > growth:
                found.append(f"{usage.name} grew by {usage.growth:.0%} after the warm-up")
            if usage.fds_after > usage.fds_before:
                more = usage.fds_after - usage.fds_before
                found.append(f"{usage.name} has {more} descriptors more than before")
        return found


def fds(pid: int) -> int:
    """Open descriptors; 0 when it is gone."""
    try:
        return len(os.listdir(Path("/proc") / str(pid) / "fd"))  # noqa: PTH208 - only the count
    except OSError:
        return 0
