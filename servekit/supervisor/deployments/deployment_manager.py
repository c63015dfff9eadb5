"""The deployments of an instance, and their reload from a changed configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from servekit.config.schema import ModelConfig, names_of
from servekit.errors import ConfigError, ServekitError
from servekit.protocol.messages import Accepted, Refused
from servekit.supervisor.deployments import config_diff as reload
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.managed_process import SupervisorContext
from servekit.supervisor.lifecycle.startup_timing import StartReason
from servekit.supervisor.scheduling.gpu_admission import GpuAdmission
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import (
    claim_bytes,
    claims_of,
    room_bytes,
)
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpus import Gpu, Slot

log: Any = structlog.get_logger("servekit.supervisor")


class DeploymentManager:
    """The deployments of an instance; empty until `apply`. `run` runs a replica's task."""

    def __init__(
        self, plan: Plan, host: SupervisorContext, run: Callable[[WorkerProcess | ForkServer], None]
    ) -> None:
        self.plan = plan
        self.host = host
        self.gate = GpuAdmission(GpuReservations(plan.gpus, plan.config.gpus.reserve))
        self._run = run
        self.served: list[Deployment] = []
        self._leaving: list[Deployment] = []  # of models that were removed from the configuration
        self._reloading = asyncio.Lock()
        self.halted = False
        self._has_served = False

    def start(self, life: WorkerProcess | ForkServer) -> None:
        self._run(life)

    # ---- state

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.plan.gpus

    @property
    def drain_timeout_s(self) -> float:
        return self.plan.config.server.drain_timeout_s

    def everyone(self) -> list[Deployment]:
        """Return the deployments that are served, and those that drain."""
        return [*self.served, *self._leaving]

    def replicas(self) -> list[WorkerProcess]:
        return [replica for fleet in self.everyone() for replica in fleet.replicas]

    def standbys(self) -> list[ForkServer]:
        return [standby for fleet in self.everyone() for standby in fleet.nursery.standbys]

    def claims(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]:
        """Return the bytes that a worker of `model` would claim of each GPU of `slot`."""
        return claims_of(model, slot, self.plan.config.gpus.reserve)

    def needs(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]:
        """Return the bytes that must be free on each GPU: the claim by `memory`, or the weights."""
        if model.memory is not None:
            return self.claims(model, slot)
        known = self.plan.estimates.get(model.name)
        return (known.on_each_floor_bytes if known else 0,) * len(slot)

    def has_room(self, model: ModelConfig, slot: Slot) -> bool:
        """Return whether one more worker fits beside the replicas that exist."""
        reserve = self.plan.config.gpus.reserve
        for gpu in slot:
            taken = sum(self._taken(one, gpu) for one in self.replicas())
            if taken + claim_bytes(model, gpu, reserve) > room_bytes(gpu, reserve):
                return False
        return True

    def is_taken(self, name: str) -> bool:
        """Return whether a worker has this name, also one of a removed model."""
        taken = any(replica.name == name for replica in self.replicas())
        return taken or bool(self.gate.ledger.claim_of(name))  # its memory is not free yet

    def _taken(self, replica: WorkerProcess, gpu: Gpu) -> int:
        """Return a worker's claim on a GPU in bytes; for a sleeping worker, what it has kept.

        A failed worker counts as 0: it has no process, and may never have one again.
        """
        if gpu not in replica.place.gpus or replica.state == "failed":
            return 0
        if replica.state == "asleep":
            return self.gate.ledger.claim_of(replica.name).get(gpu.uuid, 0)
        return replica.place.claims[replica.place.gpus.index(gpu)]

    def in_vain(self) -> str:
        """Return why the start has failed, or "": no model has served, and none ever will.

        Models that are loaded on demand do not count: their failure ends no instance.
        """
        replicas = self.replicas()
        self._has_served |= any(replica.state == "ready" for replica in replicas)
        later = any(not one.wanted or one.model.load != "on_start" for one in self.served)
        may_come = self._has_served or later
        if may_come or not replicas or not all(replica.gave_up for replica in replicas):
            return ""
        reasons = dict.fromkeys(f"{one.model.name}: {one.reason}" for one in replicas)
        return "no model can be served. " + " ".join(reasons)

    # ---- changes

    async def reload(self) -> Accepted | Refused:
        """Read the configuration again and apply it; refuse it unchanged if anything is wrong.

        Reloads run one after the other, so the configuration that was read last is in force.
        """
        async with self._reloading:
            try:
                changes = await self._reload()
            except ServekitError as error:
                log.error("reload_refused", reason=error.message)
                journal.tell("reload", f"refused: {error.message}")
                return Refused(error.message, isinstance(error, ConfigError))
            except Exception as error:  # a bug of ours must not end what is served
                log.exception("reload_failed")
                journal.tell("reload", f"broke off: {error!r}")
                return Refused(f"the reload broke off: {error!r}; the log has more")
        log.info("reload_completed", changes=changes)
        journal.tell("reload", changes)
        return Accepted(changes)

    async def _reload(self) -> str:
        self._refuse_at_the_end()
        plan = await self._read()
        self._refuse_at_the_end()
        return self.apply(plan)

    def _refuse_at_the_end(self) -> None:
        if self.halted:
            raise ServekitError("servekit is shutting down; there is nothing to reload")

    async def _read(self) -> Plan:
        """Return the plan of the configuration as it is now. Raises ConfigError."""
        source = self.plan.source
        held = {fleet.model.name: [slot for slot in fleet.slots() if slot] for fleet in self.served}
        counts = {fleet.model.name: len(fleet.slots()) for fleet in self.served}
        await asyncio.to_thread(source.await_rest)
        plan = await asyncio.to_thread(source.plan, self.gpus, held, counts)
        if restart := reload.needs_restart(self.plan.config, plan.config):
            raise ConfigError(f"{source.path}: {restart}")
        await self._check_elsewhere(plan)
        return plan

    async def _check_elsewhere(self, plan: Plan) -> None:
        """Check with the cluster's nodes what new workers need there. Raises ConfigError."""
        before = {model.name: model for model in self.plan.config.models}
        fresh = [
            model
            for model in plan.config.models
            if model.name not in before or not reload.same_worker(before[model.name], model)
        ]
        launcher = self.host.launcher if fresh else None
        if launcher is not None and (refusal := await launcher.refusal(fresh)):
            raise ConfigError(f"{plan.source.path}: {refusal}")

    def apply(self, plan: Plan) -> str:
        """Start the changes to this plan; return them in words."""
        for name, choice in plan.choices.items():
            log.info("engine_chosen", model=name, engine=choice.engine, why=choice.why)
        new_access = plan.access != self.plan.access
        occasion = StartReason.up() if plan is self.plan else StartReason.now("reload")
        self.plan = plan
        models, before = plan.config.models, {fleet.model.name: fleet for fleet in self.served}
        running = {name: (fleet.model, fleet.slots()) for name, fleet in before.items()}
        changes = reload.diff(running, models, plan.places)
        claimed = names_of(plan.config)
        lacking = [name for name, fleet in before.items() if fleet.lacks_adapters]
        kinds = {change.name: change.kind for change in changes}
        self.served = [before.get(model.name) or Deployment(model, self) for model in models]
        for fleet in before.values():
            if kinds[fleet.model.name] == "removed":
                self._leaving.append(fleet)
                fleet.leave()
        for fleet, model in zip(self.served, models, strict=True):
            if kinds[model.name] == "unchanged":
                fleet.retry(claimed)
            else:
                fleet.occasion = occasion
                threads = next(p.threads for p in plan.places if p.model == model.name)
                fleet.become(model, reload.slots(model.name, plan.places), threads, claimed)
        self.host.changed()
        return reload.tell(changes, lacking, access=new_access)

    def ended(self, life: WorkerProcess | ForkServer) -> None:
        """Forget a worker or fork server that has ended."""
        if isinstance(life, ForkServer):
            for fleet in self.everyone():
                if life in fleet.nursery.standbys:
                    fleet.nursery.ended(life)
        else:
            self._ended(life)
        self._leaving = [f for f in self._leaving if f.replicas or f.nursery.standbys]

    def _ended(self, replica: WorkerProcess) -> None:
        for fleet in self.everyone():
            if replica in fleet.replicas:
                fleet.replicas.remove(replica)

    def explained(self, model: str) -> None:
        """Reset the breaker of a model whose workers were killed by a request, now quarantined."""
        for fleet in self.served:
            if fleet.model.name == model:
                fleet.circuit.reset()

    def stir(self) -> None:
        """Wake the changes that wait."""
        for fleet in self.everyone():
            fleet.stir()

    def halt(self) -> None:
        """Cancel all changes, and start none any more: the instance is ending."""
        self.halted = True
        for fleet in self.everyone():
            fleet.halt()
            fleet.nursery.close()
