"""The deployment of one model: its replicas, and their rolling update to another version.

If there is room (on GPUs, or on the CPU by `memory`), a new replica is ready before an old one is
drained, which then finishes all its requests, within their own deadlines. Otherwise an old replica
makes room first, and its requests are cut off after `drain_timeout_s`; the admission gate checks
that its memory is really free. If no replica of a new version comes up, the update is rolled back:
the old version serves on, or is started again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog

from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import AdapterSpec, AdapterStatus
from servekit.protocol.messages import Drain, ModelInfo, ReplicaHistory, Stop
from servekit.protocol.types import ScaleStatus
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.deployments.config_diff import Slots, same_worker
from servekit.supervisor.deployments.worker_pool import WorkerPool
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import ProcessEvent
from servekit.supervisor.lifecycle.restart_policy import make_circuit_breaker
from servekit.supervisor.scheduling.memory_requests import Assignment, least
from servekit.supervisor.workers.fork_server import ForkServerPool
from servekit.supervisor.workers.gpu_memory import Entry
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpu.gpus import Slot

log: Any = structlog.get_logger("servekit.supervisor")

#: From Stop to SIGTERM for a worker without requests.
STOP_GRACE_S = 5.0


class Deployment:
    """The replicas of one model. Empty until `roll_out`, which starts the first version too."""

    def __init__(self, model: ModelConfig, pool: WorkerPool) -> None:
        self.model = model
        self.replicas: list[WorkerProcess] = []
        self.wanted = False  # whether it is to have replicas; else it is stopped
        self.has_served = False  # in this version or an earlier one
        self._returns = False  # it is unloaded for another model, and will be wanted again
        self.occasion = StartReason.from_now(
            "operator"
        )  # the start reason of replicas that are added
        self.circuit = make_circuit_breaker(model)
        self.failed: tuple[ReplicaHistory, ...] = ()  # of a version that did not come up
        self._pool = pool
        self.fork_servers = ForkServerPool(pool.host, pool.run)
        self.planned: Slots = ()  # the planned GPUs of its replicas
        self.scale: ScaleStatus | None = None  # of a model that scales
        self._known: ModelInfo | None = None
        self._threads: int | None = None
        self._outdated: frozenset[WorkerProcess] = frozenset()  # to be replaced by their like
        self._fresh: list[WorkerProcess] = []  # those that the change under way has started
        self._heard = asyncio.Event()
        self._change: asyncio.Task[None] | None = None
        self.adapters = Adapters(model.name, list_adapters(model), self)

    def roll_out(
        self, model: ModelConfig, slots: Slots, threads: int | None, claimed: Collection[str] = ()
    ) -> None:
        """Change to these replicas of this version, and cancel a change under way.

        `claimed` are all names that the configuration uses.
        """
        self._give_up_change()
        stays = model.load == "on_start"
        self.wanted |= stays and (not self.planned or self.model.load != "on_start")
        self.planned = slots
        if same_worker(self.model, model):
            self.adapters.follow_file(list_adapters(model), claimed)
        else:
            self.circuit = make_circuit_breaker(model)
            self.adapters = self.adapters.make_successor(list_adapters(model), claimed)
            self._known = None
        self.model, self._threads, self.failed = model, threads, ()
        for replica in self._living():
            if same_worker(replica.model, model):
                replica.model = model
                replica.retry()
        self.circuit.reset()
        self.tend_fork_servers()
        if not self.wanted or self.left_out:
            return
        if stays or not self._changes_asleep(slots):
            self._begin(slots)
        else:  # others may have its memory: the next request loads it
            self.unload()

    def _changes_asleep(self, slots: Slots) -> bool:
        """Return whether it is asleep, and has to change for these GPUs and the present version."""
        kept, old = self._sorted()
        missing, surplus = match_slots(slots, kept)
        asleep = all(replica.state == "asleep" for replica in (*kept, *old))
        return asleep and bool(kept or old) and bool(old or missing or surplus)

    def _begin(self, slots: Slots) -> None:
        task = asyncio.get_running_loop().create_task(self._converge(slots), name=self.model.name)
        task.add_done_callback(self._end_change)
        self._change = task

    def _end_change(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("model_change_failed", model=task.get_name(), exc_info=task.exception())
        self._pool.host.publish_change()  # gateways wait for a new replica while `changing`

    def load(self, occasion: StartReason) -> None:
        """Load the model on its planned GPUs, and retry replicas that have failed."""
        self.occasion = occasion
        if self.wanted:
            self.retry()
            return
        self.wanted = True
        self._begin(self.planned)

    def restart(self, replicas: Collection[WorkerProcess]) -> None:
        """Begin to replace these replicas, as a change of version does."""
        self.occasion = StartReason.from_now("operator")
        self.circuit.reset()
        self.failed, self._outdated = (), frozenset(replicas)
        self._begin(self.slots())

    async def until_settled(self) -> str:
        """Wait for a change that is under way; return why it has failed, or ""."""
        while self._change is not None and self.changing:  # a reload may begin another
            await asyncio.wait((self._change,))
        await self._until(lambda: have_settled(self._living()))
        if not self._living():
            return "it was unloaded meanwhile"
        failed = any(replica.state == "failed" for replica in self._living())
        reasons = (replica.reason for replica in self._living() if replica.reason)
        return next(reasons, "its workers have failed") if failed or self.failed else ""

    def unload(self, *, returns: bool = False) -> None:
        """End all replicas, each once it has finished its requests.

        `returns`: it only makes room for another model, and keeps its fork servers for a quick
        return.
        """
        self._give_up_change()
        self.wanted, self._returns = False, returns
        if self.scale is not None:
            self.planned = self.planned[: least(self.model)]  # returns with its minimum
        for replica in self._living():
            log.info("worker_unloading", child=replica.name)
            self._finish(replica)
        self.tend_fork_servers()

    # ---- autoscaling: one replica more, one fewer

    @property
    def changing(self) -> bool:
        """Return whether a change of version or configuration is under way."""
        return self._change is not None and not self._change.done()

    def grow(self, slot: Slot, occasion: StartReason) -> WorkerProcess:
        """Add a replica on these GPUs."""
        self.occasion = occasion
        self.planned = (*(one.place.gpus for one in self._living()), slot)
        return self._add(self.model, slot)

    def shrink(self, replica: WorkerProcess) -> None:
        """Drain a replica, which finishes its requests and ends."""
        self.planned = tuple(one.place.gpus for one in self._living() if one is not replica)
        self._finish(replica)

    def _finish(self, replica: WorkerProcess) -> None:
        # No request takes longer than its model's timeout, so none is cut off.
        grace_s = replica.model.timeout_s + self._pool.drain_timeout_s
        log.info("worker_draining", child=replica.name, at_most_s=grace_s)
        replica.end_child(Drain(), grace_s)

    def drain_all(self) -> None:
        """Drain all replicas, and end the fork servers."""
        self.stop_changes()
        self.fork_servers.close()
        for replica in self._living():
            self._drain(replica)

    def stop_changes(self) -> None:
        """Cancel the changes that are under way."""
        self._give_up_change()
        self.adapters.stop_changes()

    def _give_up_change(self) -> None:
        if self._change is not None:
            self._change.cancel()

    @property
    def lacks_adapters(self) -> bool:
        """Return whether adapters of the file are missing, which a reload loads again."""
        return self.adapters.needs_load(list_adapters(self.model))

    def retry(self, claimed: Collection[str] = ()) -> None:
        """Retry failed replicas, and load missing adapters."""
        self.adapters.follow_file(list_adapters(self.model), claimed)
        self.try_again()

    def try_again(self) -> None:
        """Retry replicas that have failed or are in back-off, with breaker and back-off reset."""
        self.circuit.reset()
        for replica in self._living():
            replica.retry()

    # ---- events

    def _on_event(self, event: ProcessEvent) -> None:
        """Handle an event of a replica: a change that waits looks at it again."""
        self.has_served |= any(replica.state == "ready" for replica in self.replicas)
        self._heard.set()
        self.tend_fork_servers()

    def tend_fork_servers(self) -> None:
        away = not (self.wanted or self._returns)
        self.fork_servers.converge(self.model, self.replicas, away=away)

    def remove_replica(self, replica: WorkerProcess) -> None:
        """Forget a replica that has ended."""
        self.replicas.remove(replica)
        self._pool.remove_worker(replica)
        self._heard.set()
        self.tend_fork_servers()

    def slots(self) -> Slots:
        """Return the GPUs of each replica; the planned ones while it is unloaded."""
        if not self.wanted:
            return self.planned
        return tuple(replica.place.gpus for replica in self._living())

    @property
    def left_out(self) -> str:
        """Return the profile in force if this model is not in it, else ""."""
        return self._pool.plan.left_out_by(self.model.name)

    @property
    def info(self) -> ModelInfo | None:
        """The model's properties, by the newest replica that came up; kept when that is gone."""
        known = [replica.info for replica in self.replicas if replica.info is not None]
        self._known = known[-1] if known else self._known
        return self._known

    # ---- adapters

    def adapter_statuses(self) -> tuple[AdapterStatus, ...]:
        """Return the status of the adapters, on workers of all versions."""
        return self.adapters.statuses([one.held_adapters for one in self.replicas if one.serves])

    def workers(self, adapters: Adapters) -> Sequence[WorkerProcess]:
        """Return the workers of the version that has these adapters."""
        return [replica for replica in self.replicas if replica.adapters is adapters]

    @property
    def drain_timeout_s(self) -> float:
        return self._pool.drain_timeout_s

    @property
    def is_away(self) -> bool:
        """Return whether it is on demand, unloaded or asleep: adapters are then loaded with it."""
        asleep = any(replica.state == "asleep" for replica in self._living())
        return self.model.load != "on_start" or not self.wanted or asleep

    @property
    def is_asleep_on_demand(self) -> bool:
        """Return whether it is all asleep, and not loaded at the start: its memory is others'."""
        living = self._living()
        asleep = bool(living) and all(replica.state == "asleep" for replica in living)
        return asleep and self.model.load != "on_start"

    def changed(self) -> None:
        for replica in self.replicas:
            replica.remember_adapters()
        self._pool.host.publish_change()

    def is_unused(self, adapter: str) -> bool:
        return self._pool.host.is_unused(adapter)

    # ---- rolling update

    async def _converge(self, slots: Slots) -> None:
        await self._change_replicas(slots)
        self._outdated, self._fresh = frozenset(), []  # a change that is given up leaves them

    async def _change_replicas(self, slots: Slots) -> None:
        kept, old = self._sorted()
        missing, surplus = match_slots(slots, kept)
        # a replica that has to move serves until its GPUs are needed
        old = keep_serving(old) + surplus
        # what a change that was given up has started is waited for, too
        self._fresh = [one for one in self._fresh if one in kept and one not in surplus]
        fresh, crowded = self._fresh, []
        for slot in missing:
            if self._pool.has_room(self.model, slot):
                fresh.append(self._add(self.model, slot))
            else:
                crowded.append(slot)
        if fresh and old and not await self._replace(fresh, old):
            return
        for slot in crowded:
            if not await self._make_room(slot, old, proven=bool(fresh)):
                return
            fresh.append(self.replicas[-1])
        if old and not await self._has_ready([one for one in kept if one not in surplus] + fresh):
            self._take_back(fresh, old)
            return
        for replica in old:
            self._finish(replica)

    def _sorted(self) -> tuple[list[WorkerProcess], list[WorkerProcess]]:
        living = self._living()
        current = [one for one in living if one not in self._outdated]
        kept = [replica for replica in current if same_worker(replica.model, self.model)]
        return kept, [replica for replica in living if replica not in kept]

    async def _replace(self, fresh: list[WorkerProcess], old: list[WorkerProcess]) -> bool:
        """Drain one of `old` for each replica of `fresh` that becomes ready.

        Returns False if none comes up.
        """
        for done in range(count_ready(fresh) + 1, len(fresh) + 1):
            await self._until(functools.partial(have_enough, fresh, done))
            if count_ready(fresh) < done:
                break
            if old:
                self._finish(old.pop(0))
        if count_ready(fresh) or not old:
            return True
        self._take_back(fresh, old)
        return False

    async def _has_ready(self, staying: list[WorkerProcess]) -> bool:
        """Wait until one of the replicas that stay is ready; return False if none comes up."""
        await self._until(functools.partial(have_enough, staying, 1))
        return bool(count_ready(staying)) or not staying

    async def _make_room(self, slot: Slot, old: list[WorkerProcess], *, proven: bool) -> bool:
        """Start a replica on GPUs that are still in use; return False if it was rolled back."""
        here = [one for one in old if not set(slot).isdisjoint(one.place.gpus)]
        victims = here or self._choose_victims(slot, old)
        for victim in victims:
            old.remove(victim)
            self._drain(victim)
        self._limit_drain(slot)
        if victims:
            names, at_most_s = ", ".join(one.name for one in victims), self._pool.drain_timeout_s
            said = (
                f"no memory for both versions of {self.model.name}: what {names} runs is cut off"
                f" after {at_most_s:g} s (server.drain_timeout_s)"
            )
            log.warning(
                "rollout_cuts_requests", model=self.model.name, workers=names, at_most_s=at_most_s
            )
            journal.record_event("reload", said, model=self.model.name)
        await self._pool.wait_for_room(self.model, slot)
        replica = self._add(self.model, slot)
        if not victims or proven:
            return True
        await self._until(lambda: have_settled([replica]))
        if replica.state == "ready":
            return True
        backs = [victim.place.gpus for victim in victims] if here or not slot else [slot]
        self._take_back([replica], old, backs)
        self.model, self.adapters = victims[0].model, victims[0].adapters
        self.circuit = make_circuit_breaker(self.model)
        for back in backs:
            await self._pool.wait_for_room(self.model, back)
            self._add(self.model, back)
        return False

    def _choose_victims(self, slot: Slot, old: Sequence[WorkerProcess]) -> list[WorkerProcess]:
        """Return as many of `old` as make room on these GPUs, or this machine's CPU; at least one.

        None of them is on these GPUs.
        """
        most = len(old) if not slot else 1
        counts = (
            n for n in range(1, most) if self._pool.has_room(self.model, slot, without=old[:n])
        )
        return list(old[: next(counts, most)])

    def _take_back(
        self,
        fresh: Sequence[WorkerProcess],
        old: Sequence[WorkerProcess],
        backs: Sequence[Slot] = (),
    ) -> None:
        """Roll back to the old version, which serves on, and has `backs` as planned GPUs again."""
        why = next((replica.reason for replica in fresh if replica.reason), "it did not start")
        log.error("model_reload_failed", model=self.model.name, reason=why)
        self.failed = tuple(replica.make_history() for replica in fresh)
        for replica in fresh:
            replica.end_child(Stop(), STOP_GRACE_S)
        self.planned = (*(replica.place.gpus for replica in self._living()), *backs)
        at = time.strftime("%H:%M:%S")
        for replica in old:
            replica.explain_state(f"the version loaded at {at} failed, this one serves on: {why}")
        if old:
            self.model, self.adapters = old[0].model, old[0].adapters
            self.circuit = old[0].circuit or self.circuit

    # ---- single replicas

    @property
    def living(self) -> list[WorkerProcess]:
        """The replicas that are not ending."""
        return self._living()

    def _living(self) -> list[WorkerProcess]:
        return [replica for replica in self.replicas if not replica.ending]

    def _add(self, model: ModelConfig, slot: Slot) -> WorkerProcess:
        # names are used again: each has a log and metric series of its own
        names = (f"{model.name}/{index}" for index in itertools.count())
        index = next(at for at, name in enumerate(names) if not self._pool.is_taken(name))
        claims = self._pool.claims(model, slot)
        host, gpus = self._pool.host, self._pool.gpus
        elsewhere = host.launcher.gpus_for(model) if host.launcher is not None else 0
        threads = None if slot or elsewhere else self._threads
        place = Assignment(model.name, index, slot, threads, claims, elsewhere)
        fork = functools.partial(self.fork_servers.fork, model, place)
        entry = Entry(self._pool.gate, self._pool.needed_bytes(model, slot))
        replica = WorkerProcess(model, place, gpus, host, self.circuit, self.adapters, fork, entry)
        replica.starting.occasion = self.occasion
        replica.listeners.append(self._on_event)
        self.replicas.append(replica)
        self._pool.start_worker(replica)
        return replica

    def _drain(self, replica: WorkerProcess) -> None:
        log.info("worker_draining", child=replica.name, at_most_s=self._pool.drain_timeout_s)
        replica.end_child(Drain(), self._pool.drain_timeout_s)

    def _limit_drain(self, slot: Slot) -> None:
        """Limit the time of replicas that already drain on these GPUs to `drain_timeout_s`.

        Without GPUs, that of all.
        """
        for replica in self.replicas:
            if replica.ending and (not slot or not set(slot).isdisjoint(replica.place.gpus)):
                self._drain(replica)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Wait until it is true of the replicas, which each of their events may change."""
        while not true():
            self._heard.clear()
            await self._heard.wait()


def list_adapters(model: ModelConfig) -> tuple[AdapterSpec, ...]:
    """Return the adapters that the configuration names."""
    return tuple(
        AdapterSpec(one.name, one.path, one.revision, one.any_base) for one in model.adapters
    )


def match_slots(
    slots: Slots, kept: Sequence[WorkerProcess]
) -> tuple[list[Slot], list[WorkerProcess]]:
    """Return the slots without a replica of `kept`, and the replicas of `kept` without a slot."""
    missing, surplus = list(slots), []
    for replica in sorted(kept, key=lambda one: one.state != "ready"):
        if replica.place.gpus in missing:
            missing.remove(replica.place.gpus)
        else:
            surplus.append(replica)
    return missing, surplus


def keep_serving(old: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Return the ready replicas of another version; end the others, which are of no more use."""
    for replica in old:
        if replica.state != "ready":
            replica.end_child(Stop(), STOP_GRACE_S)
    return [replica for replica in old if replica.state == "ready"]


def count_ready(replicas: Sequence[WorkerProcess]) -> int:
    """Return how many have come up; a model that nobody uses may be asleep by now."""
    return sum(replica.state in ("ready", "asleep") for replica in replicas)


def have_enough(replicas: Sequence[WorkerProcess], count: int) -> bool:
    return count_ready(replicas) >= count or have_settled(replicas)


def have_settled(replicas: Sequence[WorkerProcess]) -> bool:
    """Return whether each replica has come up, failed or stopped."""
    return all(replica.state in ("ready", "asleep", "failed", "stopped") for replica in replicas)
