"""All replicas of one model, and how they become those of another version of it.

Where there is room (on the CPU, or on GPUs) a new replica is ready before an old one is drained,
which then finishes what it runs, however long that takes by the requests' own deadlines; else an
old one makes room first, and is cut off after `drain_timeout_s`. Whether its memory is really gone
is seen to by the gate.
A new version of which nothing comes up is taken back: the old one serves on, or again.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog

from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import AdapterSpec, AdapterStatus
from servekit.protocol.messages import Drain, ModelInfo, ReplicaHistory, Stop
from servekit.protocol.types import ScaleStatus
from servekit.supervisor.adapters.rollout import Adapters, Worker
from servekit.supervisor.deployments.config_diff import Slots, same_worker
from servekit.supervisor.deployments.replica_host import ReplicaHost
from servekit.supervisor.deployments.rollout import (
    STOP_GRACE_S,
    enough,
    fit,
    ready,
    serving,
    settled,
)
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.circuit_breaker import circuit_of
from servekit.supervisor.lifecycle.startup_timing import StartReason
from servekit.supervisor.scheduling.memory_requests import least
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.workers.fork_server_pool import ForkServerPool
from servekit.supervisor.workers.gpu_memory import Entry
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpus import Slot

log: Any = structlog.get_logger("servekit.supervisor")


class Deployment:
    """The replicas of one model. Made empty; `become` fills it, also for the first time."""

    def __init__(self, model: ModelConfig, yard: ReplicaHost) -> None:
        self.model = model
        self.replicas: list[WorkerProcess] = []
        self.wanted = False  # it is to have replicas; else it is stopped
        self._returns = False  # it is stopped for another's sake, and will be wanted again
        self.occasion = StartReason.now("operator")  # what those that are added are started for
        self.circuit = circuit_of(model)
        self.failed: tuple[ReplicaHistory, ...] = ()  # of a version that did not come up
        self._yard = yard
        self.nursery = ForkServerPool(yard.host, yard.start)
        self.planned: Slots = ()  # where its replicas are to be, or would be if it were loaded
        self.scale: ScaleStatus | None = None  # of one that scales
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
            self.circuit = circuit_of(model)
            self.adapters = self.adapters.successor(adapters_of(model), claimed)
            self._known = None
        self.model, self._threads, self.failed = model, threads, ()
        for replica in self._living():
            if same_worker(replica.model, model):
                replica.model = model
                replica.retry()
        self.circuit.reset()
        if self.wanted:
            self._begin(slots)

    def _begin(self, slots: Slots) -> None:
        task = asyncio.get_running_loop().create_task(self._converge(slots), name=self.model.name)
        task.add_done_callback(_complain)
        self._change = task

    def load(self, occasion: StartReason) -> None:
        """Have it loaded where it is planned to be, and what has failed started once more."""
        self.occasion = occasion
        if self.wanted:
            self.retry()
            return
        self.wanted = True
        self._begin(self.planned)

    def unload(self, *, returns: bool = False) -> None:
        """Have no replicas: each ends when it has finished what it runs.

        `returns`: it only makes room, and keeps its standbys, from which it comes back soon.
        """
        self._give_up_change()
        self.wanted, self._returns = False, returns
        if self.scale is not None:
            self.planned = self.planned[: least(self.model)]  # it comes back with the least
        for replica in self._living():
            log.info("unloading", child=replica.name)
            self._finish(replica)

    # ---- by load: one more, one fewer

    @property
    def changing(self) -> bool:
        """It is on its way from one version, or one file, to another."""
        return self._change is not None and not self._change.done()

    def grow(self, slot: Slot, occasion: StartReason) -> WorkerProcess:
        """Have one more replica, there."""
        self.occasion = occasion
        self.planned = (*(one.place.gpus for one in self._living()), slot)
        self._next_index = 0  # names come again: each has a log and series of metrics of its own
        return self._add(self.model, slot)

    def shrink(self, replica: WorkerProcess) -> None:
        """Have it finish what it runs, and end."""
        self.planned = tuple(one.place.gpus for one in self._living() if one is not replica)
        self._finish(replica)

    def _finish(self, replica: WorkerProcess) -> None:
        # no request takes longer than its model allows: none is cut off
        grace_s = replica.model.timeout_s + self._yard.drain_timeout_s
        log.info("draining", child=replica.name, at_most_s=grace_s)
        replica.end(Drain(), grace_s)

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
        self.try_again()

    def try_again(self) -> None:
        """What has failed, or waits for its time, is tried as if nothing had been before."""
        self.circuit.reset()
        for replica in self._living():
            replica.retry()

    def stir(self) -> None:
        """Something has changed; called often."""
        self._stirred.set()
        self.nursery.tend(self.model, self.replicas, away=not (self.wanted or self._returns))

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

    @property
    def is_away(self) -> bool:
        """It comes by need, or sleeps: what it lacks now it gets when it comes."""
        asleep = any(replica.state == "asleep" for replica in self._living())
        return self.model.load != "on_start" or not self.wanted or asleep

    def changed(self) -> None:
        for replica in self.replicas:
            replica.seat.remember(replica.child, replica.adapters)
        self._yard.host.changed()

    def is_unused(self, adapter: str) -> bool:
        return self._yard.host.is_unused(adapter)

    # ---- from one version to the next

    async def _converge(self, slots: Slots) -> None:
        kept, old = self._sorted()
        missing, surplus = fit(slots, kept)
        old = serving(old) + surplus  # one that has to move serves until it is needed elsewhere
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
            self._finish(replica)

    def _sorted(self) -> tuple[list[WorkerProcess], list[WorkerProcess]]:
        living = self._living()
        kept = [replica for replica in living if same_worker(replica.model, self.model)]
        return kept, [replica for replica in living if replica not in kept]

    async def _replace(self, fresh: list[WorkerProcess], old: list[WorkerProcess]) -> bool:
        """Drain one of `old` for each of `fresh` that is ready; False if none of them comes up."""
        for done in range(1, len(fresh) + 1):
            await self._until(functools.partial(enough, fresh, done))
            if ready(fresh) < done:
                break
            if old:
                self._finish(old.pop(0))
        if ready(fresh) or not old:
            return True
        self._take_back(fresh, old)
        return False

    async def _make_room(self, slot: Slot, old: list[WorkerProcess], *, proven: bool) -> bool:
        """Start a replica where an old one, or another model's, still is; False if taken back."""
        here = [one for one in old if not set(slot).isdisjoint(one.place.gpus)]
        victims = here or old[:1]
        for victim in victims:
            old.remove(victim)
            self._drain(victim)
        self._hurry(slot)
        if victims:
            names, at_most_s = ", ".join(one.name for one in victims), self._yard.drain_timeout_s
            said = (
                f"no memory for both versions of {self.model.name}: what {names} runs is cut off"
                f" after {at_most_s:g} s (server.drain_timeout_s)"
            )
            log.warning(said)
            journal.tell("reload", said, model=self.model.name)
        await self._until(lambda: self._yard.has_room(self.model, slot))
        replica = self._add(self.model, slot)
        if not victims or proven:
            return True
        await self._until(lambda: settled([replica]))
        if replica.state == "ready":
            return True
        backs = [victim.place.gpus for victim in here] or [slot]
        self._take_back([replica], old, backs)
        self.model, self.adapters = victims[0].model, victims[0].adapters
        self.circuit = circuit_of(self.model)
        for back in backs:
            await self._until(functools.partial(self._yard.has_room, self.model, back))
            self._add(self.model, back).reason = replica.reason
        return False

    def _take_back(
        self,
        fresh: Sequence[WorkerProcess],
        old: Sequence[WorkerProcess],
        backs: Sequence[Slot] = (),
    ) -> None:
        """The old version serves on, and is to come again at `backs`."""
        why = next((replica.reason for replica in fresh if replica.reason), "it did not come up")
        log.error("reload failed, the old version serves on", model=self.model.name, reason=why)
        self.failed = tuple(replica.story() for replica in fresh)
        for replica in fresh:
            replica.end(Stop(), STOP_GRACE_S)
        self.planned = (*(replica.place.gpus for replica in self._living()), *backs)
        at = time.strftime("%H:%M:%S")
        for replica in old:
            replica.set(replica.state, f"serves on: what was loaded at {at} failed: {why}")
        if old:
            self.model, self.adapters = old[0].model, old[0].adapters
            self.circuit = old[0].circuit or self.circuit

    # ---- single replicas

    @property
    def living(self) -> list[WorkerProcess]:
        """Those that are not about to end."""
        return self._living()

    def _living(self) -> list[WorkerProcess]:
        return [replica for replica in self.replicas if not replica.ending]

    def _add(self, model: ModelConfig, slot: Slot) -> WorkerProcess:
        if not self.replicas:
            self._next_index = 0
        while self._yard.is_taken(f"{model.name}/{self._next_index}"):
            self._next_index += 1  # the file has it again, and its workers of before yet drain
        claims = self._yard.claims(model, slot)
        host, gpus = self._yard.host, self._yard.gpus
        elsewhere = host.launcher.gpus_for(model) if host.launcher is not None else 0
        threads = None if slot or elsewhere else self._threads
        place = Assignment(model.name, self._next_index, slot, threads, claims, elsewhere)
        self._next_index += 1
        fork = functools.partial(self.nursery.fork, model, place)
        entry = Entry(self._yard.gate, self._yard.needs(model, slot))
        replica = WorkerProcess(model, place, gpus, host, self.circuit, self.adapters, fork, entry)
        replica.starting.occasion = self.occasion
        self.replicas.append(replica)
        self._yard.start(replica)
        return replica

    def _drain(self, replica: WorkerProcess) -> None:
        log.info("draining", child=replica.name, at_most_s=self._yard.drain_timeout_s)
        replica.end(Drain(), self._yard.drain_timeout_s)

    def _hurry(self, slot: Slot) -> None:
        """Those of earlier versions that yet finish there are waited for no longer than this."""
        for replica in self.replicas:
            if replica.ending and not set(slot).isdisjoint(replica.place.gpus):
                self._drain(replica)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._stirred.clear()
            await self._stirred.wait()


def adapters_of(model: ModelConfig) -> tuple[AdapterSpec, ...]:
    """What the file names."""
    return tuple(
        AdapterSpec(one.name, one.path, one.revision, one.any_base) for one in model.adapters
    )


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a change broke off", model=task.get_name(), exc_info=task.exception())
