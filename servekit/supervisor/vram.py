"""What one worker holds on GPUs, by NVML's word."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from servekit.supervisor.attestation import group_of, held_bytes, stray_memory
from servekit.supervisor.claims import gib
from servekit.supervisor.gpus import Gpu, Holdings, gpu_memory_by_pid
from servekit.supervisor.placement import Assignment

#: Drivers hand memory out in pages of 2 MiB; some of them more is no news.
_TOLERANCE_BYTES = 32 * 2**20


class Vram:
    """The figures of one incarnation. `gpus` are those of the machine."""

    def __init__(self, gpus: Sequence[Gpu], place: Assignment) -> None:
        self.gpus = gpus
        claims = place.claims or (0,) * len(place.gpus)
        self._claims = {gpu.uuid: size for gpu, size in zip(place.gpus, claims, strict=True)}
        self.held_bytes = 0
        self.by_gpu: dict[str, int] = {}
        self.stray = ""  # a sentence on what it holds on GPUs not its own
        self.excess = ""  # a sentence on what it holds beyond its claim
        self.pids: set[int] = set()  # of all incarnations, with what they have started

    def forget(self) -> None:
        """The process is gone."""
        self.held_bytes, self.by_gpu, self.stray, self.excess = 0, {}, "", ""

    async def strays(self, pid: int) -> str:
        """Ask now; a sentence on what it holds on GPUs that are not its own, "" if nothing."""
        if not self.gpus:
            return ""
        holdings = await asyncio.to_thread(gpu_memory_by_pid)
        return stray_memory(group_of(pid), self._claims.keys(), holdings, self.gpus)

    def measure(self, pid: int, holdings: Holdings) -> None:
        """Take its share of what NVML has told."""
        group = group_of(pid)
        self.pids |= group
        self.held_bytes = held_bytes(group, holdings)
        self.by_gpu = {
            uuid: sum(holdings.get(pid, {}).get(uuid, 0) for pid in group) for uuid in self._claims
        }
        self.stray = stray_memory(group, self._claims.keys(), holdings, self.gpus)
        self.excess = self._excess()

    def _excess(self) -> str:
        over = [
            f"{gib(self.by_gpu[gpu.uuid])} of {gpu}, where it claims {gib(claim)}"
            for gpu in self.gpus
            if (claim := self._claims.get(gpu.uuid, 0))
            and self.by_gpu[gpu.uuid] > claim + _TOLERANCE_BYTES
        ]
        return f"holds {' and '.join(over)}" if over else ""
