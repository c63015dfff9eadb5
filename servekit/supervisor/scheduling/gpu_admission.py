"""The gate before each GPU: workers that share one load one at a time, and find the memory free.

A worker passes it before its process is started, with its claim in the ledger, and makes way for
the next when it is ready, or dead. It is let through when NVML shows as much free memory as it
needs, beside what others were promised and have not taken yet. Whoever waits says for what. For
a load that goes on it is waited as long as that takes; for memory only so long, and then it is
said who holds it: an operator can do something about that, and time cannot.

A claim stands until the dead worker's memory is really gone: freeing it takes a driver seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import structlog

from servekit.supervisor.scheduling import free_memory
from servekit.supervisor.scheduling.free_memory import GpuSnapshot
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations, InsufficientMemory
from servekit.supervisor.scheduling.load_queue import LoadQueue
from servekit.supervisor.scheduling.memory_estimator import CONTEXT_BYTES
from servekit.supervisor.scheduling.placement import Assignment
from servekit.system.gpu_memory_audit import group_of, one_look
from servekit.system.gpus import Gpu, Holdings, free_bytes, gpu_memory_by_pid

log: Any = structlog.get_logger("servekit.supervisor")

#: How long it is waited for memory that somebody holds, and how often it is looked at.
PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.1


#: Nobody has to go.
NOTHING: Mapping[str, int] = MappingProxyType({})


class AdmissionRequest(Protocol):
    """A worker that wants to load."""

    name: str
    place: Assignment

    @property
    def pid(self) -> int: ...
    @property
    def need_bytes(self) -> Mapping[str, int]:
        """What has to be free, by the GPU's UUID."""

    def waits(self, what: str, lacking: Mapping[str, int] = NOTHING) -> None:
        """It is told what it waits for, and what of it others would have to give, by GPU in bytes;
        "" when it does not any more.
        """


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """What NVML shows. `free` by UUID; empty where it does not answer."""

    free: Mapping[str, int]
    holdings: Holdings


def read() -> NvmlReading:
    """Blocks."""
    return NvmlReading(free_bytes(), gpu_memory_by_pid())


class BlockReason(NamedTuple):
    """Why one is not let in, and what others would have to give for that."""

    reason: str
    lacking: Mapping[str, int] = NOTHING


