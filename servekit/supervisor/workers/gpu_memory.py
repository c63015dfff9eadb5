"""The GPU memory of one worker: its claim, its admission to load, and its actual usage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.protocol.control.ray_messages import Measured, RemoteGpu
from servekit.protocol.messages import GpuStatus
from servekit.supervisor.event_log import journal
from servekit.supervisor.scheduling.gpu_admission import NOTHING, GpuAdmission
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.system.gpu.gpu_memory_audit import find_strays, group_of, held_bytes, stray_memory
from servekit.system.gpu.gpus import Gpu, Holdings, Slot, gpu_memory_by_pid
from servekit.units import format_bytes

log: Any = structlog.get_logger("servekit.supervisor")

#: Drivers allocate pages of 2 MiB; an excess of a few of them is not reported.
_TOLERANCE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class RemoteGpus:
    """GPU information of one remote worker; empty until the worker is placed."""

    own: Slot = ()  # GPUs assigned to the worker
    gpus: Sequence[Gpu] = ()  # all that NVML knows there
    in_use: tuple[GpuStatus, ...] = ()  # the assigned ones
    pid: int = 0  # PID that `held` belongs to; 0: none
    held: Mapping[str, int] = field(default_factory=dict)  # bytes, by UUID


def make_slot(gpus: Sequence[RemoteGpu], node: str) -> Slot:
    """Return the GPUs that the worker was assigned on its node; their free memory is unknown."""
    return tuple(Gpu(one.index, one.uuid, one.name, one.total_bytes, 0, (), node) for one in gpus)


def read_measurements(own: Slot, node: str, told: Measured) -> RemoteGpus:
    """Return what a worker's node reports; its NVML may be missing, or not answer."""
    found = [replace(one, node=node) for one in told.gpus]
    known = tuple(_make_gpu(one) for one in found)
    uuids = {gpu.uuid for gpu in own}
    in_use = tuple(one for one in found if one.uuid in uuids)
    return RemoteGpus(own, known or own, in_use, told.pid, told.held)


def _make_gpu(one: GpuStatus) -> Gpu:
    free_bytes = one.total_bytes - one.used_bytes
    return Gpu(one.index, one.uuid, one.name, one.total_bytes, free_bytes, (), one.node)


@dataclass(frozen=True, slots=True)
class Entry:
    """The admission of a worker: its gate, and the bytes that must be free on each of its GPUs."""

    gate: GpuAdmission
    needs: tuple[int, ...]


class GpuMemory:
    """The GPU memory of one worker, through all its incarnations.

    `gpus` are those of the worker's machine. `waits` is called with what the worker waits for
    before it may load, and with "" when it no longer waits.
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
        self.in_use: tuple[GpuStatus, ...] = ()  # its own, if they are on another machine
        self.lacking = NOTHING  # while it waits: bytes that others would have to free, by GPU
        self.pid = 0
        self.held_bytes = 0
        self.by_gpu: dict[str, int] = {}
        self.stray_by_gpu: dict[str, int] = {}  # on GPUs not its own
        self.stray = ""  # a sentence on what it holds on GPUs not its own
        self.excess = ""  # a sentence on what it holds beyond its claim
        self._entry = entry
        self._waits = waits
        self._pids: set[int] = set()  # of all incarnations, with their descendants
        claims = place.claims or (0,) * len(place.gpus)
        self.claims = {gpu.uuid: size for gpu, size in zip(place.gpus, claims, strict=True)}

    # ---- claim and admission

    @property
    def need_bytes(self) -> Mapping[str, int]:
        """The bytes that must be free before it is started, by GPU."""
        needs = self._entry.needs if self._entry is not None else (0,) * len(self.place.gpus)
        return {gpu.uuid: size for gpu, size in zip(self.place.gpus, needs, strict=True)}

    def waits(self, what: str, lacking: Mapping[str, int] = NOTHING) -> None:
        self.lacking = lacking
        self._waits(what)

    async def await_admission(self) -> str:
        """Wait until it may load; return the reason if it may not."""
        return "" if self._entry is None else await self._entry.gate.await_admission(self)

    def loaded(self) -> None:
        """Let the next worker load."""
        if self._entry is not None:
            self._entry.gate.loaded(self.name)

    async def fell_asleep(self) -> None:
        """Release the memory it has freed, until it enters again."""
        if self._entry is not None:
            await self._entry.gate.fell_asleep(self)

    def track_load(self, phase: str) -> None:
        """Pass on the phase of its load, once admitted; see `protocol.types.Progress`."""
        if self._entry is not None and self.pid:
            from_files = phase not in ("fetch", "convert")
            self._entry.gate.track_load(self.name, from_files=from_files)

    def end_admission(self) -> None:
        """Leave the gate: its process is reaped, or was never started."""
        if self._entry is not None:
            self._entry.gate.left(self.name, self._pids)
        self._pids = set()  # the next life's processes may be others with these PIDs

    # ---- measurements

    def set_pid(self, pid: int) -> None:
        """Record the PID of its process, which may use its GPUs from now on."""
        self.pid = pid
        self._pids.add(pid)

    def reset_figures(self) -> None:
        """Forget the figures of a process that is gone."""
        self.pid, self.held_bytes, self.stray, self.excess = 0, 0, "", ""
        self.by_gpu, self.stray_by_gpu = {}, {}

    async def find_strays(self) -> str:
        """Ask NVML; return a sentence on memory it holds on other GPUs, "" if none."""
        if not self.gpus:
            return ""
        holdings = await asyncio.to_thread(gpu_memory_by_pid)
        group = group_of(self.pid)
        self._pids |= group
        return stray_memory(group, self.claims.keys(), holdings, self.gpus)

    def update_figures(self, told: Holdings | RemoteGpus) -> None:
        """Take its share of NVML's figures, from this machine or its node."""
        if isinstance(told, RemoteGpus):
            self.own, self.gpus, self.in_use = told.own, told.gpus, told.in_use
            self.claims = dict.fromkeys((gpu.uuid for gpu in told.own), 0)
            here = told.pid == self.pid  # else the figures are of an earlier process
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
        self.stray_by_gpu = find_strays(group, self.claims.keys(), holdings)
        self.stray = stray_memory(group, self.claims.keys(), holdings, self.gpus)
        known, self.excess = bool(self.excess), self._excess()
        if self.excess and not known:
            self.report_stray("gpu_memory_over_claim", self.excess)
        if self._entry is not None and self.place.gpus:
            self._entry.gate.ledger.measured(self.name, self.by_gpu)

    def report_stray(self, event: str, reason: str) -> None:
        """Log the reason, and record its event."""
        log.error(event, child=self.name, pid=self.pid, reason=reason)
        journal.record_event("stray", reason, worker=self.name, pid=self.pid)

    @property
    def alert(self) -> str:
        return "; ".join(filter(None, (self.stray, self.excess)))

    def _excess(self) -> str:
        over = [
            f"{format_bytes(self.by_gpu[gpu.uuid])} of {gpu}, where it claims {format_bytes(claim)}"
            for gpu in self.gpus
            if (claim := self.claims.get(gpu.uuid, 0))
            and self.by_gpu[gpu.uuid] > claim + _TOLERANCE_BYTES
        ]
        return f"holds {' and '.join(over)}" if over else ""
