"""What one worker holds on GPUs, by NVML's word."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from servekit.supervisor.attestation import group_of, held_bytes, stray_memory
from servekit.supervisor.gpus import Gpu, Holdings, gpu_memory_by_pid


class Vram:
    """The figures of one incarnation. `gpus` are those of the machine, `own` the worker's."""

    def __init__(self, gpus: Sequence[Gpu], own: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self._own = frozenset(gpu.uuid for gpu in own)
        self.held_bytes = 0
        self.stray = ""  # a sentence on what it holds on GPUs not its own

    def forget(self) -> None:
        """The process is gone."""
        self.held_bytes, self.stray = 0, ""

    async def strays(self, pid: int) -> str:
        """Ask now; a sentence on what it holds on GPUs that are not its own, "" if nothing."""
        if not self.gpus:
            return ""
        holdings = await asyncio.to_thread(gpu_memory_by_pid)
        return stray_memory(group_of(pid), self._own, holdings, self.gpus)

    def measure(self, pid: int, holdings: Holdings) -> None:
        """Take its share of what NVML has told."""
        group = group_of(pid)
        self.held_bytes = held_bytes(group, holdings)
        self.stray = stray_memory(group, self._own, holdings, self.gpus)
