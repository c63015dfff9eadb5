"""All replicas of one model, and how they become those of another version of it.

Where there is room (on the CPU, or on GPUs) a new replica is ready before an old one is drained;
else an old one makes room first. Whether its memory is really gone is seen to by the gate.
A new version of which nothing comes up is taken back: the old one serves on, or again.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import structlog

from servekit.config.schema import ModelConfig
from servekit.supervisor.adapting import Adapters, Worker
from servekit.supervisor.circuit import Circuit
from servekit.supervisor.gate import Gate
from servekit.supervisor.gpus import Gpu, Slot
from servekit.supervisor.life import Host
from servekit.supervisor.nursery import Nursery
from servekit.supervisor.placement import Assignment
from servekit.supervisor.reload import Slots, same_worker
from servekit.supervisor.replicas import Replica
from servekit.supervisor.standby import Standby
from servekit.supervisor.vram import Entry
from servekit.wire.adapters import AdapterSpec, AdapterStatus
from servekit.wire.messages import Drain, ModelInfo, ReplicaHistory, Stop

log: Any = structlog.get_logger("servekit.supervisor")

#: From Stop to SIGTERM for a worker that serves nobody.
_STOP_GRACE_S = 5.0


class Yard(Protocol):
    """What a fleet needs to know of the others: all fleets together."""

    @property
    def host(self) -> Host: ...
    @property
    def gpus(self) -> tuple[Gpu, ...]: ...
    @property
    def drain_timeout_s(self) -> float: ...
    def start(self, life: Replica | Standby) -> None: ...
    @property
    def gate(self) -> Gate: ...
    def claims(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]: ...
    def needs(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]: ...
    def has_room(self, model: ModelConfig, slot: Slot) -> bool: ...
    def is_taken(self, name: str) -> bool: ...


class Fleet:
    """The replicas of one model. Made empty; `become` fills it, also for the first time."""

    def __init__(self, model: ModelConfig, yard: Yard) -> None:
        self.model = model
        self.replicas: list[Replica] = []
        self.wanted = False  # it is to have replicas; else it is stopped
        self.circuit = Circuit(model.name)
        self.failed: tuple[ReplicaHistory, ...] = ()  # of a version that did not come up
        self._yard = yard
        self.nursery = Nursery(yard.host, yard.start)
        self.planned: Slots = ()  # where its replicas are to be, or would be if it were loaded
        self._known: ModelInfo | None = None
        self._threads: int | None = None
        self._next_index = 0
        self._stirred = asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        self.adapters = Adapters(model.name, adapters_of(model), self)

    def become(
        self, model: ModelConfig, slots: Slots, threads: int | None, claimed: Collection[str] = ()
    ) -> None:
        """Have these replicas of this version; whatever was under way is given up for it.

        `claimed` are the names that the file gives to anything.
        """
        self._give_up_change()
        stays = model.load == "on_start"
        self.wanted |= stays and (not self.planned or self.model.load != "on_start")
        self.planned = slots
        if same_worker(self.model, model):
            self.adapters.follow(adapters_of(model), claimed)
        else:
            self.circuit = Circuit(model.name)
            self.adapters = self.adapters.successor(adapters_of(model), claimed)
            self._known = None
        self.model, self._threads, self.failed = model, threads, ()
        for replica in self._living():
            if same_worker(replica.model, model):
                replica.model = model
        if self.wanted:
            self._begin(slots)

    def _begin(self, slots: Slots) -> None:
        task = asyncio.get_running_loop().create_task(self._converge(slots), name=self.model.name)
        task.add_done_callback(_complain)
        self._change = task

    def load(self) -> None:
        """Have it loaded where it is planned to be, and what has failed started once more."""
        if self.wanted:
            self.retry()
            return
        self.wanted = True
        self._begin(self.planned)

    def unload(self) -> None:
        """Have no replicas: each ends when it has finished what it runs."""
        self._give_up_change()
        self.wanted = False
        for replica in self._living():
            log.info("unloading", child=replica.name)
            # no request takes longer than its model allows: none is cut off
            replica.end(Drain(), self.model.timeout_s + self._yard.drain_timeout_s)

    def leave(self) -> None:
        """Drain all of it."""
        self.halt()
        self.nursery.close()
        for replica in self._living():
            self._drain(replica)

    def halt(self) -> None:
        """Give up the changes that are under way, if there are any."""
        self._give_up_change()
        self.adapters.halt()

    def _give_up_change(self) -> None:
        if self._change is not None:
            self._change.cancel()

    @property
    def lacks_adapters(self) -> bool:
        """The file names some that are not there: a reload loads them again."""
        return self.adapters.lacks(adapters_of(self.model))

    def retry(self, claimed: Collection[str] = ()) -> None:
        """Start what has failed once more, and load it."""
        self.adapters.follow(adapters_of(self.model), claimed)
        if any(replica.state in ("failed", "backoff") for replica in self._living()):
            self.circuit.reset()
        for replica in self._living():
            replica.retry()

    def stir(self) -> None:
        """Something has changed; called often."""
        self._stirred.set()
        self.nursery.tend(self.model, self.replicas)

    def slots(self) -> Slots:
        """Where its replicas are; where they would be while it is stopped."""
        if not self.wanted:
            return self.planned
        return tuple(replica.place.gpus for replica in self._living())

    @property
    def info(self) -> ModelInfo | None:
        """What it can do, by the newest replica that came up; also when that is gone."""
        known = [replica.info for replica in self.replicas if replica.info is not None]
        self._known = known[-1] if known else self._known
        return self._known

    # ---- its adapters

    def adapter_statuses(self) -> tuple[AdapterStatus, ...]:
        """How they stand, on workers of whichever version."""
        return self.adapters.statuses([one.holds for one in self.replicas if one.serves])

    def workers(self, adapters: Adapters) -> Sequence[Worker]:
        return [replica for replica in self.replicas if replica.adapters is adapters]

    @property
    def drain_timeout_s(self) -> float:
        return self._yard.drain_timeout_s

    def changed(self) -> None:
        self._yard.host.changed()

    def is_unused(self, adapter: str) -> bool:
        return self._yard.host.is_unused(adapter)

    # ---- from one version to the next

    async def _converge(self, slots: Slots) -> None:
        kept, old = self._sorted()
        missing, surplus = _fit(slots, kept)
        old = _serving(old) + surplus  # one that has to move serves until it is needed elsewhere
        fresh, crowded = [], []
        for slot in missing:
            if self._yard.has_room(self.model, slot):
                fresh.append(self._add(self.model, slot))
            else:
                crowded.append(slot)
        if fresh and old and not await self._replace(fresh, old):
            return
        for slot in crowded:
            if not await self._make_room(slot, old, proven=bool(fresh)):
                return
            fresh.append(self.replicas[-1])
        for replica in old:
            self._drain(replica)

    def _sorted(self) -> tuple[list[Replica], list[Replica]]:
        living = self._living()
        kept = [replica for replica in living if same_worker(replica.model, self.model)]
        return kept, [replica for replica in living if replica not in kept]

    async def _replace(self, fresh: list[Replica], old: list[Replica]) -> bool:
        """Drain one of `old` for each of `fresh` that is ready; False if none of them comes up."""
        for done in range(1, len(fresh) + 1):
            await self._until(functools.partial(_enough, fresh, done))
            if _ready(fresh) < done:
                break
            if old:
                self._drain(old.pop(0))
        if _ready(fresh) or not old:
            return True
        self._take_back(fresh, old)
        return False

    async def _make_room(self, slot: Slot, old: list[Replica], *, proven: bool) -> bool:
        """Start a replica where an old one, or another model's, still is; False if taken back."""
        here = [one for one in old if not set(slot).isdisjoint(one.place.gpus)]
        victims = here or old[:1]
        for victim in victims:
            old.remove(victim)
            self._drain(victim)
        await self._until(lambda: self._yard.has_room(self.model, slot))
        replica = self._add(self.model, slot)
        if not victims or proven:
            return True
        await self._until(lambda: _settled([replica]))
        if replica.state == "ready":
            return True
        self._take_back([replica], old)
        self.model, self.adapters = victims[0].model, victims[0].adapters
        self.circuit = Circuit(self.model.name)
        for back in [victim.place.gpus for victim in here] or [slot]:
            await self._until(functools.partial(self._yard.has_room, self.model, back))
            self._add(self.model, back).reason = replica.reason
        return False

    def _take_back(self, fresh: Sequence[Replica], old: Sequence[Replica]) -> None:
        why = next((replica.reason for replica in fresh if replica.reason), "it did not come up")
        log.error("reload failed, the old version serves on", model=self.model.name, reason=why)
        self.failed = tuple(replica.story() for replica in fresh)
        for replica in fresh:
            replica.end(Stop(), _STOP_GRACE_S)
        at = time.strftime("%H:%M:%S")
        for replica in old:
            replica.set(replica.state, f"serves on: what was loaded at {at} failed: {why}")
        if old:
            self.model, self.adapters = old[0].model, old[0].adapters
            self.circuit = old[0].circuit or self.circuit

    # ---- single replicas

    @property
    def living(self) -> list[Replica]:
        """Those that are not about to end."""
        return self._living()

    def _living(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.ending]

    def _add(self, model: ModelConfig, slot: Slot) -> Replica:
        threads = None if slot else self._threads
        if not self.replicas:
            self._next_index = 0
        while self._yard.is_taken(f"{model.name}/{self._next_index}"):
            self._next_index += 1  # the file has it again, and its workers of before yet drain
        claims = self._yard.claims(model, slot)
        place = Assignment(model.name, self._next_index, slot, threads, claims)
        self._next_index += 1
        fork = functools.partial(self.nursery.fork, model, place)
        host, gpus = self._yard.host, self._yard.gpus
        entry = Entry(self._yard.gate, self._yard.needs(model, slot))
        replica = Replica(model, place, gpus, host, self.circuit, self.adapters, fork, entry)
        self.replicas.append(replica)
        self._yard.start(replica)
        return replica

    def _drain(self, replica: Replica) -> None:
        log.info("draining", child=replica.name, at_most_s=self._yard.drain_timeout_s)
        replica.end(Drain(), self._yard.drain_timeout_s)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._stirred.clear()
            await self._stirred.wait()


