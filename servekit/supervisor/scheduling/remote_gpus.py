"""The GPUs of a worker that is on another node, as they are told of from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from servekit.protocol.messages import GpuStatus
from servekit.protocol.ray_messages import Measured, RemoteGpu
from servekit.system.gpus import Gpu, Slot


@dataclass(frozen=True, slots=True)
class RemoteGpus:
    """One worker's. Made without anything: it has no place."""

    own: Slot = ()  # those that it was given
    gpus: Sequence[Gpu] = ()  # all that NVML knows there
    in_use: tuple[GpuStatus, ...] = ()  # its own
    pid: int = 0  # of whose memory is told; 0: of none
    held: Mapping[str, int] = field(default_factory=dict)  # bytes, by UUID


def given(gpus: Sequence[RemoteGpu], node: str) -> Slot:
    """What it was given on that node; how much of it is free is not known."""
    return tuple(Gpu(one.index, one.uuid, one.name, one.total_bytes, 0, (), node) for one in gpus)


def measured(own: Slot, node: str, told: Measured) -> RemoteGpus:
    """What a worker's node tells; it may have no NVML, or one that does not answer just now."""
    found = [replace(one, node=node) for one in told.gpus]
    known = tuple(_gpu(one) for one in found)
    uuids = {gpu.uuid for gpu in own}
    in_use = tuple(one for one in found if one.uuid in uuids)
    return RemoteGpus(own, known or own, in_use, told.pid, told.held)


def _gpu(one: GpuStatus) -> Gpu:
    free_bytes = one.total_bytes - one.used_bytes
    return Gpu(one.index, one.uuid, one.name, one.total_bytes, free_bytes, (), one.node)
