"""Room for one more replica of a model that scales, beside everything that is or may be loaded.

On GPUs, no claim may be in the way, and every on-demand model has to fit still beside the models
that stay. On the CPU, the machine needs the memory that a replica takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from servekit.config import memory
from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.scheduling.bin_packing import Board, Want, candidates
from servekit.supervisor.scheduling.memory_requests import room_bytes
from servekit.supervisor.scheduling.placement import allowed
from servekit.supervisor.scheduling.shared_placement import want_of
from servekit.system import cgroup
from servekit.system.gpu.gpus import Slot
from servekit.units import format_bytes

#: The states of a replica that does not serve yet.
COMING = ("starting", "loading")
#: Host memory that one more replica must leave free.
KEPT_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """The reason why there is no room, as a sentence."""

    reason: str


class CapacityProvider(Protocol):
    """Finder of room for replicas; launchers of remote workers have their own."""

    def one_more(self, deployment: Deployment) -> Slot | NoCapacity:
        """Return the GPUs where one more replica has room now, or why there are none.

        The result is empty on the CPU, and where the cluster chooses.
        """

    def short(self, model: str, replicas: int) -> None:
        """Report on every change for how many replicas of a model there is no room; 0 for none.

        A cluster turns them into pending placements, so that its autoscaler adds nodes.
        """


class LocalCapacity:
    """Room on this machine, which cannot grow."""

    def __init__(self, deployments: DeploymentManager) -> None:
        self._deployments = deployments

    def one_more(self, deployment: Deployment) -> Slot | NoCapacity:
        if all(not slot for slot in deployment.planned):
            return self._on_cpu(deployment)
        return self._on_gpus(deployment)

    def short(self, model: str, replicas: int) -> None:
        """Do nothing: this machine cannot grow."""

    def _on_cpu(self, deployment: Deployment) -> Slot | NoCapacity:
        model, there = deployment.model, cgroup.available_memory_bytes()
        if model.memory is not None:
            total = cgroup.total_memory_bytes()
            takes, there = memory.memory_bytes(model.memory, total), total - self._claimed(total)
        else:
            takes = _resident_bytes(deployment)
            there -= KEPT_BYTES + sum(map(_lacking_bytes, self._deployments.served))
        if takes <= there:
            return ()
        said = f"a replica takes {format_bytes(takes)} of this machine's memory, which has"
        return NoCapacity(f"no room: {said} {format_bytes(max(0, there))} left")

    def _claimed(self, total_bytes: int) -> int:
        """Return the memory claimed by all CPU replicas, including those of unloaded models."""
        return sum(
            memory.memory_bytes(deployment.model.memory, total_bytes)
            * sum(not slot for slot in deployment.planned)
            for deployment in self._deployments.served
            if deployment.model.memory is not None
        )

    def _on_gpus(self, deployment: Deployment) -> Slot | NoCapacity:
        deployments, reserve = self._deployments, self._deployments.plan.config.gpus.reserve
        board = Board({gpu: room_bytes(gpu, reserve) for gpu in deployments.gpus})
        own: Want | None = None
        for other in deployments.all_deployments():
            want = self._placement_request(other.model, other.slots())
            board.placed += [(want, slot) for slot in other.slots() if slot]
            own = want if other is deployment else own
        assert own is not None  # the deployment is served
        for slot in candidates(board, own):
            if deployments.pool.has_room(deployment.model, slot) and not self._lacks(
                deployment.model, slot
            ):
                return slot
        gpus = "no GPU that it may use has" if own.width == 1 else f"no {own.width} GPUs have"
        return NoCapacity(f"no room: {gpus} room for the claim of a replica")

    def _placement_request(self, model: ModelConfig, slots: Sequence[Slot]) -> Want:
        gpus = allowed(0, model, self._deployments.gpus)
        return want_of(model, gpus, slots, self._deployments.plan.config.gpus.reserve)

    def _lacks(self, model: ModelConfig, slot: Slot) -> bool:
        """Return whether ended workers still claim the memory, because it is not free yet."""
        claims = zip(slot, self._deployments.pool.claims(model, slot), strict=True)
        return bool(
            self._deployments.pool.gate.ledger.lacking({gpu.uuid: size for gpu, size in claims})
        )


def _resident_bytes(deployment: Deployment) -> int:
    """Return the memory that a replica of a model takes, as far as is known."""
    return max((one.rss_bytes for one in deployment.living), default=0)


def _lacking_bytes(deployment: Deployment) -> int:
    """Return the memory that replicas which are starting on the CPU have not taken yet."""
    coming = [one for one in deployment.living if one.state in COMING and not one.place.gpus]
    return sum(_resident_bytes(deployment) - one.rss_bytes for one in coming)


class RayCapacity:
    """Room in a Ray cluster, which schedules replicas itself, and may grow.

    Where it has no room, a replica is a pending placement, which Ray's autoscaler sees and
    `servekit ps` shows.
    """

    def one_more(self, deployment: Deployment) -> Slot | NoCapacity:
        return ()

    def short(self, model: str, replicas: int) -> None:
        """Do nothing: Ray's autoscaler sees the pending placements."""