def adapters_of(model: ModelConfig) -> tuple[AdapterSpec, ...]:
    """What the file names."""
    return tuple(
        AdapterSpec(one.name, one.path, one.revision, one.any_base) for one in model.adapters
    )


def _fit(slots: Slots, kept: list[Replica]) -> tuple[list[Slot], list[Replica]]:
    """Which slots none of `kept` is in, and which of `kept` are in none."""
    missing, surplus = list(slots), []
    for replica in sorted(kept, key=lambda one: one.state != "ready"):
        if replica.place.gpus in missing:
            missing.remove(replica.place.gpus)
        else:
            surplus.append(replica)
    return missing, surplus


def _serving(old: Sequence[Replica]) -> list[Replica]:
    """Those of another version that serve; the others are of no use any more, and ended."""
    for replica in old:
        if replica.state != "ready":
            replica.end(Stop(), _STOP_GRACE_S)
    return [replica for replica in old if replica.state == "ready"]


def _ready(replicas: Sequence[Replica]) -> int:
    return sum(replica.state == "ready" for replica in replicas)


def _enough(replicas: Sequence[Replica], count: int) -> bool:
    return _ready(replicas) >= count or _settled(replicas)


def _settled(replicas: Sequence[Replica]) -> bool:
    """Each has come up, or has been given up."""
    return all(replica.state in ("ready", "failed", "stopped") for replica in replicas)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a change broke off", model=task.get_name(), exc_info=task.exception())
