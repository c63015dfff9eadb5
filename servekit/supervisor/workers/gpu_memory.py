"""What one worker has to do with GPU memory: its claim, its turn to load, what it really holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from servekit.protocol.messages import GpuStatus
from servekit.supervisor.event_log import journal
from servekit.supervisor.scheduling.gpu_admission import NOTHING, GpuAdmission
from servekit.supervisor.scheduling.memory_requests import gib
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.scheduling.remote_gpus import RemoteGpus
from servekit.system.gpu_memory_audit import group_of, held_bytes, stray_memory, strays
from servekit.system.gpus import Gpu, Holdings, gpu_memory_by_pid

log: Any = structlog.get_logger("servekit.supervisor")

#: Drivers hand memory out in pages of 2 MiB; some of them more is no news.
_TOLERANCE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """How a worker gets in: by which gate, and what has to be free of each of its GPUs."""

    gate: GpuAdmission
    needs: tuple[int, ...]


class WorkerGpuMemory:
    """Of one worker, through all its incarnations. `gpus` are those of the machine it is on.

    `waits` is told what it waits for before it may load, "" when it does not any more.
    """

    def __init__(
        self,
        place: Assignment,
        gpus: Sequence[Gpu],
        entry: Entry | None,
        waits: Callable[[str], None],
    ) -> None:
        self.name = place.name
        self.place = place
        self.gpus = gpus
        self.own = place.gpus
        self.in_use: tuple[GpuStatus, ...] = ()  # its own, where they are on another machine
        self.lacking = NOTHING  # while it waits: what others would have to give, by GPU in bytes
        self.pid = 0
        self.held_bytes = 0
        self.by_gpu: dict[str, int] = {}
        self.stray_by_gpu: dict[str, int] = {}  # on GPUs not its own
        self.stray = ""  # a sentence on what it holds on GPUs not its own
        self.excess = ""  # a sentence on what it holds beyond its claim
        self._entry = entry
        self._waits = waits
        self._pids: set[int] = set()  # of all incarnations, with what they have started
        claims = place.claims or (0,) * len(place.gpus)
        self.claims = {gpu.uuid: size for gpu, size in zip(place.gpus, claims, strict=True)}

    # ---- its claim

    @property
    def need_bytes(self) -> Mapping[str, int]:
        """What has to be free before it is started, by GPU."""
        needs = self._entry.needs if self._entry is not None else (0,) * len(self.place.gpus)
        return {gpu.uuid: size for gpu, size in zip(self.place.gpus, needs, strict=True)}

    def waits(self, what: str, lacking: Mapping[str, int] = NOTHING) -> None:
        self.lacking = lacking
        self._waits(what)

    async def enter(self) -> str:
        """Wait until it may load; the reason if it may not."""
        return "" if self._entry is None else await self._entry.gate.enter(self)

    def loaded(self) -> None:
        """The next one may load."""
        if self._entry is not None:
            self._entry.gate.loaded(self.name)

    async def fell_asleep(self) -> None:
        """What it has given back may be claimed by others, until it enters again."""
        if self._entry is not None:
            await self._entry.gate.fell_asleep(self)

    def loads(self, phase: str) -> None:
        """It says how far it is; see `wire.values.Progress`."""
        if self._entry is not None:
            from_files = phase not in ("fetch", "convert")
            self._entry.gate.loads(self.name, from_files=from_files)

    def leave(self) -> None:
        """Its process is reaped, or was never started."""
        if self._entry is not None:
            self._entry.gate.left(self.name, self._pids)
        self._pids = set()  # in its next life they may be anybody's

    # ---- its figures

    def begin(self, pid: int) -> None:
        """It has a process."""
        self.pid = pid
        self._pids.add(pid)

    def forget(self) -> None:
        """The process is gone."""
        self.pid, self.held_bytes, self.stray, self.excess = 0, 0, "", ""
        self.by_gpu, self.stray_by_gpu = {}, {}

    async def strays(self) -> str:
        """Ask now; a sentence on what it holds on GPUs that are not its own, "" if nothing."""
        if not self.gpus:
            return ""
        holdings = await asyncio.to_thread(gpu_memory_by_pid)
        group = group_of(self.pid)
        self._pids |= group
        return stray_memory(group, self.claims.keys(), holdings, self.gpus)

    def measure(self, told: Holdings | RemoteGpus) -> None:
        """Take its share of what NVML has told, here or where it is."""
        if isinstance(told, RemoteGpus):
            self.own, self.gpus, self.in_use = told.own, told.gpus, told.in_use
            self.claims = dict.fromkeys((gpu.uuid for gpu in told.own), 0)
            here = told.pid == self.pid  # else it is news of one that has died
            self._measure(frozenset({self.pid}), {self.pid: told.held} if here else {})
        elif self.pid:
            group = group_of(self.pid)
            self._pids |= group
            self._measure(group, told)

    def _measure(self, group: frozenset[int], holdings: Holdings) -> None:
        self.held_bytes = held_bytes(group, holdings)
        self.by_gpu = {
            uuid: sum(holdings.get(pid, {}).get(uuid, 0) for pid in group) for uuid in self.claims
        }
        self.stray_by_gpu = strays(group, self.claims.keys(), holdings)
        self.stray = stray_memory(group, self.claims.keys(), holdings, self.gpus)
        known, self.excess = bool(self.excess), self._excess()
        if self.excess and not known:
            self.complain("more than its claim", self.excess)
        if self._entry is not None and self.place.gpus:
            self._entry.gate.ledger.measured(self.name, self.by_gpu)

    def complain(self, of: str, reason: str) -> None:
        """Say so in the log and in the events."""
        log.error(of, child=self.name, pid=self.pid, reason=reason)
        journal.tell("stray", reason, worker=self.name, pid=self.pid)

    @property
    def alert(self) -> str:
        return "; ".join(filter(None, (self.stray, self.excess)))

    def _excess(self) -> str:
        over = [
            f"{gib(self.by_gpu[gpu.uuid])} of {gpu}, where it claims {gib(claim)}"
            for gpu in self.gpus
            if (claim := self.claims.get(gpu.uuid, 0))
            and self.by_gpu[gpu.uuid] > claim + _TOLERANCE_BYTES
        ]
        return f"holds {' and '.join(over)}" if over else ""
