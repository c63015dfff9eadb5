"""Checks of the driver and the GPUs by NVML, of the GPUs' processes, and of torch's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from servekit.diagnostics.finding import Finding
from servekit.system import procfs
from servekit.system.gpu.gpus import Gpu, restrict_gpus
from servekit.system.orphan_cleanup import MARK
from servekit.units import format_bytes

#: Memory that the driver may use itself; only more is reported as held by unknown processes.
_DRIVERS_OWN_BYTES = 2**30

Details = Mapping[str, Any]


def check_gpus(
    present: bool, details: Details | None, torch: Mapping[str, Any] | None, visible: str | None
) -> Iterator[Finding]:
    """Check the GPUs. `details` are NVML's, None if it did not answer; `torch`: if there is one."""
    if not present:
        yield Finding("gpu", "ok", "no NVIDIA driver, so no GPU: workers run on the CPU")
        return
    if details is None or details["error"]:
        reason = details["error"] if details else "it did not answer in time"
        said = f"the driver is there, but NVML cannot be used ({reason}); see `nvidia-smi`"
        yield Finding("driver", "error", said)
        return
    said = f"driver {details['driver']}, for CUDA up to {details['cuda']}"
    yield Finding("driver", "ok", said)
    for gpu in details["gpus"]:
        yield from check_gpu(gpu)
    if torch is not None:
        yield against_torch(details, torch, visible)


def check_gpu(
    gpu: Mapping[str, Any], about: Callable[[int], str] | None = None
) -> Iterator[Finding]:
    """Check one GPU: its settings and processes. `about` describes the process of a PID."""
    name = f"GPU {gpu['index']} ({gpu['name']})"
    free, total = gpu["free_bytes"], gpu["total_bytes"]
    yield Finding(
        "gpu", "ok", f"{name}: {format_bytes(free)} free of {format_bytes(total)}, {gpu['uuid']}"
    )
    if gpu["compute_mode"] == "prohibited":
        said = (
            f"{name} is in prohibited compute mode; as root: nvidia-smi -i {gpu['index']} -c"
            " DEFAULT"
        )
        yield Finding("gpu", "error", said)
    elif gpu["compute_mode"] == "exclusive":
        said = f"{name} is in exclusive mode: one process at a time, so no two models share it, "
        said += f"and a new worker waits for the old; nvidia-smi -i {gpu['index']} -c DEFAULT"
        yield Finding("gpu", "warning", said)
    if gpu["mig"]:
        said = f"{name} is split (MIG): servekit pins whole GPUs; name a MIG-… UUID in `gpus`, or "
        said += f"as root: nvidia-smi -i {gpu['index']} -mig 0"
        yield Finding("gpu", "warning", said)
    if gpu["persistence"] is False:
        said = f"{name} has persistence mode off: each start wakes it for seconds; as root: "
        said += f"nvidia-smi -i {gpu['index']} -pm 1"
        yield Finding("gpu", "warning", said)
    yield from _check_holders(name, gpu, about or describe_process)


def _check_holders(
    name: str, gpu: Mapping[str, Any], about: Callable[[int], str]
) -> Iterator[Finding]:
    known = 0
    for pid, held in sorted(gpu["processes"]):
        known += held
        who = about(pid)
        ours = who.startswith("servekit")
        said = f"{name}: pid {pid} ({who}) holds {format_bytes(held)}"
        if not ours:
            said += "; models cannot use that memory"
        yield Finding("gpu", "ok" if ours else "warning", said)
    unknown = gpu["total_bytes"] - gpu["free_bytes"] - known
    if unknown > _DRIVERS_OWN_BYTES:
        said = (
            f"{name}: {format_bytes(unknown)} are held by processes that cannot be seen from here, "
        )
        said += "such as those of another container"
        yield Finding("gpu", "warning", said)


def describe_process(pid: int) -> str:
    """Return "servekit, python -m …" for a process of an instance, else its command."""
    command = procfs.command_line(pid) or "another user's or container's"
    return f"servekit, {command}" if procfs.has_variable(pid, MARK) else command


def against_torch(
    details: Details, torch: Mapping[str, Any], visible: str | None = None
) -> Finding:
    """Check that torch finds the same GPUs as NVML, under this CUDA_VISIBLE_DEVICES."""
    fields = ("index", "uuid", "name", "total_bytes", "free_bytes")
    found = [Gpu(**{field: gpu[field] for field in fields}) for gpu in details["gpus"]]
    wanted = restrict_gpus(found, visible)
    if torch["error"]:
        return Finding("gpu", "error", "torch cannot be imported, so no GPU can be used")
    if torch["cuda"] is None:
        said = "this torch is built for the CPU only: workers leave the GPUs idle; install torch "
        said += f"for CUDA {details['cuda']} or older"
        return Finding("gpu", "warning", said)
    if _major_version(torch["cuda"]) > _major_version(details["cuda"]):
        said = f"torch needs CUDA {torch['cuda']} and the driver knows {details['cuda']}: update "
        return Finding("gpu", "error", f"{said}the driver, or install an older torch")
    if torch["reason"]:
        said = f"torch cannot use the GPUs that NVML sees: {torch['reason']}"
        return Finding("gpu", "error", said)
    if missing := _missing_in_torch(wanted, torch["gpus"]):
        said = f"torch finds {len(torch['gpus'])} of {len(wanted)} GPUs; not {missing}"
        return Finding("gpu", "error", f"{said}. See CUDA_VISIBLE_DEVICES and `nvidia-smi`")
    return Finding("gpu", "ok", f"torch finds and uses the same {len(wanted)} as NVML")


def _missing_in_torch(wanted: Sequence[Gpu], found: Sequence[str]) -> str:
    """List NVML's GPUs that torch lacks. UUIDs in torch have no "GPU-" prefix."""
    have = {text.removeprefix("GPU-").lower() for text in found}
    return ", ".join(str(g) for g in wanted if g.uuid.removeprefix("GPU-").lower() not in have)


def _major_version(version: str) -> int:
    return int(version.split(".")[0])
