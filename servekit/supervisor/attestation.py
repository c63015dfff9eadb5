"""Whether a worker holds memory on its own GPUs only, by NVML's word."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from servekit.supervisor import procfs
from servekit.supervisor.gpus import Gpu, Holdings


def group_of(pid: int) -> frozenset[int]:
    """The PIDs of a child and of what it has started in its process group."""
    return frozenset({pid, *(p.pid for p in procfs.everyone() if p.group == pid)})


def strays(pids: Collection[int], own: Collection[str], holdings: Holdings) -> dict[str, int]:
    """Bytes that `pids` hold on GPUs other than `own`, by UUID."""
    found: dict[str, int] = {}
    for pid in pids:
        for uuid, held_bytes in holdings.get(pid, {}).items():
            if uuid not in own:
                found[uuid] = found.get(uuid, 0) + held_bytes
    return found


def stray_memory(
    pids: Collection[int], own: Collection[str], holdings: Holdings, gpus: Sequence[Gpu]
) -> str:
    """A sentence that names the GPUs other than `own` on which `pids` hold memory; "" if none."""
    names = {gpu.uuid: str(gpu) for gpu in gpus}
    found = strays(pids, own, holdings)
    if not found:
        return ""
    held = " and ".join(
        f"{held_bytes / 2**20:.0f} MiB on {names.get(uuid, uuid)}"
        for uuid, held_bytes in sorted(found.items())
    )
    return f"holds {held}, which is not its own"


def held_bytes(pids: Collection[int], holdings: Holdings) -> int:
    """Bytes that `pids` hold on all GPUs together."""
    return sum(sum(holdings.get(pid, {}).values()) for pid in pids)
