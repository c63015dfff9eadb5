"""The deployments of an instance, and their reload from a changed configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from servekit.config.schema import names_of
from servekit.errors import ConfigError, ServekitError, did_you_mean
from servekit.protocol.messages import Accepted, Refused
from servekit.supervisor.deployments import config_diff as reload
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.plan import Plan, Source
from servekit.supervisor.deployments.worker_pool import WorkerPool
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import SupervisorContext
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpu.gpus import Gpu

log: Any = structlog.get_logger("servekit.supervisor")

_LOADED_BY = {"on_demand": "the next request loads it", "manual": "`servekit load` loads it"}


class DeploymentManager:
    """The deployments of an instance; empty until `apply_plan`. `run` runs a replica's task."""

    def __init__(
        self, plan: Plan, host: SupervisorContext, run: Callable[[WorkerProcess | ForkServer], None]
    ) -> None:
        self.pool = WorkerPool(plan, host, run)
        self.host = host
        self.served: list[Deployment] = []
        self._leaving: list[Deployment] = []  # of models that were removed from the configuration
        self._reloading = asyncio.Lock()
        self.halted = False
        self._has_served = False

    # ---- state

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.pool.plan

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.plan.gpus

    def all_deployments(self) -> list[Deployment]:
        """Return the deployments that are served, and those that drain."""
        return [*self.served, *self._leaving]

    def replicas(self) -> list[WorkerProcess]:
        return [replica for deployment in self.all_deployments() for replica in deployment.replicas]

    def standbys(self) -> list[ForkServer]:
        return [
            standby
            for deployment in self.all_deployments()
            for standby in deployment.fork_servers.standbys
        ]

    def in_vain(self) -> str:
        """Return why the start has failed, or "": no model has served, and none ever will.

        Models that are loaded on demand do not count: their failure ends no instance.
        """
        replicas = self.replicas()
        self._has_served |= any(replica.state == "ready" for replica in replicas)
        served = [one for one in self.served if not one.left_out]
        later = any(not one.wanted or one.model.load != "on_start" for one in served)
        may_come = self._has_served or later
        if may_come or not replicas or not all(replica.gave_up for replica in replicas):
            return ""
        reasons = dict.fromkeys(f"{one.model.name}: {one.reason}" for one in replicas)
        return "no model can be served. " + " ".join(reasons)

    # ---- changes

    async def reload_config(self, profile: str | None = None) -> Accepted | Refused:
        """Read the configuration again and apply it; refuse it unchanged if anything is wrong.

        With `profile` also switch to that profile ("": to all models). Reloads run one after the
        other, so the configuration that was read last is in force.
        """
        async with self._reloading:
            try:
                changes = await self._reload(profile)
            except ServekitError as error:
                log.error("reload_refused", reason=error.message)
                journal.record_event("reload", f"refused: {error.message}")
                return Refused(error.message, isinstance(error, ConfigError))
            except Exception as error:  # a bug of ours must not end what is served
                log.exception("reload_failed")
                journal.record_event("reload", f"failed: {error!r}")
                return Refused(f"the reload failed: {error!r}; the log has more")
        log.info("reload_completed", changes=changes)
        journal.record_event("reload", changes)
        return Accepted(changes)

    async def restart_model(self, name: str, *, wait: bool) -> Accepted | Refused:
        """Replace the workers of a model, or one worker, as a reload does."""
        found = self._find(name)
        if found is None:
            known = [one.model.name for one in self.served]
            known += [replica.name for one in self.served for replica in one.living]
            there = f"{', '.join(known)}{did_you_mean(name, known)}"
            return Refused(f"no model or worker is called {name!r}; there are: {there}", True)
        deployment, replicas = found
        if self.halted:
            return Refused("servekit is shutting down")
        if not deployment.wanted or not replicas:
            return Refused(f"{name} is not loaded; `servekit load {name}` loads it")
        if deployment.changing:
            return Refused(
                f"{deployment.model.name} is changing already; try again when it is done"
            )
        journal.record_event("reload", f"restart of {name}", model=deployment.model.name)
        if deployment.is_asleep_on_demand:
            deployment.unload()
            return Accepted(
                f"{name} was asleep and is stopped; {_LOADED_BY[deployment.model.load]}"
            )
        deployment.restart(replicas)
        if wait and (why := await deployment.until_settled()):
            return Refused(f"{name} could not be restarted: {why}")
        return Accepted(f"{name} is {'restarted' if wait else 'restarting'}")

    def _find(self, name: str) -> tuple[Deployment, list[WorkerProcess]] | None:
        """Return the deployment of a model or worker, and the workers that are meant."""
        for one in self.served:
            if name in one.model.names:
                return one, one.living
            if worker := [replica for replica in one.living if replica.name == name]:
                return one, worker
        return None

    async def _reload(self, profile: str | None) -> str:
        self._refuse_at_the_end()
        wanted = self.plan.source.profile if profile is None else profile
        source = replace(self.plan.source, profile=wanted, reloads=profile is None)
        plan = await self._read(source)
        self._refuse_at_the_end()
        changes = self.apply_plan(plan)
        if profile is None:
            return changes
        away = [one.model.name for one in self.served if one.left_out]
        unloaded = f"; not in it: {', '.join(away)}" if away else ""
        return f"{describe_profile(profile)} is in force{unloaded}"

    def _refuse_at_the_end(self) -> None:
        if self.halted:
            raise ServekitError("servekit is shutting down; there is nothing to reload")

    async def _read(self, source: Source) -> Plan:
        """Return the plan of the configuration as it is now. Raises ConfigError."""
        held = {
            deployment.model.name: [slot for slot in deployment.planned if slot]
            for deployment in self.served
        }
        counts = {deployment.model.name: len(deployment.planned) for deployment in self.served}
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

    def apply_plan(self, plan: Plan) -> str:
        """Start the changes to this plan; return them in words."""
        for name, choice in plan.choices.items():
            log.info("engine_chosen", model=name, engine=choice.engine, why=choice.why)
        access = plan.access != self.plan.access
        sections = reload.changed_sections(self.plan.config, plan.config, access=access)
        occasion = (
            StartReason.from_supervisor_start()
            if plan is self.plan
            else StartReason.from_now("reload")
        )
        self.pool.plan = plan
        models, before = (
            plan.config.models,
            {deployment.model.name: deployment for deployment in self.served},
        )
        running = {
            name: (deployment.model, deployment.planned) for name, deployment in before.items()
        }
        changes = reload.diff(running, models, plan.places)
        claimed = names_of(plan.config)
        lacking = [name for name, deployment in before.items() if deployment.lacks_adapters]
        kinds = {change.name: change.kind for change in changes}
        self.served = [before.get(model.name) or Deployment(model, self.pool) for model in models]
        for deployment in before.values():
            if kinds[deployment.model.name] == "removed":
                self._leaving.append(deployment)
                deployment.drain_all()
        for deployment, model in zip(self.served, models, strict=True):
            if kinds[model.name] == "unchanged":
                deployment.retry(claimed)
            else:
                deployment.occasion = occasion
                threads = next((p.threads for p in plan.places if p.model == model.name), None)
                slots = reload.slots(model.name, plan.places) or deployment.planned
                deployment.roll_out(model, slots, threads, claimed)
        self._forget_ended()
        self.host.publish_change()
        return reload.describe_changes(changes, lacking, sections)

    def forget_process(self, life: WorkerProcess | ForkServer) -> None:
        """Forget a worker or fork server that has ended."""
        if isinstance(life, ForkServer):
            for deployment in self.all_deployments():
                if life in deployment.fork_servers.standbys:
                    deployment.fork_servers.forget_fork_server(life)
        else:
            for deployment in self.all_deployments():
                if life in deployment.replicas:
                    deployment.remove_replica(life)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget removed models without a process; one that was not loaded has none."""
        self._leaving = [f for f in self._leaving if f.replicas or f.fork_servers.standbys]

    def reset_breaker(self, model: str) -> None:
        """Reset the breaker of a model whose workers were killed by a request, now quarantined."""
        for deployment in self.served:
            if deployment.model.name == model:
                deployment.circuit.reset()

    def start_missing_fork_servers(self) -> None:
        """Start the fork servers for which there was no memory. Called at each tick."""
        for deployment in self.all_deployments():
            if deployment.fork_servers.lacks_memory:
                deployment.tend_fork_servers()

    def stop_changes(self) -> None:
        """Cancel all changes, and start none any more: the instance is ending."""
        self.halted = True
        for deployment in self.all_deployments():
            deployment.stop_changes()
            deployment.fork_servers.close()


def describe_profile(profile: str) -> str:
    return f"the profile {profile!r}" if profile else "no profile"
