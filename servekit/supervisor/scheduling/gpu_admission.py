"""Admission of workers to GPUs: one load at a time per GPU, once its memory is free.

A worker imports its engine while it waits; once admitted, it may use its GPUs. Its claim is in the
ledger from its start on, and it lets the next one in when it is ready or dead. It is admitted when
NVML reports as much free memory as it needs, beyond what other workers claim and have not allocated
yet. A waiting worker reports what it waits for. It waits without limit for another worker's load,
but only PATIENCE_S for memory; then the error names the holders, since only an operator can help.

A claim stands until the dead worker's memory is really free: a driver takes seconds for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import structlog

from servekit.supervisor.scheduling.gpu_reservations import GpuReservations, InsufficientMemory
from servekit.supervisor.scheduling.memory_requests import CONTEXT_BYTES, Assignment
from servekit.system import procfs
from servekit.system.gpu.gpu_memory_audit import group_of, one_look
from servekit.system.gpu.gpus import Gpu, Holdings, free_bytes, gpu_memory_by_pid
from servekit.units import format_bytes

log: Any = structlog.get_logger("servekit.supervisor")

#: How long to wait for memory that is in use, and how often to check.
PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.1
#: Shortages up to this size are ignored: driver overhead and CUDA's rounding.
SLACK_BYTES = 256 * 2**20
#: No other worker has to give up memory.
NOTHING: Mapping[str, int] = MappingProxyType({})


def _silent(what: str) -> None:
    """Ignore what the worker waits for: it is loading already."""


class LoadQueue:
    """Queue of workers that load, one at a time on each GPU. Use only from one event loop.

    A worker that only fetches or converts files, which may take hours, steps aside, and comes back
    when it loads. It does not wait then, so two workers may load at once; a third waits for both.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}  # by the GPU's UUID
        self._whose: dict[str, str] = {}
        self._aside: dict[str, Sequence[Gpu]] = {}
        self._returning: dict[str, asyncio.Task[None]] = {}

    async def lock_gpus(
        self, name: str, gpus: Sequence[Gpu], tell: Callable[[str], None] = _silent
    ) -> None:
        """Wait for the locks of all `gpus`; `tell` receives what the worker waits for."""
        # Always in the same order, so that two workers cannot deadlock.
        for gpu in sorted(gpus, key=lambda gpu: gpu.index):
            lock = self._locks.setdefault(gpu.uuid, asyncio.Lock())
            if lock.locked():
                tell(f"waits for {self._whose.get(gpu.uuid, 'another')} on {gpu}")
            await lock.acquire()
            self._whose[gpu.uuid] = name

    def release_gpus(self, name: str) -> None:
        """Release the worker's locks, so that the next one may load."""
        self._aside.pop(name, None)
        if (returning := self._returning.pop(name, None)) is not None:
            returning.cancel()
        for uuid, who in list(self._whose.items()):
            if who == name:
                del self._whose[uuid]
                self._locks[uuid].release()

    def step_aside(self, name: str, gpus: Sequence[Gpu]) -> None:
        if name not in self._aside:
            self.release_gpus(name)
            self._aside[name] = gpus

    def step_back(self, name: str) -> None:
        """Take the locks again in the background, if the worker had stepped aside."""
        if (gpus := self._aside.pop(name, None)) is not None:
            returning = asyncio.get_running_loop().create_task(self.lock_gpus(name, gpus))
            self._returning[name] = returning


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """Memory use of one GPU, and the bytes that a worker needs there."""

    gpu: Gpu
    free_bytes: int
    need_bytes: int
    others: Mapping[str, tuple[int, int | None]]  # claim and held bytes (None: unknown), by worker
    dead_bytes: int  # still held by workers that have ended
    strangers: Mapping[int, int]  # bytes held by processes that are not ours, by PID


def short_bytes(scene: GpuSnapshot) -> int:
    """Return the bytes that other workers would have to give up; 0 where none.

    Memory that ended workers still hold becomes free without that, so it counts as free.
    """
    short = scene.need_bytes - (scene.free_bytes + scene.dead_bytes - _promised(scene))
    return short if short > SLACK_BYTES else 0


def _promised(scene: GpuSnapshot) -> int:
    """Return the bytes that other workers claim and have not allocated yet."""
    known = [(claim, held) for claim, held in scene.others.values() if held is not None]
    return sum(max(0, claim - held) for claim, held in known)


