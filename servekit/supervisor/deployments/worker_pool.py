"""All workers of an instance, and the GPU memory that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.plan import Plan
from servekit.supervisor.lifecycle.managed_process import ProcessEvent, SupervisorContext
from servekit.supervisor.scheduling.gpu_admission import GpuAdmission
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import (
    claim_bytes,
    claims_of,
    host_claim_bytes,
    room_bytes,
)
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu, Slot


class WorkerPool:
    """The workers of all deployments, and the room for more.

    `plan` is the one in force. `run` runs the task of a worker or fork server.
    """

    def __init__(
        self, plan: Plan, host: SupervisorContext, run: Callable[[WorkerProcess | ForkServer], None]
    ) -> None:
        self.plan = plan
        self.host = host
        self.run = run
        self.gate = GpuAdmission(GpuReservations(plan.gpus, plan.config.gpus.reserve))
        self._workers: list[WorkerProcess] = []
        self._heard = asyncio.Event()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.plan.gpus

    @property
    def drain_timeout_s(self) -> float:
        return self.plan.config.server.drain_timeout_s

    def start_worker(self, worker: WorkerProcess) -> None:
        """Run a worker, whose claim counts from now on."""
        self._workers.append(worker)
        worker.listeners.append(self._on_event)
        self.run(worker)

    def remove_worker(self, worker: WorkerProcess) -> None:
        """Forget a worker that has ended."""
        self._workers.remove(worker)
        self._heard.set()

    # ---- room

    def claims(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]:
        """Return the bytes that a worker of `model` would claim of each GPU of `slot`."""
        return claims_of(model, slot, self.plan.config.gpus.reserve)

    def needed_bytes(self, model: ModelConfig, slot: Slot) -> tuple[int, ...]:
        """Return the bytes that must be free on each GPU: the claim by `memory`, or the weights."""
        if model.memory is not None:
            return self.claims(model, slot)
        known = self.plan.estimates.get(model.name)
        return (known.on_each_floor_bytes if known else 0,) * len(slot)

    def has_room(
        self, model: ModelConfig, slot: Slot, *, without: Collection[WorkerProcess] = ()
    ) -> bool:
        """Return whether one more worker fits beside those that exist, apart from `without`."""
        workers = [one for one in self._workers if one not in without]
        if not slot and self.host.launcher is None:
            return _fits_on_host(model, workers)
        reserve = self.plan.config.gpus.reserve
        for gpu in slot:
            taken = sum(self._claimed_bytes(one, gpu) for one in workers)
            if taken + claim_bytes(model, gpu, reserve) > room_bytes(gpu, reserve):
                return False
        return True

    async def wait_for_room(self, model: ModelConfig, slot: Slot) -> None:
        """Wait until one more worker fits. Each event of a worker may have freed memory."""
        while not self.has_room(model, slot):
            self._heard.clear()
            await self._heard.wait()

    def is_taken(self, name: str) -> bool:
        """Return whether a worker has this name, also one of a removed model."""
        taken = any(worker.name == name for worker in self._workers)
        return taken or bool(self.gate.ledger.claim_of(name))  # its memory is not free yet

    def _claimed_bytes(self, worker: WorkerProcess, gpu: Gpu) -> int:
        """Return a worker's claim on a GPU in bytes; for a sleeping worker, what it has kept.

        A failed worker counts as 0: it has no process, and may never have one again.
        """
        if gpu not in worker.place.gpus or worker.state == "failed":
            return 0
        if worker.state == "asleep":
            return self.gate.ledger.claim_of(worker.name).get(gpu.uuid, 0)
        return worker.place.claims[worker.place.gpus.index(gpu)]

    def _on_event(self, event: ProcessEvent) -> None:
        self._heard.set()


def _fits_on_host(model: ModelConfig, workers: Iterable[WorkerProcess]) -> bool:
    """Return whether one more CPU worker fits in this machine's memory, by the claims in the file.

    Models without `memory` claim nothing.
    """
    total_bytes = cgroup.total_memory_bytes()
    claim = host_claim_bytes(model, total_bytes)
    if not claim or not total_bytes:
        return True
    return claim + sum(_host_claim_bytes(one, total_bytes) for one in workers) <= total_bytes


def _host_claim_bytes(worker: WorkerProcess, total_bytes: int) -> int:
    if worker.place.gpus or worker.state == "failed":
        return 0
    claim = host_claim_bytes(worker.model, total_bytes)
    return min(claim, worker.rss_bytes) if worker.state == "asleep" else claim
