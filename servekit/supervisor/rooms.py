"""What models hold, and where there is room: the facts that `residency` decides by, in bytes.

A GPU's room is its memory without the reserve. A model's claim on it is what the file says, else
all of it. On the CPU it is the same with this machine's memory (`CPU`), for models that say; the
others claim nothing. Asleep a model on GPUs holds its weights in the host's memory (`RAM`), and of
the GPU nothing that counts; one on the CPU holds what its workers have resident then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from servekit.config import memory
from servekit.config.schema import ModelConfig
from servekit.supervisor import procfs
from servekit.supervisor.fleet import Fleet
from servekit.supervisor.gpus import Gpu
from servekit.supervisor.reload import Slots

CPU = "cpu"
#: What the host can really hand out now, less what it should not be without.
RAM = "ram"
_RAM_KEPT_BYTES = 2**30
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def claims(model: ModelConfig, slots: Slots, reserve: str | None) -> dict[str, int]:
    """What all replicas of a model claim, by place."""
    found: dict[str, int] = {}
    for slot in slots:
        for gpu in slot:
            found[gpu.uuid] = found.get(gpu.uuid, 0) + _of_gpu(model, gpu, reserve)
        if not slot and model.memory is not None:
            size = memory.of(model.memory, procfs.memory_bytes())
            found[CPU] = found.get(CPU, 0) + size
    return found


def _of_gpu(model: ModelConfig, gpu: Gpu, reserve: str | None) -> int:
    if model.memory is None:
        return gpu.total_bytes - _reserved(gpu, reserve)
    return memory.of(model.memory, gpu.total_bytes)


def _reserved(gpu: Gpu, reserve: str | None) -> int:
    return 0 if reserve is None else min(gpu.total_bytes, memory.of(reserve, gpu.total_bytes))


def asleep(fleet: Fleet, claim: Mapping[str, int]) -> dict[str, int]:
    """What a model would hold asleep, or does."""
    if CPU in claim:
        return {CPU: min(claim[CPU], sum(replica.rss_bytes for replica in fleet.living))}
    if not claim:
        return {}
    info = fleet.info
    weights = 0 if info is None else info.parameters * _BYTES.get(info.dtype, 2)
    return {RAM: weights * len(fleet.slots()) or sum(claim.values())}


def free(
    gpus: Iterable[Gpu], reserve: str | None, held: Iterable[Mapping[str, int]]
) -> dict[str, int]:
    """What nobody holds at each place."""
    found = {gpu.uuid: gpu.total_bytes - _reserved(gpu, reserve) for gpu in gpus}
    found[CPU] = procfs.memory_bytes()
    for one in held:
        for at, size in one.items():
            if at in found:
                found[at] -= size
    found[RAM] = procfs.available_bytes() - _RAM_KEPT_BYTES
    return found