class GpuAdmission:
    """One for all GPUs of an instance; on its event loop, and no other thread."""

    def __init__(
        self,
        ledger: GpuReservations,
        read: Callable[[], NvmlReading] = read,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.ledger = ledger
        self._read = read
        self._patience_s = patience_s
        self._turns = LoadQueue()
        self._guests: dict[str, AdmissionRequest] = {}  # who has a claim, by name
        self._up: set[str] = set()  # who has loaded
        self._dead: dict[str, set[int]] = {}  # by name: PIDs whose memory may still be there
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def enter(self, visitor: AdmissionRequest) -> str:
        """Wait until it may load: it has its claim then. Else the reason, and it has what it had.

        One that wakes enters as one that is started does.
        """
        if not visitor.place.gpus:
            return ""
        if (leaving := self._leaving.pop(visitor.name, None)) is not None:
            leaving.cancel()
        passed, before = False, dict(self.ledger.claim_of(visitor.name))
        try:
            self._claim(visitor)
            await self._turns.take(visitor.name, visitor.place.gpus, visitor.waits)
            reason = await self._until_free(visitor)
            passed = not reason
        finally:
            visitor.waits("")
            if not passed:
                self._turn_back(visitor, before)
        return reason

    def _turn_back(self, visitor: AdmissionRequest, before: Mapping[str, int]) -> None:
        if visitor.pid:  # it sleeps on
            self._turns.give(visitor.name)
            self.ledger.claim(visitor.name, before)
        else:
            self.left(visitor.name, ())

    def loaded(self, name: str) -> None:
        """It is up: the next one may load."""
        self._turns.give(name)
        self._up.add(name)

    def loads(self, name: str, *, from_files: bool) -> None:
        """How its load goes on. While it makes the files that it loads from, others may load."""
        if from_files:
            self._turns.step_back(name)
        elif name in self._guests:
            self._turns.step_aside(name, self._guests[name].place.gpus)

    async def fell_asleep(self, visitor: AdmissionRequest) -> None:
        """It has given memory back: from now on it claims what it still holds. `enter` wakes it."""
        name, pid = visitor.name, visitor.pid
        if not visitor.place.gpus or name not in self._guests:
            return
        reading, groups = await asyncio.to_thread(self._look, {name: pid})
        if name not in self._guests or visitor.pid != pid:
            return  # its next life has its claim
        seen = [reading.holdings[one] for one in groups[name] if one in reading.holdings]
        held = {gpu.uuid: sum(one.get(gpu.uuid, 0) for one in seen) for gpu in visitor.place.gpus}
        if not seen and not any(self.ledger.held(name).values()):
            held = {gpu.uuid: self._unseen(visitor, gpu, reading) for gpu in visitor.place.gpus}
        self.ledger.claim(name, self._at_most(visitor, held))

    def _unseen(self, visitor: AdmissionRequest, gpu: Gpu, reading: NvmlReading) -> int:
        """What one may hold whose processes cannot be seen, as in a container: what others do not.

        They hold no more than they claim, and it has a context in any case.
        """
        if gpu.uuid not in reading.free:
            return gpu.total_bytes
        claims = self.ledger.holders(gpu.uuid)
        others = sum(size for name, size in claims.items() if name != visitor.name)
        return max(CONTEXT_BYTES, gpu.total_bytes - reading.free[gpu.uuid] - others)

    def _at_most(self, visitor: AdmissionRequest, held: Mapping[str, int]) -> dict[str, int]:
        claims = zip(visitor.place.gpus, visitor.place.claims, strict=True)
        return {gpu.uuid: min(claim, held[gpu.uuid]) for gpu, claim in claims}

    def left(self, name: str, pids: Collection[int]) -> None:
        """Its processes are reaped; its claim goes when their memory has."""
        self._turns.give(name)
        self._up.discard(name)
        if name not in self._guests or name in self._leaving:
            return
        self._dead.setdefault(name, set()).update(pids)
        if self._dead[name]:
            seeing_off = asyncio.get_running_loop().create_task(self._see_off(name))
            self._leaving[name] = seeing_off
        else:
            self._forget(name)

    # ---- memory

    def _claim(self, visitor: AdmissionRequest) -> BlockReason | None:
        place = visitor.place
        claims = {gpu.uuid: size for gpu, size in zip(place.gpus, place.claims, strict=True)}
        self._guests[visitor.name] = visitor
        try:
            self.ledger.claim(visitor.name, claims)
        except InsufficientMemory as error:
            return BlockReason(error.message)
        return None

    async def _until_free(self, visitor: AdmissionRequest) -> str:
        """Return "" when all is there; or after a time, what is in the way."""
        deadline = time.monotonic() + self._patience_s
        while found := self._claim(visitor) or await self._obstacle(visitor):
            if time.monotonic() > deadline:
                return found.reason
            visitor.waits(f"waits for memory: {found.reason}", found.lacking)
            await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    async def _obstacle(self, visitor: AdmissionRequest) -> BlockReason | None:
        reading, groups = await asyncio.to_thread(self._look, self._pids())
        known = [gpu for gpu in visitor.place.gpus if gpu.uuid in reading.free]
        scenes = [self._scene(visitor, gpu, reading, groups) for gpu in known]
        reason = next(filter(None, map(free_memory.obstacle, scenes)), "")
        short = {scene.gpu.uuid: free_memory.short_bytes(scene) for scene in scenes}
        return (
            BlockReason(reason, {at: size for at, size in short.items() if size})
            if reason
            else None
        )

    def _pids(self) -> dict[str, int]:
        return {name: guest.pid for name, guest in self._guests.items() if guest.pid}

    def _look(self, pids: Mapping[str, int]) -> tuple[NvmlReading, dict[str, frozenset[int]]]:
        """NVML's figures, and all processes of each guest. In a thread: it takes milliseconds."""
        reading = self._read()  # first: who holds what it shows is there at the look, or gone
        with one_look():
            return reading, {name: group_of(pid) for name, pid in pids.items()}

    def _scene(
        self,
        visitor: AdmissionRequest,
        gpu: Gpu,
        reading: NvmlReading,
        groups: Mapping[str, Collection[int]],
    ) -> GpuSnapshot:
        on_gpu = {pid: held[gpu.uuid] for pid, held in reading.holdings.items() if gpu.uuid in held}
        held = {name: sum(on_gpu.get(pid, 0) for pid in group) for name, group in groups.items()}
        dead = {pid for pids in self._dead.values() for pid in pids}
        ours = dead.union(*groups.values())
        others = {
            name: (claim, self._seen(name, held))
            for name, claim in self.ledger.holders(gpu.uuid).items()
            if name != visitor.name
        }
        return GpuSnapshot(
            gpu=gpu,
            free_bytes=reading.free[gpu.uuid],
            need_bytes=visitor.need_bytes.get(gpu.uuid, 0) - held.get(visitor.name, 0),
            others=others,
            dead_bytes=sum(on_gpu.get(pid, 0) for pid in dead),
            strangers={pid: size for pid, size in on_gpu.items() if pid not in ours},
        )

    def _seen(self, name: str, held: Mapping[str, int]) -> int | None:
        """What it holds; None where it holds more than can be seen, or has not begun."""
        is_blind = name not in held or name in self._up
        return held.get(name) or (None if is_blind else 0)

    async def _see_off(self, name: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while await asyncio.to_thread(self._holds, tuple(self._dead.get(name, ()))):
            if time.monotonic() > deadline:
                log.warning("the memory of an ended worker is not free yet", child=name)
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self._leaving.pop(name, None)
        self._forget(name)

    def _holds(self, pids: Collection[int]) -> bool:
        holdings = self._read().holdings
        return any(any(holdings.get(pid, {}).values()) for pid in pids)

    def _forget(self, name: str) -> None:
        self._dead.pop(name, None)
        self._guests.pop(name, None)
        self.ledger.release(name)
