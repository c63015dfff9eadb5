"""How many threads an engine computes with on the CPU."""

from __future__ import annotations

import os

#: Threads beside a GPU. The host's share of the work is small; more threads mostly wait for one
#: another and for those of other workers.
HOST_THREADS = 4


def count_threads(asked: int | None, *, on_gpu: bool) -> int:
    """Return the threads: as configured, few beside a GPU, by OMP_NUM_THREADS, or half the cores.

    More threads are slower for models small enough for a CPU, and erratic on shared cores.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0))
    if on_gpu:
        return min(HOST_THREADS, cores)
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() and int(stated) else max(1, cores // 2)
