"""GPUs of a worker on another node, as that node reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from servekit.protocol.messages import GpuStatus
from servekit.protocol.ray_messages import Measured, RemoteGpu
from servekit.system.gpus import Gpu, Slot


@dataclass(frozen=True, slots=True)
class RemoteGpus:
    """GPU information of one remote worker; empty until the worker is placed."""

    own: Slot = ()  # GPUs assigned to the worker
    gpus: Sequence[Gpu] = ()  # all that NVML knows there
    in_use: tuple[GpuStatus, ...] = ()  # the assigned ones
    pid: int = 0  # PID that `held` belongs to; 0: none
    held: Mapping[str, int] = field(default_factory=dict)  # bytes, by UUID


def given(gpus: Sequence[RemoteGpu], node: str) -> Slot:
    """Return the GPUs that the worker was assigned on its node; their free memory is unknown."""
    return tuple(Gpu(one.index, one.uuid, one.name, one.total_bytes, 0, (), node) for one in gpus)


def measured(own: Slot, node: str, told: Measured) -> RemoteGpus:
    """Return what a worker's node reports; its NVML may be missing, or not answer."""
    found = [replace(one, node=node) for one in told.gpus]
    known = tuple(_gpu(one) for one in found)
    uuids = {gpu.uuid for gpu in own}
    in_use = tuple(one for one in found if one.uuid in uuids)
    return RemoteGpus(own, known or own, in_use, told.pid, told.held)


def _gpu(one: GpuStatus) -> Gpu:
    free_bytes = one.total_bytes - one.used_bytes
    return Gpu(one.index, one.uuid, one.name, one.total_bytes, free_bytes, (), one.node)
