"""Memory held by models and free memory by place, in bytes: the facts for `policy`.

A GPU offers its memory without the reserve. A model claims what is configured, else all of it. On
the CPU the same holds for this machine's memory (`CPU`) and models with `memory`; other models
claim nothing. A sleeping GPU model holds its weights in host memory (`RAM`), and on its GPUs what
it was measured to keep; a sleeping CPU model holds the resident memory of its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from servekit.config import memory
from servekit.config.schema import ModelConfig
from servekit.supervisor.deployments.config_diff import Slots
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import claims_of, room_bytes
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu

CPU = "cpu"
#: Place of the host memory that is really available, less a margin.
RAM = "ram"
_RAM_KEPT_BYTES = 2**30


def claims(model: ModelConfig, slots: Slots, reserve: str | None) -> dict[str, int]:
    """Return the claims of all replicas of a model, by place."""
    found: dict[str, int] = {}
    for slot in slots:
        for gpu, size in zip(slot, claims_of(model, slot, reserve), strict=True):
            found[gpu.uuid] = found.get(gpu.uuid, 0) + size
        if not slot and model.memory is not None:
            size = memory.memory_bytes(model.memory, cgroup.total_memory_bytes())
            found[CPU] = found.get(CPU, 0) + size
    return found


def asleep(
    deployment: Deployment, claim: Mapping[str, int], kept: Mapping[str, int]
) -> dict[str, int]:
    """Return the memory of a sleeping model, or the estimate for one that would sleep.

    `kept` are the bytes that it was measured to keep on its GPUs.
    """
    if CPU in claim:
        return {CPU: min(claim[CPU], sum(replica.rss_bytes for replica in deployment.living))}
    if not claim:
        return {}
    weights = 0 if deployment.info is None else deployment.info.size_bytes
    return {**kept, RAM: weights * len(deployment.planned) or sum(claim.values())}


def kept(deployment: Deployment, ledger: GpuReservations) -> dict[str, int]:
    """Return what a model's sleeping workers claim of their GPUs now."""
    found: dict[str, int] = {}
    for replica in deployment.living:
        for uuid, size in ledger.claim_of(replica.name).items():
            found[uuid] = found.get(uuid, 0) + size
    return found


def free(
    gpus: Sequence[Gpu],
    reserve: str | None,
    held: Iterable[Mapping[str, int]],
    ledger: GpuReservations,
) -> dict[str, int]:
    """Return the free memory by place; ended workers count until NVML shows it free."""
    found = {gpu.uuid: room_bytes(gpu, reserve) for gpu in gpus}
    found[CPU] = cgroup.total_memory_bytes()
    for one in held:
        for at, size in one.items():
            if at in found:
                found[at] -= size
    for gpu in gpus:
        found[gpu.uuid] = min(found[gpu.uuid], ledger.room(gpu.uuid))
    found[RAM] = cgroup.available_memory_bytes() - _RAM_KEPT_BYTES
    return found


def missing_for_loading(deployment: Deployment) -> dict[str, int]:
    """Return the memory that workers waiting to load lack, by GPU, regardless of claims."""
    found: dict[str, int] = {}
    for replica in deployment.living:
        for uuid, size in replica.gpu.lacking.items():
            found[uuid] = found.get(uuid, 0) + size
    return found
