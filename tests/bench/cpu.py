"""CPU time, writes and memory of processes, as the kernel counts them.

Source: Documentation/scheduler/sched-stats.rst (`schedstat`, nanoseconds on a CPU), proc(5).
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: Fields of /proc/stat that are work: user, nice, system, irq, softirq, steal.
_WORK = (0, 1, 2, 5, 6, 7)


def cpu_s(pid: int) -> float:
    """CPU time of all threads that live now, in seconds; 0 when the process is gone."""
    total_ns = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text().split()[0])
    except OSError:
        pass
    return total_ns / 1e9


def read_own_s(path: str | Path) -> float:
    """CPU time that a process has written there as a double, in seconds."""
    (own_s,) = struct.unpack("d", Path(path).read_bytes())
    return float(own_s)


def writes(pid: int) -> int:
    """write(2) and writev(2) calls since it began; 0 when that may not be read."""
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            if line.startswith("syscw: "):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def machine_cpu_s() -> float:
    """CPU time that anything on this machine has taken, in seconds, in steps of 10 ms."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[at]) for at in _WORK) / _TICKS_PER_S


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident and proportional set size: what it maps, and its share of that."""
    sizes = dict.fromkeys(("Rss", "Pss"), 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name = line.partition(":")[0]
        if name in sizes:
            sizes[name] = int(line.split()[1]) * 1024
    return sizes["Rss"], sizes["Pss"]


def heap_bytes(pid: int) -> int:
    """Anonymous memory: heap and stacks, and nothing of a file."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def await_calm(within_s: float, cores: float = 0.3, window_s: float = 0.4) -> None:
    """Wait until the machine does next to nothing else, for at most `within_s`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        before = machine_cpu_s()
        time.sleep(window_s)
        if machine_cpu_s() - before < cores * window_s:
            return
