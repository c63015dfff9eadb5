"""Autoscaler for models with `replicas: {min, max}`: it gathers facts, lets `policy` decide and
acts.

A replica that is added starts like any other: through GPU admission, with its adapters, from a fork
server if there is one. A replica that is removed first stops getting requests from gateways, and
finishes those that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from servekit.config.sections.scale import ReplicaRange
from servekit.protocol.types import ScaleStatus
from servekit.supervisor.autoscaling import policy
from servekit.supervisor.autoscaling.capacity import COMING, CapacityProvider, NoCapacity
from servekit.supervisor.autoscaling.policy import Limits, Past, ScalingAction, ScalingInput
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.event_log import journal
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.model_swap.manager import SwapManager
from servekit.supervisor.model_swap.memory_accounting import CPU
from servekit.supervisor.workers.worker_process import WorkerProcess

log: Any = structlog.get_logger("servekit.supervisor")


class Row:
    """Scaling state of one model, beside its deployment."""

    def __init__(self) -> None:
        self.past = Past()
        self.reason = self.waits = ""
        self.at = 0.0  # Unix time of the last change, s
        self.short = 0  # replicas for which there is no room
        self.fresh: list[WorkerProcess] = []  # added replicas that are not ready yet


class Scaler:
    """Autoscaler of an instance. Call `look` often. `rooms` finds room for replicas."""

    def __init__(
        self,
        deployments: DeploymentManager,
        gateways: Sequence[Gateway],
        swap_manager: SwapManager,
        rooms: CapacityProvider,
    ) -> None:
        self._deployments = deployments
        self._gateways = gateways
        self._swap_manager = swap_manager
        self._rooms = rooms
        self._rows: dict[Deployment, Row] = {}

    def scale_deployments(self) -> None:
        """Decide and begin what is due."""
        now = time.monotonic()
        scaled = {deployment: deployment.model.replicas for deployment in self._deployments.served}
        for deployment, size in scaled.items():
            if isinstance(size, ReplicaRange):
                row = self._rows.setdefault(deployment, Row())
                if deployment.wanted and not deployment.changing and not self._deployments.halted:
                    self._update_model(deployment, row, limits(deployment, size), now)
                self._publish_status(deployment, row, size)
            elif self._rows.pop(deployment, None) is not None:
                deployment.scale = None
        self._rows = {
            deployment: row for deployment, row in self._rows.items() if deployment in scaled
        }

    def _update_model(self, deployment: Deployment, row: Row, limits: Limits, now: float) -> None:
        row.fresh = [one for one in row.fresh if one in deployment.living and one.state != "ready"]
        facts = self._facts(deployment, row)
        step, row.past = policy.decide(limits, facts, row.past, now)
        if step is None:
            pressed = policy.explain_pressure(limits, facts, row.past, now)
            row.waits = _waits(limits, facts) if pressed else ""
            self._is_short(deployment, row, 0)
        elif step.change > 0:
            self._scale_up(deployment, row, step, facts)
        else:
            self._scale_down(deployment, row, step)

    # ---- facts

    def _facts(self, deployment: Deployment, row: Row) -> ScalingInput:
        name, living = deployment.model.name, deployment.living
        serving = [replica for replica in living if replica.serves]
        coming = sum(replica.state in COMING for replica in living)
        pongs = [replica.liveness.last for replica in serving]
        traffic = [gateway.traffic for gateway in self._gateways]
        kv_used = sum(pong.kv_used for pong in pongs)
        return ScalingInput(
            serving=len(serving),
            coming=coming,
            failing=len(living) - len(serving) - coming,
            slots=deployment.info.slots if deployment.info is not None else 1,
            queued=sum(one.queued.get(name, 0) for one in traffic),
            waited_s=max((one.oldest_s.get(name, 0.0) for one in traffic), default=0.0),
            held=sum(pong.waiting for pong in pongs),
            running=sum(pong.running for pong in pongs),
            kv_used=kv_used / len(pongs) if pongs else 0.0,
            wanted_elsewhere=next(self._contested(deployment), ("", None))[0],
            unborn=next((_why_not(one) for one in row.fresh if _has_failed(one)), ""),
        )

    def _contested(self, deployment: Deployment) -> Iterator[tuple[str, WorkerProcess]]:
        """Yield replicas of an on-demand model whose memory another model needs, and its name.

        None is given where one is ending already, which may be enough.
        """
        if deployment.model.load != "on_demand":
            return
        wanted = self._swap_manager.waits_for(deployment)
        for replica in deployment.replicas if wanted else ():
            for at in _places(replica) if replica.ending else ():
                wanted.pop(at, None)
        for replica in deployment.living if wanted else ():
            for at in _places(replica):
                if at in wanted:
                    yield wanted[at], replica

    # ---- actions

    def _scale_up(
        self, deployment: Deployment, row: Row, step: ScalingAction, facts: ScalingInput
    ) -> None:
        """Add replicas, up to the number that there is room for."""
        count, occasion, refusal = 0, StartReason.from_now("scale"), ""
        if self._swap_manager.waits_for(deployment):
            refusal = "another model waits for memory"
        while count < step.change and not refusal:
            slot = self._rooms.one_more(deployment)
            if isinstance(slot, NoCapacity):
                refusal = slot.reason
            else:
                row.fresh.append(deployment.grow(slot, occasion))
                count += 1
        row.waits = refusal
        self._is_short(deployment, row, step.change - count)
        if count:
            figures = {"queued": facts.queued, "waited_s": facts.waited_s, "running": facts.running}
            self._note(deployment, row, "up", step.reason, figures)

    def _scale_down(self, deployment: Deployment, row: Row, step: ScalingAction) -> None:
        elsewhere = [replica for _, replica in self._contested(deployment)]
        replica = least_to_lose(
            elsewhere or [r for r in row.fresh if _has_failed(r)] or deployment.living
        )
        running = replica.liveness.last.running
        deployment.shrink(replica)
        self._note(
            deployment, row, "down", step.reason, {"drained": replica.name, "running": running}
        )

    def _note(
        self, deployment: Deployment, row: Row, way: str, reason: str, figures: Mapping[str, Any]
    ) -> None:
        name, count = deployment.model.name, len(deployment.living)
        row.at, row.reason = time.time(), f"scaled {way} to {count}: {reason}"
        log.info("model_scaled", model=name, replicas=count, reason=reason)
        journal.record_event("scale", row.reason, model=name, replicas=count, **figures)
        deployment.changed()

    def _is_short(self, deployment: Deployment, row: Row, replicas: int) -> None:
        if row.short != replicas:
            row.short = replicas
            self._rooms.short(deployment.model.name, replicas)

    def _publish_status(self, deployment: Deployment, row: Row, size: ReplicaRange) -> None:
        desired = len(deployment.living) + row.short
        told = ScaleStatus(size.min, size.max, desired, row.reason, row.at, row.waits)
        if told != deployment.scale:
            deployment.scale = told
            deployment.changed()


def limits(deployment: Deployment, size: ReplicaRange) -> Limits:
    """Return the limits for the policy."""
    scale = deployment.model.scale
    return Limits(size.least, size.max, scale.wait_s, scale.kv_used, scale.down_s)


def least_to_lose(replicas: Sequence[WorkerProcess]) -> WorkerProcess:
    """Return the replica to remove: one that does not serve, else the least loaded.

    Ties go by the least KV cache in use, then the fewest served requests (the fewest cached
    prompts), then the latest.
    """

    def loses(replica: WorkerProcess) -> tuple[object, ...]:
        pong = replica.liveness.last
        busy = pong.running + pong.waiting
        return replica.serves, busy, round(pong.kv_used, 1), pong.served, -replica.place.index

    return min(replicas, key=loses)


def _waits(limits: Limits, facts: ScalingInput) -> str:
    if facts.failing:
        return "no replica is added while one is failing"
    if facts.coming:
        return ""
    return f"`max` is {limits.most}" if facts.living >= limits.most else "the last did not come up"


def _places(replica: WorkerProcess) -> list[str]:
    return [gpu.uuid for gpu in replica.place.gpus] or [CPU]


def _has_failed(replica: WorkerProcess) -> bool:
    return replica.state in ("failed", "backoff")


def _why_not(replica: WorkerProcess) -> str:
    return replica.reason or "it has failed"
