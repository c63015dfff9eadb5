"""Check by NVML that a worker holds memory on its own GPUs only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from servekit.system import procfs
from servekit.system.gpu.gpus import Gpu, Holdings
from servekit.units import format_bytes

#: PIDs by process group, within `one_look`.
_census: ContextVar[dict[int, set[int]] | None] = ContextVar("_census", default=None)


def pids_by_group(processes: Iterable[procfs.Process] | None = None) -> dict[int, set[int]]:
    """Return the PIDs of `processes`, by default all of the machine, by process group."""
    census: dict[int, set[int]] = {}
    for process in procfs.all_processes() if processes is None else processes:
        census.setdefault(process.group, set()).add(process.pid)
    return census


@contextmanager
def one_look(census: dict[int, set[int]] | None = None) -> Iterator[None]:
    """Read /proc once for all calls of `group_of` in the block, or use what was read.

    Otherwise each call reads every process of the machine. Within another block nothing is read.
    """
    if census is None and (census := _census.get()) is None:
        census = pids_by_group()
    token = _census.set(census)
    try:
        yield
    finally:
        _census.reset(token)


def group_of(pid: int) -> frozenset[int]:
    """Return the PIDs of a child and of the other processes in its process group."""
    if (census := _census.get()) is not None:
        return frozenset({pid, *census.get(pid, ())})
    return frozenset({pid, *(p.pid for p in procfs.all_processes() if p.group == pid)})


def find_strays(pids: Collection[int], own: Collection[str], holdings: Holdings) -> dict[str, int]:
    """Return the bytes that `pids` hold on GPUs other than `own`, by UUID."""
    found: dict[str, int] = {}
    for pid in pids:
        for uuid, held_bytes in holdings.get(pid, {}).items():
            if uuid not in own:
                found[uuid] = found.get(uuid, 0) + held_bytes
    return found


def stray_memory(
    pids: Collection[int], own: Collection[str], holdings: Holdings, gpus: Sequence[Gpu]
) -> str:
    """Return a message about the GPUs other than `own` on which `pids` hold memory; "" if none."""
    names = {gpu.uuid: str(gpu) for gpu in gpus}
    found = find_strays(pids, own, holdings)
    if not found:
        return ""
    held = " and ".join(
        f"{format_bytes(held_bytes)} on {names.get(uuid, uuid)}"
        for uuid, held_bytes in sorted(found.items())
    )
    return f"holds {held}, which is not its own"


def held_bytes(pids: Collection[int], holdings: Holdings) -> int:
    """Return the bytes that `pids` hold on all GPUs together."""
    return sum(sum(holdings.get(pid, {}).values()) for pid in pids)
