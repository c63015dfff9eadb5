"""The GPUs of this machine, as NVML tells of them (`supervisor.nvml`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.protocol.messages import GpuStatus
from servekit.system.nvml_client import driver, is_present


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory is in bytes, as it was when the GPU was read; what the driver keeps for
    itself is in neither figure."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    linked: tuple[str, ...] = ()  # UUIDs of the GPUs that NVLink joins it to
    node: str = ""  # of a cluster, where it is; "": here

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}){on_node(self.node)}"


#: The GPUs of one worker, in NVML's order; none for one on the CPU.
Slot = tuple[Gpu, ...]
#: Bytes held, by process and GPU UUID.
Holdings = Mapping[int, Mapping[str, int]]


def find_gpus(visible: str | None = None) -> tuple[Gpu, ...]:
    """The GPUs of this machine in NVML's order; none without a driver.

    `visible` is the supervisor's own CUDA_VISIBLE_DEVICES, or None when it is unset: GPUs that it
    hides are not ours to hand out. Blocks while a driver wakes its GPUs.
    """
    found = driver.ask("gpus") if is_present() else None
    gpus = [Gpu(**{**gpu, "linked": tuple(gpu["linked"])}) for gpu in found or ()]
    return restrict(gpus, visible)


def gpu_memory_by_pid() -> Holdings:
    """What each process holds on each GPU, as far as this PID namespace can see. Blocks."""
    found = driver.ask("memory") if is_present() else None
    return {int(pid): held for pid, held in (found or {}).items()}


def free_bytes() -> Mapping[str, int]:
    """What is free of each GPU now, by UUID; empty where the driver does not answer. Blocks."""
    found = driver.ask("free") if is_present() else None
    return found or {}


def gpus_in_use(ours: Sequence[Gpu] | None = None) -> tuple[GpuStatus, ...]:
    """How full and how busy our GPUs, or all, are now; empty where the driver does not answer.

    Blocks.
    """
    found = [GpuStatus(**gpu) for gpu in (driver.ask("use") if is_present() else None) or ()]
    known = {gpu.uuid for gpu in (found if ours is None else ours)}
    return tuple(gpu for gpu in found if gpu.uuid in known)


def restrict(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indexes or UUID prefixes, cut at the first bad one.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = match(gpus, entry.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def on_node(name: str) -> str:
    """ " on 10.0.0.5"; nothing of what is here."""
    return f" on {name}" if name else ""


def match(gpus: Sequence[Gpu], entry: int | str) -> Gpu | None:
    """The one GPU that an NVML index or a UUID (or an unambiguous start of one) names."""
    text = str(entry)
    if text.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    named = [gpu for gpu in gpus if text and gpu.uuid.lower().startswith(text.lower())]
    return named[0] if len(named) == 1 else None
