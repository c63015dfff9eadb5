"""The GPUs of this machine, read through NVML: no CUDA context, no memory taken.

Source: NVML API reference (nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetComputeRunningProcesses).
NVML numbers GPUs by PCI bus, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

log: Any = structlog.get_logger("servekit.supervisor")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Memory is in bytes, as it was when the GPU was read."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


_ready = False  # whether NVML is initialised in this process

#: Bytes held, by process and GPU UUID.
Holdings = Mapping[int, Mapping[str, int]]


def find_gpus(visible: str | None = None) -> tuple[Gpu, ...]:
    """The GPUs of this machine in NVML's order; none without a driver.

    `visible` is the supervisor's own CUDA_VISIBLE_DEVICES, or None when it is unset: GPUs that it
    hides are not ours to hand out.
    """
    with _nvml() as nvml:
        handles = [] if nvml is None else list(_handles(nvml))
        found = [_read(nvml, index, handle) for index, handle in handles]
    return restrict(found, visible)


def gpu_memory_by_pid() -> Holdings:
    """What each process holds on each GPU, as far as this PID namespace can see."""
    holdings: dict[int, dict[str, int]] = {}
    with _nvml() as nvml:
        for _, handle in [] if nvml is None else _handles(nvml):
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            for pid, held_bytes in _processes(nvml, handle):
                of_pid = holdings.setdefault(pid, {})
                of_pid[uuid] = of_pid.get(uuid, 0) + held_bytes
    return holdings


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


def match(gpus: Sequence[Gpu], entry: int | str) -> Gpu | None:
    """The one GPU that an NVML index or a UUID (or an unambiguous start of one) names."""
    text = str(entry)
    if text.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(text)), None)
    named = [gpu for gpu in gpus if text and gpu.uuid.lower().startswith(text.lower())]
    return named[0] if len(named) == 1 else None


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, or None without a driver.

    Once initialised it stays so for the life of the process: opening every device anew for each
    look took a third of a core on a machine with two H200.
    """
    global _ready
    try:
        import pynvml

        if not _ready:
            pynvml.nvmlInit()
            _ready = True
    except Exception:  # no library, no driver, no permission: all mean that there is no GPU for us
        yield None
        return
    yield pynvml


def _handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Index and handle of each GPU that answers; one that has fallen off the bus is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            log.warning("a GPU does not answer", index=index, reason=str(error))
        else:
            yield index, handle


def _read(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _processes(nvml: Any, handle: Any) -> Iterator[tuple[int, int]]:
    # A process shows up in both lists when it also draws; the larger figure is the whole.
    held: dict[int, int] = {}
    queries: tuple[Callable[[Any], Any], ...] = (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    )
    for query in queries:
        try:
            processes = query(handle)
        except nvml.NVMLError:  # not supported by this GPU or this driver
            continue
        for process in processes:
            held[process.pid] = max(held.get(process.pid, 0), int(process.usedGpuMemory or 0))
    yield from held.items()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