def obstacle(scene: GpuSnapshot, about: Callable[[int], str] = procfs.command_line) -> str:
    """Return a message about what is in the way, or "". `about` returns the command of a PID.

    Memory that other workers claim and have not allocated yet does not count as free. Where a
    worker's processes cannot be seen, the memory that it holds is unknown, but already missing from
    the free memory.
    """
    if scene.dead_bytes:
        held = format_bytes(scene.dead_bytes)
        return f"{held} of {scene.gpu} are still held by a worker of ours that has ended"
    short, promised = short_bytes(scene), _promised(scene)
    if not short:
        return ""
    less = ""
    if promised:
        less = f", less {format_bytes(promised)} that others were promised and have not taken"
    return (
        f"{scene.gpu} has {format_bytes(scene.free_bytes)} free{less}, where "
        f"{format_bytes(scene.need_bytes)} are needed: {format_bytes(short)} too few; "
        f"{_to_blame(scene, about)}"
    )


def _to_blame(scene: GpuSnapshot, about: Callable[[int], str]) -> str:
    over = [
        f"{name} holds {format_bytes(held)} where it claims {format_bytes(claim)}"
        for name, (claim, held) in scene.others.items()
        if held is not None and held > claim
    ]
    largest = sorted(scene.strangers.items(), key=lambda one: -one[1])
    seen = [
        f"pid {pid} ({about(pid) or 'of another user or container'}) holds {format_bytes(held)}"
        for pid, held in largest
        if held
    ]
    return "; ".join(over + seen) or "held by nobody who can be seen from here"


class AdmissionRequest(Protocol):
    """A worker that asks to load."""

    name: str
    place: Assignment

    @property
    def pid(self) -> int: ...
    @property
    def need_bytes(self) -> Mapping[str, int]:
        """Bytes that have to be free, by the GPU's UUID."""

    def waits(self, what: str, lacking: Mapping[str, int] = NOTHING) -> None:
        """Set what the worker waits for; "" when it no longer waits.

        `lacking` are the bytes that other workers would have to free, by GPU UUID.
        """


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """NVML's figures. `free` is in bytes by UUID, empty where NVML does not answer."""

    free: Mapping[str, int]
    holdings: Holdings


def read_gpus() -> NvmlReading:
    """Read NVML's figures (blocks)."""
    return NvmlReading(free_bytes(), gpu_memory_by_pid())


class BlockReason(NamedTuple):
    """The reason why a worker is not admitted, and the bytes that others would have to free."""

    reason: str
    lacking: Mapping[str, int] = NOTHING


