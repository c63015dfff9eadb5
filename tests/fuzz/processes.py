"""The memory and descriptors of an instance's processes, over the time of a run.

Resident memory grows by steps, too, while nothing leaks: CPython's allocator takes a mebibyte at
a time, and what lives on after a peak may keep one. So two things are told: the growth in all, and
the steady growth, that of a typical twentieth times their number, which one step does not change
and what each request leaves behind does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from servekit.protocol.messages import Status
from servekit.system import procfs

#: Of the run after its warm-up.
PARTS = 20


@dataclass(slots=True)
class Usage:
    """One process. Memory by progress of the run, from 0 to 1; up to `warm` is the warm-up."""

    name: str
    pid: int
    warm: float
    fds_before: int = 0
    fds_after: int = 0
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> float:
        """The median of its resident memory in that part of the run; 0 if it was not seen then."""
        seen = [size for at, size in self.rss_bytes if begin <= at <= end]
        return median(seen) if seen else 0.0

    @property
    def start_bytes(self) -> float:
        """When it had done nothing yet."""
        return self.rss_bytes[0][1] if self.rss_bytes else 0.0

    @property
    def parts_bytes(self) -> list[float]:
        """In each part of what comes after the warm-up, where it was seen."""
        edges = [self.warm + (1 - self.warm) * part / PARTS for part in range(PARTS + 1)]
        found = [self.between(begin, end) for begin, end in pairwise(edges)]
        return [size for size in found if size]

    @property
    def warm_bytes(self) -> float:
        return self.parts_bytes[0] if self.seen else 0.0

    @property
    def end_bytes(self) -> float:
        return self.parts_bytes[-1] if self.seen else 0.0

    @property
    def seen(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self.start_bytes) and len(self.parts_bytes) > PARTS / 2

    @property
    def warming(self) -> float:
        """Growth in the warm-up, as a share of what it had at the start."""
        return self.warm_bytes / self.start_bytes - 1 if self.seen else 0.0

    @property
    def growth(self) -> float:
        """After the warm-up, as a share of what it had then."""
        return self.end_bytes / self.warm_bytes - 1 if self.seen else 0.0

    @property
    def steady(self) -> float:
        """As `growth`, had all parts brought what the one in the middle of them brought.

        Memory that rises and falls is not steady: it is no more than `growth`.
        """
        if not self.seen:
            return 0.0
        steps = [after - before for before, after in pairwise(self.parts_bytes)]
        return min(median(steps) * len(steps) / self.warm_bytes, self.growth)


class Watched:
    """All processes of an instance. `warm`: which share of the run is the warm-up."""

    def __init__(self, supervisor: int, status: Status, warm: float) -> None:
        replicas = [replica for model in status.models for replica in model.replicas]
        found = [("supervisor", supervisor)]
        found += [(one.name, one.pid) for one in status.gateways if one.pid]
        found += [(one.name, one.pid) for one in replicas if one.pid]
        self.usages = [Usage(name, pid, warm) for name, pid in found]
        for usage in self.usages:
            usage.fds_before = fds(usage.pid)

    def sample(self, progress: float) -> None:
        """Note the memory, once for each progress: what is slow to answer counts no more for it."""
        if self.usages[0].rss_bytes and self.usages[0].rss_bytes[-1][0] == progress:
            return
        for usage in self.usages:
            usage.rss_bytes.append((progress, procfs.rss_bytes(usage.pid)))

    def settled(self) -> bool:
        """Whether all have as few descriptors as before."""
        for usage in self.usages:
            usage.fds_after = fds(usage.pid)
        return all(usage.fds_after <= usage.fds_before for usage in self.usages)

    def complaints(self, steady: float, growth: float) -> list[str]:
        found = []
        for usage in self.usages:
            if not procfs.rss_bytes(usage.pid):
                found.append(f"{usage.name} ended")
            elif not usage.seen:
                found.append(f"the memory of {usage.name} was not seen: send more")
            if usage.steady > steady:
                found.append(f"{usage.name} grows steadily, by {usage.steady:.1%}")
            if usage.growth > growth:
                found.append(f"{usage.name} grew by {usage.growth:.1%} after the warm-up")
            if usage.fds_after > usage.fds_before:
                more = usage.fds_after - usage.fds_before
                found.append(f"{usage.name} has {more} descriptors more than before")
        return found


def fds(pid: int) -> int:
    """Open descriptors, without those of logs, which the first line opens; 0 when it is gone."""
    found = 0
    with contextlib.suppress(OSError):
        for path in (Path("/proc") / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += not str(path.readlink()).endswith(".log")
    return found
