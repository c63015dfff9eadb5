"""Manager of on-demand models: it gathers facts, lets `policy` decide and carries out the actions.

Before a worker is put to sleep or stopped, the gateways are told to hold new requests for its
model, and running requests finish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from servekit.errors import did_you_mean
from servekit.protocol.messages import Accepted, Refused
from servekit.protocol.residency import KeepAlive, ResidencyStatus, SetResidency, tier_text
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.event_log import journal
from servekit.supervisor.gateway_process import Gateway, until_told
from servekit.supervisor.model_swap import memory_accounting, policy
from servekit.supervisor.model_swap.eviction import STAY
from servekit.supervisor.model_swap.model_state import HAS, ModelState
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction
from servekit.supervisor.workers.worker_process import WorkerProcess

log: Any = structlog.get_logger("servekit.supervisor")

_LOOK_EVERY_S = 0.05
#: Gateways report once a second how many requests wait for each model.
_TOLD_S = 2.0
_COMING = ("starting", "loading", "backoff")


class SwapManager:
    """Manager of all models of an instance. Call `look` often, and after every change."""

    def __init__(self, deployments: DeploymentManager, gateways: Sequence[Gateway]) -> None:
        self._deployments = deployments
        self._gateways = gateways
        self._rows: dict[Deployment, ModelState] = {}
        self._waits: Mapping[str, str] = {}
        self._halted = False
        self._halted_at = 0.0
        self._unasked: list[WorkerProcess] = []  # workers that were loading when the shutdown began
        for gateway in gateways:
            gateway.on_use = self._on_keep_alive

    def stop_changes(self) -> None:
        """Begin the shutdown: start nothing any more."""
        self._halted, self._halted_at = True, time.monotonic()
        workers = (
            one for deployment in self._deployments.all_deployments() for one in deployment.replicas
        )
        self._unasked = [one for one in workers if one.state in _COMING]
        for row in self._rows.values():
            row.cancel_change()

    def _spare(self) -> None:
        """At shutdown, end loading workers unless queued requests wait for them.

        Gateways accept no new requests by then, and report the waiting ones within `_TOLD_S`.
        """
        open_ = [gateway for gateway in self._gateways if gateway.state != "stopped"]
        if open_ and time.monotonic() - self._halted_at < _TOLD_S:
            return
        awaited = {name for gateway in open_ for name in gateway.awaited_models()}
        for replica in self._unasked:
            if replica.state in _COMING and replica.model.name not in awaited:
                log.info("worker_load_cancelled", child=replica.name)
                replica.end_now()
        self._unasked = [one for one in self._unasked if not one.ending]

    # ---- facts, decisions, actions

    def update(self) -> None:
        """Decide and begin what is due; during a shutdown, end unneeded loading workers."""
        if self._halted:
            self._spare()
            return
        now = time.monotonic()
        served = self._deployments.served
        self._rows = {
            deployment: self._rows.get(deployment) or ModelState(deployment, now)
            for deployment in served
        }
        for row in self._rows.values():
            row.observe(self._used(row), now)
            self._repair_sleep(row)
            self._leave_out(row, now)
        if not any(row.comes_and_goes for row in self._rows.values()):
            return
        decision = policy.decide([*self._facts()], self._free(), now)
        self._waits = decision.waits
        rows = {row.deployment.model.name: row for row in self._rows.values()}
        for step in decision.steps:
            self._execute_action(rows[step.model], step, now)

    def _used(self, row: ModelState) -> Iterator[tuple[int, int, float]]:
        """Yield per gateway the waiting requests, the running ones, and the time of the last one.

        Waiting requests that a gateway reported before the model left may have been answered since,
        so they do not count.
        """
        for gateway in self._gateways:
            if (use := gateway.uses.get(row.deployment.model.name)) is not None:
                wanted, at = use
                waiting = 0 if row.is_away and at < row.since else wanted.waiting
                yield waiting, wanted.running, at - wanted.idle_s

    def waits_for(self, deployment: Deployment) -> dict[str, str]:
        """Return other models that wait for memory, by place (a GPU's UUID, or "cpu")."""
        reserve = self._deployments.plan.config.gpus.reserve
        return {
            at: row.deployment.model.name
            for other, row in self._rows.items()
            if other is not deployment and row.is_away and row.waiting_since is not None
            for at in memory_accounting.claims(other.model, other.planned, reserve)
        }

    def _facts(self) -> Iterator[PolicyInput]:
        reserve = self._deployments.plan.config.gpus.reserve
        for row in self._rows.values():
            claim = memory_accounting.claims(row.deployment.model, row.deployment.planned, reserve)
            asleep = memory_accounting.asleep(row.deployment, claim, row.kept)
            yield row.facts(claim, asleep, memory_accounting.missing_for_loading(row.deployment))
        for deployment in self._deployments.all_deployments():
            leaving = [replica.place.gpus for replica in deployment.replicas]
            for slot in deployment.planned if deployment in self._rows else ():  # else removed
                if slot in leaving:
                    leaving.remove(slot)
            if leaving:
                claim = memory_accounting.claims(deployment.model, tuple(leaving), reserve)
                yield PolicyInput(deployment.model.name, "on_start", "leaving", claim)

    def _free(self) -> dict[str, int]:
        held = [facts.held_memory for facts in self._facts()]
        deployments = self._deployments
        reserve, ledger = deployments.plan.config.gpus.reserve, deployments.pool.gate.ledger
        return memory_accounting.free(deployments.gpus, reserve, held, ledger)

    def _repair_sleep(self, row: ModelState) -> None:
        """Wake or stop a model whose workers are no longer all asleep, as after a crash of one."""
        if (
            not row.sleepers
            or row.task is not None
            or row.tier == "asleep"
            or not row.deployment.wanted
        ):
            return
        living, sleepers = row.deployment.living, row.sleepers
        # by a reload or a restart, which begin with a worker that is awake
        replaced = any(one not in sleepers for one in living)
        if replaced and row.deployment.changing:
            return  # look again when it is done: it may leave some of them asleep
        row.sleepers = ()
        if replaced and all(one.state != "asleep" for one in living):
            return
        if row.waiting_since is not None:
            row.apply_action("wake", self._wake(row))
        else:
            why = next((replica.reason for replica in row.deployment.living if replica.reason), "")
            said = f"a worker did not stay asleep: {why}"
            self._stop(row, said if why else "a worker has come up beside those that sleep")

    def _leave_out(self, row: ModelState, now: float) -> None:
        """Unload a model that the profile is without, once no request waits for it."""
        if row.is_left_out(now) and all(gateway.is_up_to_date for gateway in self._gateways):
            self._stop(row, f"it is not in the profile {row.deployment.left_out!r}")
            self._changed(row)

    def _execute_action(self, row: ModelState, step: SwapAction, now: float) -> None:
        match step.kind:
            case "load":
                log.info("model_loading", model=step.model)
                cause = row.load_reason(now).cause
                journal.record_event("load", f"for {_FOR.get(cause, cause)}", model=step.model)
                row.mark_started(now)
                row.deployment.load(row.load_reason(now))
            case "wake":
                journal.record_event("wake", step.reason, model=step.model)
                row.mark_started(now)
                row.apply_action("wake", self._wake(row))
            case "sleep":
                row.reason = f"asleep since {_clock()}: {step.reason}"
                log.info("model_sleeping", model=step.model, reason=step.reason)
                journal.record_event("sleep", step.reason, model=step.model)
                row.apply_action("sleep", self._sleep(row, must=step.makes_room))
            case "stop":
                self._stop(row, step.reason, returns=step.makes_room)
        self._changed(row)

    def _stop(self, row: ModelState, reason: str, *, returns: bool = False) -> None:
        log.info("model_unloading", model=row.deployment.model.name, reason=reason)
        journal.record_event("unload", reason, model=row.deployment.model.name)
        row.reason, row.sleepers = f"stopped at {_clock()}: {reason}", ()
        row.deployment.unload(returns=returns)

    async def _sleep(self, row: ModelState, *, must: bool) -> None:
        """Put all workers of a model to sleep; with `must`, stop the model if one cannot sleep.

        A model that would be partly asleep is stopped in any case.
        """
        workers = [replica for replica in row.deployment.living if replica.serves]
        wait = partial(until_told, self._gateways)
        refusals = await asyncio.gather(*(one.sleep(wait) for one in workers))
        why = next(filter(None, refusals), "")
        row.sleepers = () if why else tuple(workers)
        if not why:  # otherwise it still holds its full claim
            row.kept = memory_accounting.kept(row.deployment, self._deployments.pool.gate.ledger)
        if why:
            log.warning("model_sleep_failed", model=row.deployment.model.name, reason=why)
            row.sleepless(time.monotonic(), why)
        if why and (must or not all(refusals)):
            self._stop(row, f"it could not be put to sleep: {why}", returns=must)

    async def _wake(self, row: ModelState) -> None:
        """Wake all workers of a model; stop it if one cannot wake, so that it is loaded again."""
        workers = [replica for replica in row.deployment.living if replica.state == "asleep"]
        row.sleepers = ()
        refusals = await asyncio.gather(*(one.wake() for one in workers))
        if why := next(filter(None, refusals), ""):
            log.warning("model_wake_failed", model=row.deployment.model.name, reason=why)
            self._stop(row, f"it could not be woken: {why}")

    def _changed(self, row: ModelState) -> None:
        row.deployment.changed()

    # ---- requests of gateways and operators

    def _on_keep_alive(self, message: KeepAlive | None) -> None:
        """Take a gateway's report of use, or a client's keep_alive for an on-demand model."""
        row = None if message is None else self._row(message.model)
        if message is not None and row is not None and row.deployment.model.load == "on_demand":
            row.keep_loaded(message.stay_s, time.monotonic(), loads=message.loads)
        self.update()

    async def reside(self, request: SetResidency) -> Accepted | Refused:
        """Carry out an operator's request; the reply comes when it is done or impossible."""
        row = self._row(request.model)
        if row is None:
            names = [deployment.model.name for deployment in self._deployments.served]
            there = f"{', '.join(names)}{did_you_mean(request.model, names)}"
            return Refused(f"no model is called {request.model!r}; there are: {there}", True)
        if self._halted:
            return Refused("servekit is shutting down")
        already = "already " if row.tier == HAS[request.want] else ""
        if refusal := row.accept_request(request.want, time.monotonic()):
            return Refused(refusal)
        self.update()
        self._changed(row)
        name = row.deployment.model.name
        while row.requested and row.goal == HAS[request.want]:
            if why := self._find_obstacle(row):
                row.drop_request()
                return Refused(f"{name} cannot be {_DONE[request.want]}: {why}")
            if not request.wait:
                return Accepted(f"{name} is {tier_text(row.tier)}")
            await asyncio.sleep(_LOOK_EVERY_S)
            row.forget_met_request()
        if row.goal != HAS[request.want]:
            said = f"something else was asked for meanwhile, and it is {tier_text(row.tier)}"
            return Refused(f"{name} cannot be {_DONE[request.want]}: {said}")
        return Accepted(f"{name} is {already}{_DONE[request.want]}")

    def _find_obstacle(self, row: ModelState) -> str:
        """Return why an operator's request cannot succeed; "" while it still may."""
        if self._halted or row.deployment not in self._rows:
            return "servekit is shutting down" if self._halted else "it is no longer in the file"
        if row.requested in ("load", "wake") and row.tier == "failed":
            reasons = (replica.reason for replica in row.deployment.living if replica.reason)
            return next(reasons, "its workers have failed")
        waits = self._waits.get(row.deployment.model.name, "")
        if row.requested == "sleep":
            return row.restless or row.sleepless_for_good() or waits
        return waits if row.requested in ("load", "wake") and waits.endswith(STAY) else ""

    def _row(self, model: str) -> ModelState | None:
        for deployment, row in self._rows.items():
            if model in deployment.model.names:
                return row
        return None

    # ---- status

    def residence(
        self, deployment: Deployment, for_operators: bool = False
    ) -> ResidencyStatus | None:
        """Return the residency of a model; None for a model that is always loaded."""
        row = self._rows.get(deployment)
        if row is None or not row.comes_and_goes:
            return None
        waits = self._waits.get(deployment.model.name, "")
        shown = row.residence(waits, halted=self._halted, for_operators=for_operators)
        if not for_operators:
            return shown
        claim = memory_accounting.claims(
            deployment.model, deployment.planned, self._deployments.plan.config.gpus.reserve
        )
        return row.detailed(
            shown,
            row.facts(claim, memory_accounting.asleep(deployment, claim, row.kept)),
            time.monotonic(),
        )


_FOR = {"operator": "an operator", "request": "a request"}
_DONE = {"load": "loaded", "unload": "stopped", "sleep": "asleep", "wake": "awake"}


def _clock() -> str:
    return time.strftime("%H:%M:%S")
