"""`python -m servekit.system.gpu.nvml_process`: reads the GPUs in a separate process.

Each line on stdin is a question, each line on stdout its answer in JSON:

    gpus     [{"index": 0, "uuid": "GPU-…", "name": "NVIDIA H200", "total_bytes": …,
               "free_bytes": …, "linked": [UUID of each GPU connected by NVLink, …]}, …]
    free     {UUID: bytes}
    memory   {PID: {UUID: bytes}}
    use      [{"index", "uuid", "name", "total_bytes" as above, "used_bytes": …,
               "utilisation": 0 to 1, or null if the GPU does not report it}, …]
    details  {"error": "", "driver": "580.95.05", "cuda": "13.0", "gpus": [as above, and
               "compute_mode": "default", "exclusive" or "prohibited", "mig": false,
               "persistence": true (each None if the GPU does not support it),
               "processes": [[PID, bytes], …]]}; only "error" without NVML

The process is separate, because a broken or busy driver may block a call for minutes while the
supervisor must go on, and because the library takes memory in each process that loads it. It lives
as long as stdin is open, since opening every device again for each reading is slow.

Source: NVML API reference (nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetComputeRunningProcesses).
NVML numbers GPUs by PCI bus, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID. It creates no CUDA
context and takes no GPU memory.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from servekit.system.parent_death import die_with


def answer_questions() -> None:
    die_with(int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignore a terminal's signals
        signal.signal(number, signal.SIG_IGN)
    nvml = _initialise_nvml()
    questions: dict[str, Callable[[Any], Any]] = {
        "gpus": _list_gpus,
        "free": _free_memory,
        "memory": _memory_by_process,
        "use": _gpu_use,
        "details": _gpu_details,
    }
    for line in sys.stdin:
        answer = questions[line.strip()](nvml)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _initialise_nvml() -> Any:
    """Return NVML, or None without library, driver or permission: then there is no usable GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        sys.stderr.write(f"no NVML: {error}\n")
        return None
    return pynvml


def _list_gpus(nvml: Any) -> list[dict[str, Any]]:
    found = [] if nvml is None else list(_gpu_handles(nvml))
    return [
        _read_gpu(nvml, index, handle)
        | {
            "linked": [
                nvml.nvmlDeviceGetUUID(other)
                for number, other in found
                if number != index and _is_linked(nvml, handle, other)
            ]
        }
        for index, handle in found
    ]


def _is_linked(nvml: Any, one: Any, other: Any) -> bool:
    """Return whether NVLink connects them. Source: NVML API reference, nvmlDeviceGetP2PStatus."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False


def _free_memory(nvml: Any) -> dict[str, int]:
    handles = [] if nvml is None else [handle for _, handle in _gpu_handles(nvml)]
    return {nvml.nvmlDeviceGetUUID(one): _memory_of(nvml, one)[1] for one in handles}


def _memory_by_process(nvml: Any) -> dict[int, dict[str, int]]:
    holdings: dict[int, dict[str, int]] = {}
    for _, handle in [] if nvml is None else _gpu_handles(nvml):
        uuid = nvml.nvmlDeviceGetUUID(handle)
        for pid, held_bytes in _gpu_processes(nvml, handle):
            of_pid = holdings.setdefault(pid, {})
            of_pid[uuid] = of_pid.get(uuid, 0) + held_bytes
    return holdings


def _gpu_use(nvml: Any) -> list[dict[str, Any]]:
    found = [] if nvml is None else list(_gpu_handles(nvml))
    return [_use_of(nvml, _read_gpu(nvml, index, handle), handle) for index, handle in found]


def _use_of(nvml: Any, gpu: dict[str, Any], handle: Any) -> dict[str, Any]:
    used_bytes = gpu["total_bytes"] - gpu.pop("free_bytes")
    return {**gpu, "used_bytes": max(0, used_bytes), "utilisation": _read_utilisation(nvml, handle)}


def _read_utilisation(nvml: Any, handle: Any) -> float | None:
    """Return the utilisation, or None under MIG.

    Source: NVML API reference, nvmlDeviceGetUtilizationRates.
    """
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except nvml.NVMLError:
        return None


def _gpu_details(nvml: Any) -> dict[str, Any]:
    if nvml is None:
        return {"error": _why_not()}
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return {
        "error": "",
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [_details_of(nvml, index, handle) for index, handle in _gpu_handles(nvml)],
    }


def _why_not() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return str(error) or repr(error)
    return "it did not answer at first, and does now"


def _details_of(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    def asked(name: str) -> Any:
        try:
            return getattr(nvml, name)(handle)
        except nvml.NVMLError:  # not supported by this GPU or this driver
            return None

    mode, mig = asked("nvmlDeviceGetComputeMode"), asked("nvmlDeviceGetMigMode")
    persistence = asked("nvmlDeviceGetPersistenceMode")
    modes = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
    return _read_gpu(nvml, index, handle) | {
        "compute_mode": None if mode is None else modes.get(mode, str(mode)),
        "mig": None if mig is None else bool(mig[0]),
        "persistence": None if persistence is None else bool(persistence),
        "processes": sorted(_gpu_processes(nvml, handle)),
    }


def _gpu_handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yield index and handle of each GPU that answers; a GPU that fell off the bus is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:
            continue
        yield index, handle


def _read_gpu(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    total_bytes, free_bytes = _memory_of(nvml, handle)
    return {
        "index": index,
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
    }


def _memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return total and free bytes, without the driver's own reserve.

    Source: NVML API reference, nvmlDeviceGetMemoryInfo_v2; older drivers only support the first
    version, which includes the reserve.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.free)
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.free)


def _gpu_processes(nvml: Any, handle: Any) -> Iterator[tuple[int, int]]:
    # A process that also draws is in both lists; the larger figure is the total.
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


if __name__ == "__main__":
    answer_questions()
