"""The GPUs of this machine, as NVML reports them (`nvml_client`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.protocol.messages import GpuStatus
from servekit.system.gpu.nvml_client import driver, is_present


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Memory is in bytes at the time of the reading, without the driver's own part."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    linked: tuple[str, ...] = ()  # UUIDs of the GPUs connected by NVLink
    node: str = ""  # its cluster node; "": this machine

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}){on_node(self.node)}"


#: The GPUs of one worker, in NVML's order; empty for a CPU worker.
Slot = tuple[Gpu, ...]
#: Bytes held, by process and GPU UUID.
Holdings = Mapping[int, Mapping[str, int]]


def find_gpus(visible: str | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine in NVML's order; none without a driver.

    `visible` is the supervisor's own CUDA_VISIBLE_DEVICES, or None if unset: GPUs that it hides are
    not used. Blocks while a driver initialises its GPUs.
    """
    found = driver.query("gpus") if is_present() else None
    gpus = [Gpu(**{**gpu, "linked": tuple(gpu["linked"])}) for gpu in found or ()]
    return restrict_gpus(gpus, visible)


def gpu_memory_by_pid() -> Holdings:
    """Return the bytes that each process in this PID namespace holds, by GPU. Blocks."""
    found = driver.query("memory") if is_present() else None
    return {int(pid): held for pid, held in (found or {}).items()}


def free_bytes() -> Mapping[str, int]:
    """Return the free bytes by GPU UUID; empty if the driver does not answer. Blocks."""
    found = driver.query("free") if is_present() else None
    return found or {}


def gpus_in_use(ours: Sequence[Gpu] | None = None) -> tuple[GpuStatus, ...]:
    """Return memory use and utilisation of our GPUs, or of all; empty without the driver's answer.

    Blocks.
    """
    found = [GpuStatus(**gpu) for gpu in (driver.query("use") if is_present() else None) or ()]
    known = {gpu.uuid for gpu in (found if ours is None else ours)}
    return tuple(gpu for gpu in found if gpu.uuid in known)


def restrict_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indexes or UUID prefixes, up to the first bad one.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = match_gpu(gpus, entry.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def on_node(name: str) -> str:
    """Return such as " on 10.0.0.5"; "" for this machine."""
    return f" on {name}" if name else ""


def match_gpu(gpus: Sequence[Gpu], entry: int | str) -> Gpu | None:
    """Return the GPU that an NVML index, a UUID or an unambiguous UUID prefix names."""
    text = str(entry)
    if text.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    named = [gpu for gpu in gpus if text and gpu.uuid.lower().startswith(text.lower())]
    return named[0] if len(named) == 1 else None