class GpuAdmission:
    """Admission to all GPUs of an instance. Use only from its event loop."""

    def __init__(
        self,
        ledger: GpuReservations,
        read: Callable[[], NvmlReading] = read_gpus,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.ledger = ledger
        self._read = read
        self._patience_s = patience_s
        self._turns = LoadQueue()
        self._guests: dict[str, AdmissionRequest] = {}  # workers that have a claim, by name
        self._up: set[str] = set()  # workers that have loaded
        self._dead: dict[str, set[int]] = {}  # by name: PIDs that may still hold memory
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def await_admission(self, visitor: AdmissionRequest) -> str:
        """Wait until the worker may load; return "", or the reason why it may not.

        On success it has its claim; otherwise it keeps the claim that it had before. A sleeping
        worker that wakes up enters like a new one.
        """
        if not visitor.place.gpus:
            return ""
        if (leaving := self._leaving.pop(visitor.name, None)) is not None:
            leaving.cancel()
        passed, before = False, dict(self.ledger.claim_of(visitor.name))
        try:
            self._claim(visitor)
            await self._turns.lock_gpus(visitor.name, visitor.place.gpus, visitor.waits)
            reason = await self._until_free(visitor)
            passed = not reason
        finally:
            visitor.waits("")
            if passed:
                self._dead.pop(visitor.name, None)  # the PIDs may become those of others
            else:
                self._turn_back(visitor, before)
        return reason

    def _turn_back(self, visitor: AdmissionRequest, before: Mapping[str, int]) -> None:
        if visitor.pid:  # still asleep, with its smaller claim
            self._turns.release_gpus(visitor.name)
            self.ledger.reserve(visitor.name, before)
        else:
            self.left(visitor.name, ())

    def loaded(self, name: str) -> None:
        """Mark the worker as loaded: the next one may load."""
        self._turns.release_gpus(name)
        self._up.add(name)

    def track_load(self, name: str, *, from_files: bool) -> None:
        """Track the load; while the worker only fetches or converts its files, others may load."""
        if from_files:
            self._turns.step_back(name)
        elif name in self._guests:
            self._turns.step_aside(name, self._guests[name].place.gpus)

    async def fell_asleep(self, visitor: AdmissionRequest) -> None:
        """Reduce the claim of a sleeping worker to the memory that it still holds.

        `await_admission` wakes it.
        """
        name, pid = visitor.name, visitor.pid
        if not visitor.place.gpus or name not in self._guests:
            return
        reading, groups = await asyncio.to_thread(self._read_scene, {name: pid})
        if name not in self._guests or visitor.pid != pid:
            return  # restarted meanwhile: the new process has its own claim
        seen = [reading.holdings[one] for one in groups[name] if one in reading.holdings]
        held = {gpu.uuid: sum(one.get(gpu.uuid, 0) for one in seen) for gpu in visitor.place.gpus}
        if not seen and not any(self.ledger.held_bytes(name).values()):
            held = {gpu.uuid: self._unseen(visitor, gpu, reading) for gpu in visitor.place.gpus}
        self.ledger.reserve(name, self._at_most(visitor, held))

    def _unseen(self, visitor: AdmissionRequest, gpu: Gpu, reading: NvmlReading) -> int:
        """Return the bytes that a worker may hold whose processes cannot be seen (in a container).

        That is the memory that no other worker claims; at least a CUDA context.
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
        """Release the claim of a worker whose processes are reaped, once their memory is free."""
        self._turns.release_gpus(name)
        self._up.discard(name)
        if name not in self._guests or name in self._leaving:
            return
        self._dead.setdefault(name, set()).update(pids)
        if self._dead[name]:
            seeing_off = asyncio.get_running_loop().create_task(self._await_memory_release(name))
            self._leaving[name] = seeing_off
        else:
            self._forget(name)

    # ---- memory

    def _claim(self, visitor: AdmissionRequest) -> BlockReason | None:
        place = visitor.place
        claims = {gpu.uuid: size for gpu, size in zip(place.gpus, place.claims, strict=True)}
        self._guests[visitor.name] = visitor
        try:
            self.ledger.reserve(visitor.name, claims)
        except InsufficientMemory as error:
            return BlockReason(error.message)
        return None

    async def _until_free(self, visitor: AdmissionRequest) -> str:
        """Wait for the memory; return "", or after `patience_s` what is in the way."""
        deadline = time.monotonic() + self._patience_s
        while found := self._claim(visitor) or await self._obstacle(visitor):
            if time.monotonic() > deadline:
                return found.reason
            visitor.waits(f"waits for memory: {found.reason}", found.lacking)
            await asyncio.sleep(_LOOK_EVERY_S)
        return ""

    async def _obstacle(self, visitor: AdmissionRequest) -> BlockReason | None:
        reading, groups = await asyncio.to_thread(self._read_scene, self._pids())
        known = [gpu for gpu in visitor.place.gpus if gpu.uuid in reading.free]
        scenes = [self._scene(visitor, gpu, reading, groups) for gpu in known]
        reason = next(filter(None, map(obstacle, scenes)), "")
        short = {scene.gpu.uuid: short_bytes(scene) for scene in scenes}
        return (
            BlockReason(reason, {at: size for at, size in short.items() if size})
            if reason
            else None
        )

    def _pids(self) -> dict[str, int]:
        return {name: guest.pid for name, guest in self._guests.items() if guest.pid}

    def _read_scene(self, pids: Mapping[str, int]) -> tuple[NvmlReading, dict[str, frozenset[int]]]:
        """Read NVML and each worker's process group. Blocks for milliseconds: run in a thread."""
        reading = self._read()  # first: its processes are found below, or gone
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
        """Return the bytes that a worker holds; 0 before it allocates, None where unknown."""
        is_blind = name not in held or name in self._up
        return held.get(name) or (None if is_blind else 0)

    async def _await_memory_release(self, name: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while await self._may_hold_memory(name):
            if time.monotonic() > deadline:
                log.warning("gpu_memory_not_released", child=name)
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        self._leaving.pop(name, None)
        self._forget(name)

    async def _may_hold_memory(self, name: str) -> bool:
        pids = tuple(self._dead.get(name, ()))
        with contextlib.suppress(RuntimeError):  # no thread can be started: look again
            return await asyncio.to_thread(self._holds_memory, pids)
        return True

    def _holds_memory(self, pids: Collection[int]) -> bool:
        holdings = self._read().holdings
        return any(any(holdings.get(pid, {}).values()) for pid in pids)

    def _forget(self, name: str) -> None:
        self._dead.pop(name, None)
        self._guests.pop(name, None)
        self.ledger.release_claim(name)
